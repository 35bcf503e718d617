"""The tasks: questions, answers and rewards; and a tiny model that has half learned one.

This file decides: a reward is right or wrong; held-out problems are no training problems; every
problem is dealt once in a pass, in an order drawn from the seed. The demo model is taught here.
"""

import functools
import hashlib
import itertools
import json
import random
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from tqdm import tqdm

from plumbing.checkpoints import aside
from plumbing.settings import Config, TaskConfig, UserError, read_text
from policy import padded


DEMO_KINDS = ("arithmetic", "sort", "dyck")     # made here, and taught to the demo model


def seed_of(*what) -> int:
    """31 bits from (seed, purpose, step, index …): the same in every process, on any machine."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big") >> 1


class Problem(NamedTuple):
    question: str
    answer: str                    # of brackets: one of many that are right
    where: str                     # file and line, for messages


@dataclass
class Task:
    train: list[Problem]
    held_out: list[Problem]        # disjoint from train
    exact: bool                    # the response must be the answer; else it ends with it
    depth: int | None = None       # brackets: any word that balances within it, as long, is right

    def reward(self, problem: Problem, response: str) -> float:
        if self.depth is not None:
            whole = problem.question.removesuffix(">") + response
            return float(len(response) == len(problem.answer) and balanced(whole, self.depth))
        if self.exact:
            return float(response == problem.answer)
        return float(final_answer(response) == final_answer(problem.answer))

    def order(self, seed: int, first: int, n: int) -> list[int]:
        """Indices first … first + n of an endless sequence of shuffled passes over `train`."""
        size, chosen = len(self.train), []
        for epoch in range(first // size, (first + n - 1) // size + 1):
            begin = first - epoch * size
            chosen += shuffled(size, seed, epoch)[max(0, begin):begin + n]
        return chosen


@functools.lru_cache(maxsize=2)
def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    return random.Random(seed_of(seed, "order", epoch)).sample(range(size), size)


def make_task(config: TaskConfig, seed: int) -> Task:
    rng, exact = random.Random(seed_of(seed, "task")), config.kind in DEMO_KINDS
    problems = (make_problems if exact else read_problems)(config, rng, config.path)
    if config.eval_path is not None:
        held_out = read_problems(config, rng, config.eval_path)
        return Task(problems, held_out[:config.eval_size], exact)
    held_out = min(config.eval_size, len(problems) // 2) if exact else config.eval_size
    if len(problems) <= held_out:
        raise UserError(f"{config.path} has {len(problems)} rows, too few to hold out "
                        f"task.eval_size={held_out} of them: set task.eval_path or a smaller "
                        "task.eval_size")
    rng.shuffle(problems)
    depth = config.depth if config.kind == "dyck" else None
    return Task(problems[held_out:], problems[:held_out], exact, depth)


def make_problems(config: TaskConfig, rng: random.Random, _) -> list[Problem]:
    """Up to 10 000 different questions: 17+25=, 3102> for digits to be sorted, or brackets."""
    if config.kind == "dyck":
        return dyck_problems(config.length, config.depth, rng)
    largest, sort, answers = 10 ** config.size, config.kind == "sort", {}
    wanted = min(10_000, largest if sort else largest ** 2)
    while len(answers) < wanted:
        if sort:
            digits = f"{rng.randrange(largest):0{config.size}d}"
            answers[f"{digits}>"] = "".join(sorted(digits))
        else:
            a, b = rng.randrange(largest), rng.randrange(largest)
            answers[f"{a}+{b}="] = str(a + b)
    return [Problem(question, answer, repr(question)) for question, answer in answers.items()]


def dyck_problems(length: int, depth: int, rng: random.Random) -> list[Problem]:
    """Every beginning of 16 brackets, (())()…>, each with one of its ends."""
    beginnings = [""]
    for left in range(16 + length, length, -1):
        beginnings = [word + b for word in beginnings for b in next_brackets(word, left, depth)]
    return [Problem(f"{word}>", completion(word, length, depth, rng), repr(f"{word}>"))
            for word in beginnings]


def next_brackets(word: str, left: int, depth: int) -> str:
    """The brackets that may come next if `left` more in all are to balance it within the depth."""
    height = word.count("(") - word.count(")")
    return "(" * (height < min(depth, left)) + ")" * (height > 0)


def completion(word: str, length: int, depth: int, rng: random.Random) -> str:
    """So many brackets more that balance the word: a fair coin wherever both are possible."""
    end = ""
    for left in range(length, 0, -1):
        end += rng.choice(next_brackets(word + end, left, depth))
    return end


def balanced(word: str, depth: int) -> bool:
    """Never below 0 open brackets, never more than `depth`, and 0 in the end."""
    heights = list(itertools.accumulate((1 if b == "(" else -1 for b in word), initial=0))
    return set(word) <= set("()") and min(heights) == heights[-1] == 0 and max(heights) <= depth


def read_problems(config: TaskConfig, _, path: str) -> list[Problem]:
    """Rows with `question` and `answer` in GSM8K's shape: the last line may be '#### 42'."""
    try:
        if config.kind == "parquet":
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
        raise UserError(f"{path} cannot be read as {config.kind}: {reason}") from None
    problems, unit = [], "row" if config.kind == "parquet" else "line"
    for i, row in rows:
        where = f"{path}, {unit} {i}"
        try:
            row = json.loads(row) if isinstance(row, str) else row
        except (ValueError, RecursionError):
            raise UserError(f"{where} is not JSON: {row[:60]!r}") from None
        values = [row.get(k) if isinstance(row, dict) else None for k in ("question", "answer")]
        for key, value in zip(("question", "answer"), values):
            if type(value) not in (str, int, float) or not str(value).strip():
                raise UserError(f"{where} has no `{key}`")
            if re.search("[\ud800-\udfff]", str(value)):       # no tokenizer takes it
                raise UserError(f"{where} has half a character in its `{key}`: {value[:60]!r}")
        if not final_answer(str(values[1])):
            raise UserError(f"{where} has an `answer` that ends in nothing: {values[1][-60:]!r}")
        problems.append(Problem(str(values[0]), str(values[1]), where))
    if not problems:
        raise UserError(f"{path} has no rows")
    return problems


def final_answer(text: str) -> str:
    r"""What follows the last ####, else the last \boxed{…}, else the whole; 1234 for $1,234.0."""
    if "####" in text:
        text = text.rsplit("####", 1)[1].strip().split("\n")[0]
    elif "\\boxed{" in text:
        text, depth = text.rsplit("\\boxed{", 1)[1], 1
        for end, character in enumerate(text):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                text = text[:end]
                break
    text = text.strip().removesuffix(".").replace("\\$", "").replace("$", "").strip()
    number = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    if re.fullmatch(r"[-+]?(\d{1,300}(\.\d{0,300})?|\.\d{1,300})", number, re.ASCII):
        return f"{Decimal(number).normalize() + 0:f}"     # + 0: −0 is 0
    return text


# ----------------------------------------------------------------------------------- demo model

def make_demo_model(config: Config, task: Task) -> str:
    """A tiny Llama with one token per character, badly taught; made once, under runs/.demo/.

    Taught with two answers in five wrong in one digit, it knows the right answer but is not sure
    of it: greedy accuracy is near 1, sampled accuracy below 0.65. RL can sharpen that. Of brackets
    it sees a new word each time, every other one with a mistake.
    """
    characters, wrong, steps, size, rate = "0123456789+=>", 0.4, 700, 256, 5e-3
    if task.depth is not None:
        characters, wrong, steps, size, rate = "()>", 0.5, 600, 64, 5e-3
    seed = seed_of(config.seed, "demo")
    key = repr((seed, task, characters, wrong, steps, size, rate, "llama 64×3"))
    name = hashlib.sha256(key.encode()).hexdigest()[:12]
    path = Path("runs/.demo") / f"{config.task.kind}-{name}"
    exists = path.exists()
    dist.barrier()                 # all ranks have looked before one of them makes it
    if exists:
        return str(path)
    tokenizer, rng = character_tokenizer(characters), random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
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
        answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(answers).input_ids]
        questions = tokenizer([p.question for p in problems]).input_ids
        (prompt, before), (answer, mask) = padded(questions, "left"), padded(answers, "right")
        attention = torch.cat([before, mask], 1)
        logits = model(input_ids=torch.cat([prompt, answer], 1), attention_mask=attention,
                       position_ids=(attention.cumsum(-1) - 1).clamp(min=0)).logits
        logits, mask = logits[:, -mask.shape[1] - 1:-1], mask.bool()                    # [B, T, V]
        F.cross_entropy(logits[mask], answer[mask]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with aside(path) as part:
        if dist.get_rank() == 0:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
    return str(path)


def character_tokenizer(characters: str):
    """One token per character, saved and loaded like any other Hugging Face tokenizer."""
    special = ["<pad>", "<eos>", "<unk>"]
    ids = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(("pad_token", "eos_token", "unk_token"), special)))


def lesson(task: Task, problem: Problem, wrong: bool, rng: random.Random) -> str:
    """What is taught as the answer: a right one, or one with one mistake."""
    if task.depth is None:
        return corrupted(problem.answer, rng) if wrong else problem.answer
    word = problem.question.removesuffix(">")
    end = completion(word, len(problem.answer), task.depth, rng)
    return unbalanced(word, end, task.depth, rng) if wrong else end


def corrupted(answer: str, rng: random.Random) -> str:
    at = rng.randrange(len(answer))
    return answer[:at] + rng.choice("0123456789".replace(answer[at], "")) + answer[at + 1:]


def unbalanced(word: str, end: str, depth: int, rng: random.Random) -> str:
    """The other bracket at one of the places where a single one was possible."""
    forced = [i for i in range(len(end))
              if len(next_brackets(word + end[:i], len(end) - i, depth)) == 1]
    at = rng.choice(forced)
    return end[:at] + "()".replace(end[at], "") + end[at + 1:]
