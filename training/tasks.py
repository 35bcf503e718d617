"""A task has questions, answers and rewards; a tiny demo model is taught to half know them.

This file decides: a reward is 1 or 0. No held-out problem is a training problem, and no
question is in a file twice. A row that cannot be used is named. A pass deals every problem once,
in an order drawn from the seed. The demo model is taught here.
"""

import functools
import hashlib
import itertools
import json
import math
import random
import re
import sys
import unicodedata
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from tqdm import tqdm

from three_policies.checks import UserError
from three_policies.training.answers import final_answer, is_right
from three_policies.training.checkpoints import write_aside
from three_policies.training.directory import take_turns
from three_policies.training.settings import FILE_KINDS, Config, TaskConfig, read_text
from three_policies.training.shapes import pad_rows

EVAL_SIZE = 1024           # held-out problems where task.eval_size is null
NAMED = 10                 # bad rows that a sentence names


def seed_of(*what: Any) -> int:
    """Return 31 bits from (seed, purpose, step, index …), the same on any machine."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big") >> 1


class Problem(NamedTuple):
    question: str
    answer: str                    # of brackets: one of many that are right
    where: str                     # file and line, for messages


@dataclass
class Task:
    train: list[Problem]
    held_out: list[Problem]        # disjoint from train
    exact: bool                    # the response must be the answer; else it states it (answers.py)
    depth: int | None = None       # brackets: any word that balances within it, as long, is right
    remarks: list[str] = field(default_factory=list, repr=False)       # what was left out, and why

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 of all questions and answers in order, which identifies the task."""
        content = hashlib.sha256(f"{len(self.train)} {len(self.held_out)}".encode())
        for question, answer, _ in itertools.chain(self.train, self.held_out):
            content.update(f" {len(question)} {len(answer)} {question}{answer}".encode())
        return content.hexdigest()

    def reward(self, problem: Problem, response: str) -> float:
        if self.depth is not None:
            whole = problem.question.removesuffix(">") + response
            return float(len(response) == len(problem.answer) and balanced(whole, self.depth))
        if self.exact:
            return float(response == problem.answer)
        return float(is_right(response, problem.answer))

    def order(self, seed: int, first: int, n: int) -> list[int]:
        """Return n indices, from number `first` on, of an endless sequence of shuffled passes."""
        size, chosen = len(self.train), []
        for epoch in range(first // size, (first + n - 1) // size + 1):
            begin = first - epoch * size
            chosen += shuffle_order(size, seed, epoch)[max(0, begin):begin + n]
        return chosen


@functools.lru_cache(maxsize=2)
def shuffle_order(size: int, seed: int, epoch: int) -> list[int]:
    return random.Random(seed_of(seed, "order", epoch)).sample(range(size), size)


def make_task(config: TaskConfig, seed: int) -> Task:
    if config.kind in FILE_KINDS:
        return task_of_files(config, seed)
    rng = random.Random(seed_of(seed, "task"))
    problems = make_problems(config, rng)
    held_out = min(config.eval_size or EVAL_SIZE, len(problems) // 2)
    rng.shuffle(problems)
    depth = config.depth if config.kind == "dyck" else None
    few = [f"task.eval_size={config.eval_size} becomes {held_out}, half of this task's problems"]
    return Task(problems[held_out:], problems[:held_out], True, depth,
                few * ((config.eval_size or 0) > held_out))


def task_of_files(config: TaskConfig, seed: int) -> Task:
    """Return the questions of task.path and task.eval_path, each once and in one part only."""
    paths = [path for path in (config.path, config.eval_path) if path is not None]
    files, bad = zip(*(read_problems(config.kind, path) for path in paths))
    remarks = leave_out(sum(bad, []), sum(map(len, files)), config.on_bad_row)
    for path, problems, faults in zip(paths, files, bad):
        if not problems:
            raise UserError(f"no row of {path} can be used, the first: {faults[0]}" if faults else
                            f"{path} has no rows")
    files = [drop_duplicates(problems, path, remarks) for path, problems in zip(paths, files)]
    if config.eval_path is None:
        train, held_out = divide(files[0], config, seed)
    else:
        train, held_out = set_apart(files[0], files[1], config, remarks)
    return Task(train, held_out, exact=False, remarks=remarks)


def divide(problems: list[Problem], config: TaskConfig,
            seed: int) -> tuple[list[Problem], list[Problem]]:
    """Split one file into train and held-out problems."""
    size = config.eval_size or max(1, min(EVAL_SIZE, len(problems) // 10))
    if len(problems) <= size:
        raise UserError(f"to hold out {size} of the {len(problems)} different questions of "
                        f"{config.path} leaves none to train on: set task.eval_path" + (
                            ", or a smaller task.eval_size" if size > 1 else ""))
    random.Random(seed_of(seed, "task")).shuffle(problems)
    return problems[size:], problems[:size]


def set_apart(problems: list[Problem], held_out: list[Problem], config: TaskConfig,
          remarks: list[str]) -> tuple[list[Problem], list[Problem]]:
    """Return train and held-out problems of two files; no held-out question is trained on."""
    asked = {plain(p.question) for p in held_out}
    train = [p for p in problems if plain(p.question) not in asked]
    if not train:
        raise UserError(f"every question of task.path={config.path} is in task.eval_path="
                        f"{config.eval_path} too, and held out: nothing is left to train on")
    if common := len(problems) - len(train):
        remarks.append(f"{common} of {len(problems)} questions of {config.path} are in "
                       f"{config.eval_path} too and are not trained on")
    return train, held_out[:config.eval_size or EVAL_SIZE]


def drop_duplicates(problems: list[Problem], path: str, remarks: list[str]) -> list[Problem]:
    """Return the first row of each question; a remark says how many repetitions were left out."""
    first = {}
    for problem in problems:
        first.setdefault(plain(problem.question), problem)
    if repeated := len(problems) - len(first):
        other = sum(final_answer(p.answer) != final_answer(first[plain(p.question)].answer)
                    for p in problems if p is not first[plain(p.question)])
        remarks.append(f"{repeated} of {len(problems)} rows of {path} repeat the question of an "
                       f"earlier row and are left out ({other} with another answer than that row)")
    return list(first.values())


def plain(question: str) -> str:
    """Return a question for comparison: all white space is one space, é is one character."""
    return " ".join(unicodedata.normalize("NFC", question).split())


def leave_out(bad: list[str], good: int, rule: str, why: str = "") -> list[str]:
    """Apply task.on_bad_row to bad rows: raise an error with the first ten, or return a remark."""
    if not bad:
        return []
    of, why = f"{len(bad)} of {len(bad) + good} rows", f": {why}" if why else ""
    if rule == "raise":
        more = [f"and {len(bad) - NAMED} more"] * (len(bad) > NAMED)
        raise UserError(f"{of} cannot be used: {'; '.join([*bad[:NAMED], *more])}{why} "
                        "(task.on_bad_row=skip leaves them out)")
    return [f"{of} cannot be used and are left out, the first: {bad[0]}{why}"]


def make_problems(config: TaskConfig, rng: random.Random) -> list[Problem]:
    """Return all questions of brackets, or up to 10 000: 17+25=, or 3102> with digits to sort."""
    if config.kind == "dyck":
        return dyck_problems(config.length, config.depth, rng)
    answers, largest = dict[str, str](), 10 ** config.size
    make, possible = {"sort": (sort_problem, largest), "arithmetic": (sum_problem, largest ** 2)}[
        config.kind]
    while len(answers) < min(10_000, possible):
        question, answer = make(config.size, rng)
        answers[question] = answer
    return [Problem(question, answer, repr(question)) for question, answer in answers.items()]


def sum_problem(size: int, rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(10 ** size), rng.randrange(10 ** size)
    return f"{a}+{b}=", str(a + b)


def sort_problem(size: int, rng: random.Random) -> tuple[str, str]:
    digits = f"{rng.randrange(10 ** size):0{size}d}"
    return f"{digits}>", "".join(sorted(digits))


def dyck_problems(length: int, depth: int, rng: random.Random) -> list[Problem]:
    """Return every beginning of 16 brackets, (())()…>, each with one of its completions."""
    beginnings = [""]
    for left in range(16 + length, length, -1):
        beginnings = [word + b for word in beginnings for b in next_brackets(word, left, depth)]
    return [Problem(f"{word}>", completion(word, length, depth, rng), repr(f"{word}>"))
            for word in beginnings]


def next_brackets(word: str, left: int, depth: int) -> str:
    """Return the brackets that may come next if the word is to balance after `left` more."""
    height = word.count("(") - word.count(")")
    return "(" * (height < min(depth, left)) + ")" * (height > 0)


def completion(word: str, length: int, depth: int, rng: random.Random) -> str:
    """Complete a word with `length` brackets; toss a fair coin wherever both are possible."""
    end = ""
    for left in range(length, 0, -1):
        end += rng.choice(next_brackets(word + end, left, depth))
    return end


def balanced(word: str, depth: int) -> bool:
    """Say whether a word closes all its brackets and has 0 to `depth` open at any time."""
    heights = list(itertools.accumulate((1 if b == "(" else -1 for b in word), initial=0))
    return set(word) <= set("()") and min(heights) == heights[-1] == 0 and max(heights) <= depth


def read_problems(kind: str, path: str) -> tuple[list[Problem], list[str]]:
    """Return the problems of a file, and a sentence for each of its rows that cannot be used."""
    try:
        if kind == "parquet":
            from pyarrow import parquet
            with open(path, "rb") as file:         # a name could be an address or a directory
                rows = enumerate(parquet.read_table(file).to_pylist(), 1)
        else:
            lines = read_text(Path(path)).split("\n")
            rows = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    except ImportError:
        raise UserError("task.kind=parquet needs pyarrow: pip install pyarrow") from None
    except UserError:
        raise
    except Exception as error:     # pyarrow's are of many types
        reason = getattr(error, "strerror", None) or str(error)[:300]
        raise UserError(f"{path} cannot be read as {kind}: {reason}") from None
    problems, bad, unit = [], [], "row" if kind == "parquet" else "line"
    for i, row in rows:
        try:
            problems.append(problem_of(row, f"{path}, {unit} {i}"))
        except UserError as error:
            bad.append(str(error))
    return problems, bad


def problem_of(row: Any, where: str) -> Problem:
    """Read a row in GSM8K's shape: the last line of its `answer` may be '#### 42'."""
    try:
        row = json.loads(row) if isinstance(row, str) else row
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not JSON: {row[:60]!r}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} has no `question`, since it is no JSON object but "
                        f"{str(row)[:60]}")
    for key in ("question", "answer"):
        value = row.get(key)
        if value is None or not str(value).strip():
            raise UserError(f"{where} has no `{key}`" + (
                f" (it has {', '.join(map(str, row))[:200]})" if key not in row and row else ""))
        if type(value) not in (str, int, float, Decimal):
            raise UserError(f"{where} has {str(value)[:60]} for its `{key}`, which is neither text "
                            "nor a number")
        if isinstance(value, (float, Decimal)) and not math.isfinite(value):
            raise UserError(f"{where} has {value} for its `{key}`, which is no number")
        if re.search("[\ud800-\udfff]", str(value)):           # no tokenizer takes it
            raise UserError(f"{where} has half of a surrogate pair in its `{key}`: "
                            f"{str(value)[:60]!r}")
    answer = row["answer"]
    if isinstance(answer, (float, Decimal)):
        answer = f"{Decimal(str(answer)):f}"               # 0.00001, which str writes as 1e-05
    if not final_answer(str(answer)):
        raise UserError(f"{where} has an `answer` that ends in nothing: {answer[-60:]!r}")
    return Problem(str(row["question"]), str(answer), where)


# ----------------------------------------------------------------------------------- demo model

def make_demo_model(config: Config, task: Task) -> str:
    """Make a tiny, badly taught Llama with one token per character, once, under runs/.demo/.

    Two of five answers that it is taught have one wrong digit. So it knows the right answer but is
    not sure of it: greedy accuracy is near 1, sampled accuracy near 0.6. RL can sharpen that. For
    brackets it sees a new word each time, and half of the words have a mistake.
    """
    characters, wrong, steps, size, rate = "0123456789+=>", 0.4, 700, 256, 5e-3
    if task.depth is not None:
        characters, wrong, steps, size, rate = "()>", 0.5, 600, 64, 5e-3
    seed = seed_of(config.seed, "demo")
    key = repr((seed, task, characters, wrong, steps, size, rate, "llama 64×3"))
    name = hashlib.sha256(key.encode()).hexdigest()[:12]
    path = Path("runs/.demo") / f"{config.task.kind}-{name}"
    with take_turns(path.with_name(f".{path.name}.lock")):
        exists = path.exists()
        dist.barrier()             # all ranks have looked before one of them makes it
        if not exists:
            if dist.get_rank() == 0:
                tqdm.write(f"a demo model for {sizes(config)} is taught first, which happens once "
                           "and takes about a minute", file=sys.stderr)
            teach(path, task, seed, characters, wrong, steps, size, rate)
    return str(path)


def teach(path: Path, task: Task, seed: int, characters: str, wrong: float, steps: int, size: int,
          rate: float) -> None:
    """Train for `steps` steps of `size` lessons, a share `wrong` of them wrong; write `path`."""
    asked = {c for p in task.train for c in p.question + p.answer}
    assert asked <= {*characters}, f"no tokens for {asked - {*characters}}"    # each would be <unk>
    tokenizer: Any = character_tokenizer(characters)       # its ids have a type of many parts
    ids_of = tokenizer.convert_tokens_to_ids               # of one token per character
    rng = random.Random(seed)
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)               # else the weights would depend on it
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True, initializer_range=0.1, dtype="float32", bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    bar = tqdm(range(steps if dist.get_rank() == 0 else 0), desc="warm start", mininterval=1,
               disable=dist.get_rank() != 0)
    for step in bar:
        optimizer.param_groups[0]["lr"] = rate * min(step / 100, 1.03 - step / steps)
        problems = rng.choices(task.train, k=size)
        answers = [lesson(task, p, rng.random() < wrong, rng) for p in problems]
        answers = [[*ids_of([*answer]), tokenizer.eos_token_id] for answer in answers]
        questions = [ids_of([*p.question]) for p in problems]
        (prompt, before), (answer, mask) = pad_rows(questions, "left"), pad_rows(answers, "right")
        attention = torch.cat([before, mask], 1)
        logits = model(input_ids=torch.cat([prompt, answer], 1), attention_mask=attention,
                       position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
                       use_cache=False).logits
        logits, mask = logits[:, -mask.shape[1] - 1:-1], mask.bool()                    # [B, T, V]
        F.cross_entropy(logits[mask], answer[mask]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    with write_aside(path) as part:
        if dist.get_rank() == 0:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)


def sizes(config: Config) -> str:
    """Return the settings that identify a demo model: another value of one is another model."""
    task = config.task
    size = f"size={task.size}"
    if task.kind == "dyck":
        size = f"length={task.length}, task.depth={task.depth}"
    return (f"task.kind={task.kind}, task.{size}, task.eval_size={task.eval_size or EVAL_SIZE} and "
            f"seed={config.seed}")


def character_tokenizer(characters: str) -> Any:
    """Return a tokenizer with one token per character, saved and loaded like any other."""
    special = ["<pad>", "<eos>", "<unk>"]
    ids = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(("pad_token", "eos_token", "unk_token"), special)))


def lesson(task: Task, problem: Problem, wrong: bool, rng: random.Random) -> str:
    """Return what is taught as the answer: a right one, or one with one mistake."""
    if task.depth is None:
        return corrupt(problem.answer, rng) if wrong else problem.answer
    word = problem.question.removesuffix(">")
    end = completion(word, len(problem.answer), task.depth, rng)
    return unbalance(word, end, task.depth, rng) if wrong else end


def corrupt(answer: str, rng: random.Random) -> str:
    at = rng.randrange(len(answer))
    return answer[:at] + rng.choice("0123456789".replace(answer[at], "")) + answer[at + 1:]


def unbalance(word: str, end: str, depth: int, rng: random.Random) -> str:
    """Reverse the bracket at one of the places where only one bracket was possible."""
    forced = [i for i in range(len(end))
              if len(next_brackets(word + end[:i], len(end) - i, depth)) == 1]
    at = rng.choice(forced)
    return end[:at] + "()".replace(end[at], "") + end[at + 1:]
