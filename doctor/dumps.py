"""Read and write dumps of sampled tokens with the log-probs of both sides, row by row.

This file decides which formats are known: ours, prime-rl's token export, NeMo-RL's
train_data_step*.jsonl, parquet with the columns of any of them, and debug files of slime and miles
(tensor_files.py). A bad row is a ValueError with its line: nothing is guessed, and no pickle is
opened. `rows_of` makes rows of a padded batch, such as verl's, TRL's and this trainer's,
`rows_of_sequences` of one in which prompts and responses are one tensor. How to get a dump from
each system: math/appendix-dumps.md.
"""

import json
import math
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from three_policies.doctor.tensor_files import PAGE, rows_of_file


class Response(NamedTuple):
    """One response; every list but `prompt_ids` has an entry for each of its tokens."""

    line: int                               # of the file, from 1
    token_ids: list[int]
    rollout_log_probs: list[float]          # log μ as the sampler recorded it
    train_log_probs: list[float]            # log π as the trainer recomputed it; may be −∞
    prompt_ids: list[int] | None
    mask: list[bool]                        # False: not sampled, such as a tool's output
    entropy: list[float] | None = None      # of π, before each token
    versions: list[int] | None = None       # of the weights that drew each token
    not_finite: int = 0                     # sampled tokens without a finite log-prob; not in mask
    pair: dict[str, Any] | None = None      # what the trainer states of it: see normal.Class.stated


# ------------------------------------------------------------------- what a row may look like

class Format(NamedTuple):
    """A Format is how a system's rows differ from ours."""

    names: dict[str, str]       # our names of columns → the system's, where it has others
    whole: bool                 # the lists begin with the prompt, which ends where the mask begins


# A row is of the first format whose name of log μ it has, or it is ours.
FORMATS = {
    "prime-rl": Format({"rollout_log_probs": "inference_logprobs",
                        "train_log_probs": "trainer_logprobs", "response_mask": "loss_mask"}, True),
    "NeMo-RL": Format({"rollout_log_probs": "generation_logprobs",
                       "train_log_probs": "prev_logprobs", "response_mask": "token_loss_mask"},
                      True)}
OURS = Format({}, False)

# The most that a log-prob may be above 0. A logit below 64 in size is stored in bfloat16 within
# 2⁻³, half a unit in its last place. Less a log-sum of unrounded logits, it is a log-prob that is
# wrong by as much; 1 % more is for the log-sum's own rounding.  (eq:sixteen-bits)
ABOVE = 1.01 * 2 ** -3


def whole(column: list[Any]) -> str | None:
    """Return what is wrong with a column of whole numbers, or None, as do the functions below."""
    good = isinstance(column, list) and set(map(type, column)) <= {int} and all(
        abs(x) < 2 ** 63 for x in column)
    return None if good else "has an entry that is no whole number of 64 bits"


def finite(column: list[Any], lowest: float = 0.0) -> str | None:
    """`lowest`: −∞ if entries may be that."""
    try:
        total = math.fsum(column) if set(map(type, column)) <= {int, float, bool} else math.nan
    except (OverflowError, ValueError):     # too large, or infinities of both signs
        total = math.nan
    good = math.isfinite(total) or total == lowest
    return None if good else "has an entry that is no finite number"


def finite_or_lowest(column: list[Any]) -> str | None:
    return finite(column, -math.inf)


def log_probs(column: list[Any]) -> str | None:
    most = max(column, default=0)
    return None if most <= ABOVE else (f"has a value above 0, {most:.3g}, which is no log-prob: "
                                       "logits in 16 bits leave an eighth at most")


def entropies(column: list[Any]) -> str | None:
    good = min(column, default=0) >= -0.1
    return None if good else "has a value below 0, which is no entropy of tokens"


def among(allowed: Container[Any], otherwise: str) -> Callable[[list[Any]], str | None]:
    def check(column: list[Any]) -> str | None:
        return next((f"has {x}, which is {otherwise}" for x in column if x not in allowed), None)
    return check


class Column(NamedTuple):
    """A Column is a list of a row, in our names: what its entries may be, and if it may be null."""

    name: str
    checks: tuple[Callable[[list[Any]], str | None], ...]     # the first complaint is reported
    optional: bool = False
    instead: str = ""                                         # what may stand for the list


FLAGS, IDS = (0, 1), among(range(2 ** 31), "the number of no token")
COLUMNS = (
    Column("token_ids", (whole, IDS)),
    Column("rollout_log_probs", (finite, log_probs)),
    Column("train_log_probs", (finite_or_lowest, log_probs)),
    Column("response_mask", (finite, among(FLAGS, "neither 0 nor 1"))),
    Column("entropy", (finite, entropies), optional=True),
    Column("weight_version", (whole,), optional=True, instead="a whole number or "))
PROMPT = Column("prompt_ids", (whole, IDS), optional=True)      # of any length


# ---------------------------------------------------------------------------------- reading

# What a file is that begins so.
NO_JSON = {b"\x1f\x8b": ", but gzip: unpack it first",
           b"\x80": f", but a pickle, which could run code when it is opened: see {PAGE}",
           b"PK": ", but a file of torch.save or a zip: if torch wrote it, call it .pt"}


def read(path: str | Path) -> Iterator[Response]:
    """Yield the responses of a dump in order; a bad row is a ValueError that names its line."""
    rows_in = {".parquet": _parquet, ".pt": rows_of_file, ".pth": rows_of_file}.get(
        Path(path).suffix)
    if rows_in:
        yield from (response(line, row) for line, row in enumerate(rows_in(path), 1))
        return

    with open(path, "rb") as file:
        for line, text in enumerate(file, 1):
            try:
                row = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError):            # also bytes that are not text
                kind = next((what for start, what in NO_JSON.items()
                             if line == 1 and text.startswith(start)), "")
                raise ValueError(f"line {line}: this is not JSON{kind}") from None
            if text.strip():
                yield response(line, row)


def response(line: int, row: Any) -> Response:
    """Check one row, and return it as a Response."""
    if not isinstance(row, dict):
        raise ValueError(f"line {line}: a row must be a table of lists, by name")
    of = next((of for of in FORMATS.values() if of.names["rollout_log_probs"] in row), OURS)
    given = _in_our_names(row, of)
    n = len(given["token_ids"]) if isinstance(given["token_ids"], list) else 0
    own_mask, not_finite = given["response_mask"], _mask_nulls(given, n)

    for column in COLUMNS:
        _check(line, of.names.get(column.name, column.name), given[column.name], n, column)
    first, prompt = 0, row.get(PROMPT.name)
    _check(line, PROMPT.name, prompt, None, PROMPT)
    if of.whole:                            # the prompt is what precedes the first that counts
        n = _length(line, row, n)
        first = next((t for t in range(n) if own_mask[t]), n)
        prompt = given["token_ids"][:first]
    tokens, mu, pi, mask, entropy, versions = (
        given[column.name] and given[column.name][first:n] for column in COLUMNS)
    return Response(line, tokens, mu, pi, prompt, [bool(x) for x in mask], entropy or None,
                    versions or None, not_finite, row.get("pair"))


def _in_our_names(row: dict[str, Any], of: Format) -> dict[str, Any]:
    """Return the row's columns; one number stands for a list of it, and ours may have no mask."""
    given = {column.name: row.get(of.names.get(column.name, column.name)) for column in COLUMNS}
    n = len(given["token_ids"]) if isinstance(given["token_ids"], list) else 0
    if isinstance(given["weight_version"], int):
        given["weight_version"] = [given["weight_version"]] * n
    if given["response_mask"] is None and of is OURS:
        given["response_mask"] = [1] * n
    return given


def _mask_nulls(given: dict[str, Any], n: int) -> int:
    """Mask the sampled tokens of which a log-prob is null; return how many there are.

    JSON has no other word for a number that is not finite: `rows_of` writes it, and so does
    prime-rl. The nulls of a prompt or a tool become 0. A null in the entropy of any token that is
    kept drops that column.
    """
    mu, pi, mask, entropy = (given[name] for name in (
        "rollout_log_probs", "train_log_probs", "response_mask", "entropy"))
    if any(not isinstance(x, list) or len(x) != n
           for x in (mu, pi, mask, *([] if entropy is None else [entropy]))):
        return 0                                            # which is said by the checks

    kept = [0 if None in pair and flag in FLAGS else flag for *pair, flag in zip(mu, pi, mask)]
    given |= {"rollout_log_probs": [0.0 if x is None else x for x in mu],
              "train_log_probs": [0.0 if x is None else x for x in pi], "response_mask": kept}
    if entropy is not None:
        known = [0.0 if h is None and not flag else h for h, flag in zip(entropy, kept)]
        given["entropy"] = None if None in known else known
    return sum(map(bool, mask)) - sum(map(bool, kept))


def _check(line: int, name: str, values: Any, n: int | None, column: Column) -> None:
    """Raise the first complaint about a column of n values; `name`: what the row calls it."""
    if values is None and column.optional:
        return
    if values is None:
        raise ValueError(f"line {line}: {name} is missing")
    if n is not None and (not isinstance(values, list) or len(values) != n):
        raise ValueError(f"line {line}: {name} must be {column.instead}a list with an entry for "
                         "each token")
    for check in column.checks:
        if complaint := check(values):
            raise ValueError(f"line {line}: {name} {complaint}")


def _length(line: int, row: dict[str, Any], n: int) -> int:
    """Return how many tokens are no padding, which NeMo-RL writes."""
    length = row.get("input_lengths", n)
    if type(length) is not int or not 0 <= length <= n:
        raise ValueError(f"line {line}: input_lengths must be a number of tokens, at most {n}, "
                         f"not {str(length)[:60]}")
    return length


def _parquet(path: str | Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError("parquet is read with pyarrow: pip install pyarrow") from None
    for batch in parquet.ParquetFile(path).iter_batches(256):
        yield from batch.to_pylist()


# ------------------------------------------------------------------------- of a padded batch

def rows_of(prompts: Tensor, prompt_mask: Tensor, tokens: Tensor, token_mask: Tensor,
            response_mask: Tensor, rollout_log_prob: Tensor, train_log_prob: Tensor,
            entropy: Tensor | None = None, versions: Tensor | None = None
            ) -> list[dict[str, Any]]:
    """Return a padded batch, [B, P] twice and [B, T], as rows of a dump; write one row a line.

    A sampled token of which a log-prob is not finite, as TRL has where vLLM gave none, has null in
    both columns; `response` counts it. But log π = −∞ stays: `find_causes` names a cause by it.
    """
    known = _known(response_mask, rollout_log_prob, train_log_prob)
    columns = {"prompt_ids": _lists(prompts, prompt_mask), "token_ids": _lists(tokens, token_mask),
               "rollout_log_probs": _lists(rollout_log_prob, token_mask, known),
               "train_log_probs": _lists(train_log_prob, token_mask, known),
               "response_mask": _lists(response_mask.bool().int(), token_mask)}
    if entropy is not None:
        columns["entropy"] = _lists(entropy, token_mask, entropy.isfinite())
    if versions is not None:
        columns["weight_version"] = _lists(versions, token_mask)
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def rows_of_sequences(sequences: Tensor, attention_mask: Tensor, response_mask: Tensor,
                      rollout_log_prob: Tensor, train_log_prob: Tensor,
                      pair: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return sequences [B, P + T] with log-probs of the last T tokens, [B, T], as rows of a dump.

    So SkyRL, OpenRLHF and AReaL keep them. Where T includes the prompt, it ends where the mask
    begins. pair: the two precisions, and whether there are experts (normal.Class.stated).
    """
    late = response_mask.shape[1]
    halves = [x.split([x.shape[1] - late, late], 1) for x in (sequences, attention_mask)]
    (before, after), (seen, attended) = halves
    rows = rows_of(before, seen, after, attended, response_mask, rollout_log_prob, train_log_prob)
    for row in rows:
        first = row["response_mask"].index(1) if 1 in row["response_mask"] else 0
        row["prompt_ids"] += row["token_ids"][:first]
        row |= {name: x[first:] for name, x in row.items() if name != "prompt_ids"}
    return rows if pair is None else [row | {"pair": pair} for row in rows]


def responses_of(prompts: Tensor, prompt_mask: Tensor, tokens: Tensor, token_mask: Tensor,
                 response_mask: Tensor, rollout_log_prob: Tensor, train_log_prob: Tensor,
                 versions: Tensor | None = None) -> list[Response]:
    """Return a padded batch as `read` would return it if `rows_of` had been written."""
    known = _known(response_mask, rollout_log_prob, train_log_prob)
    sampled = response_mask.bool()
    columns = zip(
        _lists(tokens, token_mask), _lists(rollout_log_prob.where(known, 0.0), token_mask),
        _lists(train_log_prob.where(known, 0.0), token_mask), _lists(prompts, prompt_mask),
        _lists(sampled & known, token_mask), _lists(sampled & ~known, token_mask),
        [None] * len(tokens) if versions is None else _lists(versions, token_mask))
    return [Response(line, ids, mu, pi, prompt, mask, None, drawn_by or None, sum(lost))
            for line, (ids, mu, pi, prompt, mask, lost, drawn_by) in enumerate(columns, 1)]


def _known(response_mask: Tensor, rollout_log_prob: Tensor, train_log_prob: Tensor) -> Tensor:
    """Mark tokens of which both log-probs are numbers; π may be 0 for one that was sampled."""
    return rollout_log_prob.isfinite() & (train_log_prob < math.inf) & (
        response_mask.bool() | train_log_prob.isfinite())


def _lists(x: Tensor, mask: Tensor, known: Tensor | None = None) -> list[list[Any]]:
    """Return each row's values where the mask is set, and None for those that are not known."""
    x, mask = x.detach().cpu(), mask.bool().cpu()
    found = [row[there].tolist() for row, there in zip(x, mask)]
    if known is None:
        return found
    return [[value if is_known else None for value, is_known in zip(*row)]
            for row in zip(found, _lists(known, mask))]


def append(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a dump."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
