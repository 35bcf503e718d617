"""A task has questions, answers and rewards.

This file decides: no held-out problem is a training problem, and no question is in a file twice. A
row that cannot be used is named. A pass deals every problem once, in an order drawn from the seed.
"""

import functools
import hashlib
import importlib
import itertools
import json
import math
import random
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from three_policies.checks import UserError, nearest
from three_policies.training.answers import final_answer, is_right
from three_policies.training.rewards import by_last_number, last_number, own_reward
from three_policies.training.settings import FILE_KINDS, TaskConfig, read_text

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
    score: Callable[[Problem, str], float] | None = field(default=None, repr=False)
    metadata: dict[str, dict] = field(default_factory=dict, repr=False)       # by question

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 of all questions and answers in order, which identifies the task."""
        content = hashlib.sha256(f"{len(self.train)} {len(self.held_out)}".encode())
        for question, answer, _ in itertools.chain(self.train, self.held_out):
            content.update(f" {len(question)} {len(answer)} {question}{answer}".encode())
        return content.hexdigest()

    def reward(self, problem: Problem, response: str) -> float:
        if self.score is not None:
            return self.score(problem, response)
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
    """Make the questions, and what scores a response where that is not their own rule."""
    task = questions_of(config, seed)
    if config.reward is not None:
        own = own_reward(config.reward)
        task.score = lambda problem, text: own(problem.question, problem.answer, text)
    elif task.score is not None and config.match == "last_number":
        gym = task.score
        task.score = lambda problem, text: gym(problem, last_number(text))
    elif config.kind in FILE_KINDS and config.match == "last_number":
        task.score = lambda problem, text: by_last_number(*problem[:2], text)
    return task


def questions_of(config: TaskConfig, seed: int) -> Task:
    if config.kind in FILE_KINDS:
        return task_of_files(config, seed)
    if config.kind == "reasoning_gym":
        return task_of_gym(config, seed)
    rng = random.Random(seed_of(seed, "task"))
    problems = make_problems(config, rng)
    held_out = min(config.eval_size or EVAL_SIZE, len(problems) // 2)
    rng.shuffle(problems)
    depth = config.depth if config.kind == "dyck" else None
    few = [f"task.eval_size={config.eval_size} becomes {held_out}, half of this task's problems"]
    return Task(problems[held_out:], problems[:held_out], True, depth,
                few * ((config.eval_size or 0) > held_out))


def gym_dataset(config: TaskConfig, seed: int, size: int) -> Any:
    """Return a family of reasoning-gym, which makes its questions one by one."""
    try:
        reasoning_gym: Any = importlib.import_module("reasoning_gym")
        families: Any = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise UserError("task.kind=reasoning_gym needs reasoning-gym: pip install reasoning-gym "
                        f"({error})") from None
    if config.name not in families:
        raise UserError(f"task.name cannot be {config.name!r}{nearest(config.name, families)}")
    known = [of.name for of in fields(families[config.name][1]) if of.name not in ("seed", "size")]
    if unknown := next((key for key in config.options if key not in known), None):
        raise UserError(f"task.options.{unknown} is not an option of {config.name}"
                        f"{nearest(unknown, known)}")
    try:
        return reasoning_gym.create_dataset(
            config.name, size=size, seed=seed_of(seed, "task"), **config.options)
    except Exception as error:         # assertions and others, of each family
        raise UserError(f"task.options={config.options} do not suit {config.name}: "
                        f"{error}") from None


def task_of_gym(config: TaskConfig, seed: int) -> Task:
    """Return questions of reasoning-gym, each once, and its own scorer, from 0 to 1."""
    most = 20 * config.questions       # drawn at most: small families repeat themselves
    dataset, entries, again = gym_dataset(config, seed, most), dict[str, dict](), 0
    for entry in itertools.islice(dataset, most):
        again += entry["question"] in entries
        entries.setdefault(entry["question"], entry)
        if len(entries) == config.questions:
            break

    problems = [Problem(question, str(entry["answer"]), f"{config.name}: {question[:60]!r}")
                for question, entry in entries.items()]
    if again > len(problems) / 100:    # likely questions are drawn first, and often they are easy
        random.Random(seed_of(seed, "task", "order")).shuffle(problems)

    size = config.eval_size or max(1, min(EVAL_SIZE, len(problems) // 10))
    few = [f"{config.name} has only {len(problems)} different questions with these options, of "
           f"task.questions={config.questions}"] * (len(problems) < config.questions)
    if len(problems) <= size:
        raise UserError(f"task.eval_size={size} leaves none of the {len(problems)} questions of "
                        f"{config.name} to train on")

    def score(problem: Problem, response: str) -> float:
        return float(dataset.score_answer(response.strip(), entries[problem.question]))

    return Task(problems[size:], problems[:size], exact=False, remarks=few, score=score,
                metadata={question: entry["metadata"] for question, entry in entries.items()})


def prompt_of(task: Task, problem: Problem, template: str) -> str:
    """Fill a prompt: {question}, or what reasoning_gym says of it, such as {expression}."""
    known = {"question": problem.question, **task.metadata.get(problem.question, {})}
    named = re.findall(r"\{(\w+)\}", template)
    if not any(name in known for name in named):
        raise UserError(f"task.prompt={template!r} must have one of "
                        f"{', '.join(f'{{{name}}}' for name in known)}, for {problem.where}")
    return re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), template)


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
    """True if a word closes all its brackets and has 0 to `depth` open at any time."""
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
