"""Read and write dumps of sampled tokens with the log-probs of both sides, row by row.

This file decides which formats are known: ours, prime-rl's token export, NeMo-RL's
train_data_step*.jsonl, and parquet with the columns of any of them. A bad row is a ValueError with
its line: nothing is guessed, and no pickle is opened. `rows_of` makes rows of a padded batch, such
as verl's, TRL's and this trainer's.
"""

import json
import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


class Response(NamedTuple):
    """Hold one response; every list but `prompt_ids` has an entry for each of its tokens."""

    line: int                               # of the file, from 1
    token_ids: list[int]
    rollout_log_probs: list[float]          # log μ as the sampler recorded it
    train_log_probs: list[float]            # log π as the trainer recomputed it; may be −∞
    prompt_ids: list[int] | None
    mask: list[bool]                        # False: not sampled, such as a tool's output
    entropy: list[float] | None = None      # of π, before each token
    versions: list[int] | None = None       # of the weights that drew each token
    not_finite: int = 0                     # sampled tokens without a finite log-prob; not in mask


# Names of log μ, log π and the mask: ours, then of formats whose lists begin with the prompt.
OURS = ("rollout_log_probs", "train_log_probs", "response_mask")
WHOLE = (("inference_logprobs", "trainer_logprobs", "loss_mask"),           # prime-rl
         ("generation_logprobs", "prev_logprobs", "token_loss_mask"))       # NeMo-RL

IDS, FLAGS = (range(2 ** 31), "the number of no token"), ((0, 1), "neither 0 nor 1")

# The most that a log-prob may be above 0. A logit below 64 in size is stored in bfloat16 within
# 2⁻³, half a unit in its last place. Less a log-sum of unrounded logits, it is a log-prob that is
# wrong by as much; 1 % more is for the log-sum's own rounding.  (eq:sixteen-bits)
ABOVE = 1.01 * 2 ** -3


def read(path: str | Path) -> Iterator[Response]:
    """Yield the responses of a dump in order; a bad row is a ValueError that names its line."""
    if str(path).endswith(".parquet"):
        yield from (response(line, row) for line, row in enumerate(_parquet(path), 1))
        return
    with open(path, "rb") as file:
        for line, text in enumerate(file, 1):
            try:
                row = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError):            # also bytes that are not text
                packed = ", but gzip: unpack it first" * text.startswith(b"\x1f\x8b")
                raise ValueError(f"line {line}: this is not JSON{packed}") from None
            if text.strip():
                yield response(line, row)


def response(line: int, row: Any) -> Response:
    """Check one row, and return it as a Response."""
    if not isinstance(row, dict):
        raise ValueError(f"line {line}: a row must be a table of lists, by name")
    names = next((names for names in WHOLE if names[0] in row), OURS)
    version, ids = row.get("weight_version"), row.get("token_ids")
    n = len(ids) if isinstance(ids, list) else 0
    versions = [version] * n if isinstance(version, int) else version
    flags = row.get(names[2])
    flags = [1] * n if flags is None and names is OURS else flags
    given = {"token_ids": ids, names[0]: row.get(names[0]), names[1]: row.get(names[1]),
             names[2]: flags, "entropy": row.get("entropy"), "weight_version": versions}
    not_finite = _mask_nulls(given, n)
    for i, (name, column) in enumerate(given.items()):
        if column is None and (i < 3 or (i == 3 and names in WHOLE)):
            raise ValueError(f"line {line}: {name} is missing")
        if column is not None and (not isinstance(column, list) or len(column) != n):
            one = "a whole number or " * (name == "weight_version")
            raise ValueError(f"line {line}: {name} must be {one}a list with an entry for each "
                             "token")
        _check(line, name, column or [], whole=i in (0, 5), log_prob=i in (1, 2), lowest=i == 2)
        if name == "entropy" and column and min(column) < -0.1:
            raise ValueError(f"line {line}: entropy has a value below 0, which is no entropy of "
                             "tokens")
        if i in (0, 3):
            _check_values(line, name, column or [], *(IDS if i == 0 else FLAGS))
    prompt, first = row.get("prompt_ids"), 0
    _check(line, "prompt_ids", [] if prompt is None else prompt, whole=True)
    _check_values(line, "prompt_ids", prompt or [], *IDS)
    if names in WHOLE:                      # the prompt is what precedes the first that counts
        length = row.get("input_lengths", n)
        if type(length) is not int or not 0 <= length <= n:
            raise ValueError(f"line {line}: input_lengths must be a number of tokens, at most {n}, "
                             f"not {str(length)[:60]}")
        n = length
        first = next((t for t in range(n) if row[names[2]][t]), n)
        prompt = row["token_ids"][:first]
    tokens, mu, pi, mask, entropy, versions = (x and x[first:n] for x in given.values())
    return Response(line, tokens or [], mu or [], pi or [], prompt,
                    [bool(x) for x in mask] if mask else [True] * len(tokens or []),
                    entropy or None, versions or None, not_finite)


def _mask_nulls(given: dict[str, Any], n: int) -> int:
    """Mask the sampled tokens of which a log-prob is null; return how many there are.

    JSON has no other word for a number that is not finite: `rows_of` writes it, and so does
    prime-rl. The nulls of a prompt or a tool become 0. A null in the entropy of any token that is
    kept drops that column.
    """
    _, mu, pi, mask, entropy, _ = given
    of_entropy = [None] * n if given[entropy] is None else given[entropy]
    columns = [given[mu], given[pi], given[mask], of_entropy]
    if any(not isinstance(x, list) or len(x) != n for x in columns):
        return 0                                            # which is said by the checks
    of_entropy, kept = [*of_entropy], [*given[mask]]        # the row's own tells the prompt's end
    for t, (*log_probs, flag, h) in enumerate(zip(*columns)):
        if None in log_probs and flag in FLAGS[0]:
            kept[t] = 0
        if h is None and not kept[t]:
            of_entropy[t] = 0.0
    if given[entropy] is not None:
        given[entropy] = None if None in of_entropy else of_entropy
    lost = sum(map(bool, given[mask])) - sum(map(bool, kept))
    given[mask] = kept
    given[mu], given[pi] = ([0.0 if x is None else x for x in column] for column in columns[:2])
    return lost


def _check(line: int, name: str, column: Any, *, whole: bool = False, log_prob: bool = False,
           lowest: bool = False) -> None:
    good = isinstance(column, list) and set(map(type, column)) <= (
        {int} if whole else {int, float, bool})
    good = good and not (whole and any(abs(x) >= 2 ** 63 for x in column))
    try:
        total = math.fsum(column) if good else math.nan
    except (OverflowError, ValueError):     # too large, or infinities of both signs
        total = math.nan
    if not math.isfinite(total) and not (lowest and total == -math.inf):
        what = "whole number of 64 bits" if whole else "finite number"
        raise ValueError(f"line {line}: {name} has an entry that is no {what}")
    if log_prob and column and (most := max(column)) > ABOVE:
        raise ValueError(f"line {line}: {name} has a value above 0, {most:.3g}, which is no "
                         "log-prob: logits in 16 bits leave an eighth at most")


def _check_values(line: int, name: str, column: list[Any], allowed: Container[Any],
                  else_it_is: str) -> None:
    for x in column:
        if x not in allowed:
            raise ValueError(f"line {line}: {name} has {x}, which is {else_it_is}")


def _parquet(path: str | Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError("parquet is read with pyarrow: pip install pyarrow") from None
    for batch in parquet.ParquetFile(path).iter_batches(256):
        yield from batch.to_pylist()


def rows_of(prompts: Tensor, prompt_mask: Tensor, tokens: Tensor, token_mask: Tensor,
            response_mask: Tensor, rollout_log_prob: Tensor, train_log_prob: Tensor,
            entropy: Tensor | None = None, versions: Tensor | None = None
            ) -> list[dict[str, Any]]:
    """Return a padded batch, [B, P] twice and [B, T], as rows of a dump; write one row a line.

    A sampled token of which a log-prob is not finite, as TRL has where vLLM gave none, has null in
    both columns; `response` counts it. But log π = −∞ stays: `find_causes` names a cause by it.
    """
    sampled = response_mask.bool()
    finite = rollout_log_prob.isfinite() & (train_log_prob < math.inf) & (
        sampled | train_log_prob.isfinite())
    columns = {"token_ids": tokens, "rollout_log_probs": rollout_log_prob,
               "train_log_probs": train_log_prob, "response_mask": sampled.int()}
    columns |= {name: x for name, x in (("entropy", entropy), ("weight_version", versions))
                if x is not None}
    known = dict.fromkeys(("rollout_log_probs", "train_log_probs"), finite)
    known |= {} if entropy is None else {"entropy": entropy.isfinite()}
    columns, known = ({name: x.detach().cpu() for name, x in given.items()}
                      for given in (columns, known))
    prompts, prompt_mask, token_mask = (
        x.detach().cpu() for x in (prompts, prompt_mask.bool(), token_mask.bool()))

    def listed(name: str, i: int) -> list[Any]:
        values = columns[name][i][token_mask[i]].tolist()
        if name not in known:
            return values
        return [x if is_known else None for x, is_known in zip(
            values, known[name][i][token_mask[i]].tolist())]
    return [{"prompt_ids": prompts[i][prompt_mask[i]].tolist(),
             **{name: listed(name, i) for name in columns}} for i in range(len(tokens))]


def append(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a dump."""
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
