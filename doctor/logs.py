"""Read the metrics that a run logged, and call them by our names: a row per step.

This file decides which logs are known: this trainer's metrics.jsonl, verl's file and console
loggers, TRL's trainer_state.json, what wandb exports (csv, history as json or JSON lines) and
TensorBoard's event files. A column is read by its name in ALIASES or not at all; no name is
guessed. Several dumps in the order of their steps are read as a log too.

    log = read("outputs/checkpoint-500/trainer_state.json")
    print(log.names, log.column("k3"))
"""

import csv
import importlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from three_policies.doctor import dumps

# Our names, each with what other systems log; the first that a log has is read. A prefix "train/",
# which the callbacks of transformers add, is ignored. Theirs, in this order: this trainer and verl
# 0.9, verl 0.6, prime-rl, NeMo-RL, slime and miles, SkyRL, TRL.
ALIASES = {
    "step": ("step", "global_step", "training/global_step", "trainer/global_step", "Step", "_step"),
    "k3": ("rollout_corr/k3_kl", "mismatch/mismatch_k3_kl", "mismatch_kl/mean",
           "mismatch_kl/all/mean", "gen_kl_error", "train_rollout_kl"),
    "chi2": ("rollout_corr/chi2_token", "mismatch/mismatch_chi2_token"),
    "abs": ("train_rollout_logprob_abs_diff", "policy/rollout_train_logprobs_abs_diff_mean",
            "sampling/sampling_logp_difference/mean"),
    "prob": ("training/rollout_probs_diff_mean",),
    "k1": ("rollout_corr/kl", "mismatch/mismatch_kl"),
    "ess": ("rollout_corr/rollout_is_raw_eff_sample_size",
            "rollout_corr/rollout_is_eff_sample_size", "mismatch/rollout_is_eff_sample_size"),
    "mean": ("rollout_corr/is_ratio_mean", "rollout_corr/rollout_is_mean",
             "mismatch/rollout_is_mean", "sampling_importance_ratio",
             "sampling/importance_sampling_ratio/mean"),
    "learning rate": ("learning_rate", "actor/lr", "optim/lr", "lr", "lr-pg_0", "policy/policy_lr"),
    "staleness": ("staleness", "training/off_policy/trajectory_staleness/mean",
                  "sample/staleness_mean"),
    "reference": ("loss/kl", "actor/kl_loss", "kl"),            # to π_ref, not between the two
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "entropy/mean",
                "entropy/all/mean", "approx_entropy", "entropy_loss", "policy/policy_entropy",
                "rollout_corr/training_log_ppl"),
    "length": ("response/length_mean", "response_length/mean", "completions/mean_length"),
    "reward": ("reward/mean", "critic/score/mean", "critic/rewards/mean", "reward/all/mean",
               "raw_reward", "reward/avg_raw_reward", "reward")}
SIZES = ("k3", "chi2", "abs", "prob")       # what measures a gap, the best first
SYSTEMS = (("response/learned_fraction", "this trainer"), ("actor/", "verl"),
           ("sampling/", "TRL"), ("mismatch_kl/", "prime-rl"), ("gen_kl_error", "NeMo-RL"),
           ("policy/", "SkyRL"), ("train_rollout", "slime or miles"), ("completions/", "TRL"))
OF_DUMPS = "computed from the dumps"
Row = dict[str, float]


class Log(NamedTuple):
    """What a log holds, a row per step in the order of steps."""

    source: str                         # whose it is, in words
    rows: list[Row]                     # by our names
    names: dict[str, str]               # our names, and the column that was read for each
    lost: Sequence[float] = ()          # the steps whose gap is NaN or ∞
    files: Sequence[str] = ()           # of each row, if rows are dumps

    def column(self, name: str) -> list[float]:
        """Return a column by our name; NaN where a row lacks it."""
        return [row.get(name, math.nan) for row in self.rows]

    @property
    def size(self) -> str | None:
        """Return which column measures the gap: the first of SIZES that three rows have."""
        return next((name for name in SIZES if sum(name in row for row in self.rows) >= 3), None)


# ----------------------------------------------------------------------------- which files are logs

def is_log(path: str | Path) -> bool:
    """True if a file, or a folder, holds logged metrics and not a dump of tokens."""
    path = Path(path)
    if path.is_dir() and (found := in_folder(path)):
        return found[0] == path or not is_dump(found[0])
    if path.suffix in (".csv", ".json", ".log") or "tfevents" in path.name:
        return True
    if path.suffix == ".parquet" or not path.is_file():
        return False                # a dump, a folder of neither, or no file at all
    return not is_dump(path) and bool(_line(first_line(path)))


def is_dump(path: Path) -> bool:
    """True for a table of rows with lists of tokens."""
    row = _json(first_line(path)) if path.suffix != ".parquet" else {"token_ids": []}
    return isinstance(row, dict) and any(isinstance(x, list) for x in row.values())


def first_line(path: Path) -> str:
    """Return the first line with text of at most a megabyte; "" for what is no text."""
    with open(path, "rb") as file:
        lines = (file.readline(2 ** 20) for _ in range(100))
        return next((x for x in lines if x.strip()), b"").decode("utf-8", "replace")


def in_folder(path: Path) -> list[Path]:
    """Return a folder's log, or else its dumps by their numbers."""
    for pattern in ("metrics.jsonl", "trainer_state.json", "*tfevents*"):
        if found := sorted(path.glob(pattern)):
            return [path] if "tfevents" in pattern else found
    found = [p for kind in ("jsonl", "parquet") for p in path.glob(f"*.{kind}")]
    return sorted(found, key=lambda p: (_number(p), p.name))


def _number(path: Path) -> int:
    """Return the last number in a file's name, which is its step."""
    return int((re.findall(r"\d+", path.stem) or ["0"])[-1])


# ----------------------------------------------------------------------------------------- reading

def read(path: str | Path) -> Log:
    """Read a log of any known kind; what it is not is one sentence, a ValueError."""
    path = Path(path)
    if path.is_dir() and not (path := in_folder(path)[0]).is_dir():
        return read(path)
    if path.is_dir() or "tfevents" in path.name:
        return named(_tensorboard(path), path)
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = (list(csv.DictReader(text.splitlines())) if path.suffix == ".csv"
            else _history(path, text) if path.suffix == ".json"
            else [row for line in text.splitlines() if (row := _line(line))])
    return named(rows, path)


def named(rows: Sequence[dict[str, Any]], path: Path) -> Log:
    """Return rows by our names; a step that is logged in several rows is put together."""
    theirs = dict.fromkeys(name for row in rows for name in row if isinstance(name, str))
    plain = {name: _plain(name) for name in theirs}
    runs = {name.split(" - ")[0] for name in theirs if " - " in name}
    if len(runs) > 1:
        raise ValueError(f"{path} has {len(runs)} runs ({', '.join(sorted(runs)[:3])}): "
                         "export one")
    names = dict[str, str]()
    for ours, aliases in ALIASES.items():
        found = (name for alias in aliases for name in theirs
                 if plain[name] == alias and any(_value(row.get(name)) is not None for row in rows))
        if (name := next(found, None)) is not None:
            names[ours] = name

    by_step: dict[float, Row] = {}
    lost, sizes = set[float](), [name for ours in SIZES for name in theirs
                                 if plain[name] in ALIASES[ours]]
    for row in rows:
        if broken := any(_broken(row.get(name)) for name in sizes):
            lost.add(_value(row.get(names.get("step", ""))) or 0.0)
        values = {ours: x for ours, name in names.items()
                  if (x := _value(row.get(name))) is not None}
        if "step" in values and (broken or len(values) > 1):
            by_step.setdefault(values["step"], {}).update(values)
    if not by_step:
        raise ValueError(f"{path} has no column of steps ({', '.join(ALIASES['step'])}) beside "
                         "another that is known: is it a log of a run?")
    kept = set(plain.values())
    source = next((who for mark, who in SYSTEMS if any(x.startswith(mark) for x in kept)), "a run")
    return Log(f"metrics of {source}", [by_step[step] for step in sorted(by_step)], names,
               sorted(lost))


def _plain(name: str) -> str:
    """Return a column's name without the run's that wandb puts before it, and without train/."""
    return name.split(" - ")[-1].removeprefix("train/")


def _broken(x: Any) -> bool:
    return isinstance(x, float) and not math.isfinite(x)


def _value(x: Any) -> float | None:
    try:
        value = float(x)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _line(text: str) -> dict[str, Any] | None:
    """Return a line's metrics: JSON, as verl's file logger has them, or as its console prints."""
    row = _json(text)
    if isinstance(row, dict):
        data = row.get("data")
        row = {"step": row.get("step"), **data} if isinstance(data, dict) else row
        return row if any(_plain(name) in ALIASES["step"] for name in row) else None
    pairs = re.findall(r"(?:^|\s)([\w/@.-]+):(-?[\d.]+(?:e[+-]?\d+)?)(?=\s|$)", text)
    return dict(pairs) if pairs and pairs[0][0] == "step" and len(pairs) > 1 else None


def _history(path: Path, text: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON file: TRL's log_history, a list of rows, or a table of columns."""
    whole = _json(text)
    rows = whole.get("log_history", whole) if isinstance(whole, dict) else whole
    if isinstance(rows, dict) and all(isinstance(column, (dict, list)) for column in rows.values()):
        columns = {name: list(x.values()) if isinstance(x, dict) else x for name, x in rows.items()}
        rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is neither a trainer_state.json nor a run's history: it has no "
                         "list of rows")
    return rows


def _tensorboard(path: Path) -> list[dict[str, Any]]:
    try:
        reader: Any = importlib.import_module(
            "tensorboard.backend.event_processing.event_accumulator")
    except ImportError:
        raise ValueError(f"{path}: TensorBoard's files are read with its package: "
                         "pip install tensorboard") from None
    events = reader.EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return [{"step": event.step, tag: event.value}
            for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]


# -------------------------------------------------------------------------------- dumps as a log

class Lag(NamedTuple):
    """The tokens of all dumps whose weights were as many versions old."""

    lag: int
    tokens: int
    k3: float                           # mean over them
    denied: int                         # p ≥ 0.5 in the engine, 2 nats less in the trainer


def of_dumps(paths: Sequence[str | Path]) -> tuple[Log, list[Lag]]:
    """Read dumps in the order of their steps as a log, and split all their tokens by version.

    The step is the number in a file's name, or its place if two files have one number. A dump whose
    log-probs are all not finite is a row of its step alone; one without a sampled token is left
    out, and if all are, that is a ValueError. The lag of a
    token counts from the newest version that its dump has: a delay that all tokens share stays
    unseen there, and is `staleness` where versions are numbered as steps are.
    """
    steps = [_number(Path(path)) for path in paths]
    steps = steps if len(set(steps)) == len(steps) else [*range(1, len(paths) + 1)]
    rows, files, lags = list[Row](), list[str](), dict[int, list[float]]()
    for step, path in sorted(zip(steps, map(str, paths))):
        responses = [*dumps.read(path)]
        row, versions = _row(responses, lags)
        if not row and not any(r.not_finite for r in responses):
            continue
        rows.append({"step": float(step), **row})
        files.append(path)
        if versions:
            rows[-1]["version"] = sum(versions) / len(versions)
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths[:3]))}: no token that counts")
    names = {name: OF_DUMPS for row in rows for name in row}
    split = [Lag(lag, int(n), total / n, int(denied))
             for lag, (n, total, denied) in sorted(lags.items())]
    return Log(f"{len(rows)} dumps", rows, names, files=files), split


def _row(responses: Iterable[dumps.Response], lags: dict[int, list[float]]
         ) -> tuple[Row, list[int]]:
    """Return the metrics of a dump, and the versions of its tokens, whose lags are added up."""
    tokens = [(mu, pi - mu, r.versions[t] if r.versions else None) for r in responses
              for t, (mu, pi) in enumerate(zip(r.rollout_log_probs, r.train_log_probs))
              if r.mask[t] and pi > -math.inf]
    if not tokens:
        return {}, []
    d = [min(x, 20.0) for _, x, _ in tokens]
    n, rho = len(d), [math.exp(x) for x in d]
    second, mean = sum(x * x for x in rho) / n, sum(rho) / n
    row = {"k3": sum(map(k3, d)) / n, "k1": -sum(d) / n, "abs": sum(map(abs, d)) / n,
           "mean": mean, "chi2": second - 1, "ess": mean ** 2 / second}
    versions = [version for *_, version in tokens if version is not None]
    newest = max(versions, default=0)
    for mu, x, version in tokens:
        if version is not None:
            held = lags.setdefault(newest - version, [0.0, 0.0, 0.0])
            for i, value in enumerate((1, k3(min(x, 20.0)), mu >= math.log(0.5) and x < -2)):
                held[i] += value
    return row, versions


def k3(d: float) -> float:
    """Return ρ − 1 − log ρ, as a series where the difference would be rounding."""
    return d * d / 2 + d ** 3 / 6 if abs(d) < 1e-4 else math.expm1(d) - d
