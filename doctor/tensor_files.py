"""Read the debug files of slime and miles, which `torch.save` wrote, as rows of a dump.

This file decides what is read of them, and that nothing in them runs: `torch.load` is called with
weights_only=True, and a file that it refuses is refused here, too. math/appendix-dumps.md says
which files have both log-probs, and how to convert one that is refused.

    slime   train_data/*.pt of --dump-details, format 2 (a list of samples) and before (columns)
    miles   the same, and policy_loss_debug/*.pt, which has no token ids
"""

import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PAGE = "math/appendix-dumps.md"
MASKS = ("loss_masks", "loss_mask", "local_loss_mask")
LENGTHS = ("response_lengths", "response_length")
# The trainer's column: slime's, then miles'. old_log_probs is π_old, unless it is a copy of μ.
TRAINERS = ("log_probs", "old_log_probs", "train_log_probs")


def rows_of_file(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each sample of a file; ValueError says in one sentence what is refused."""
    samples = samples_of(load(path), path)
    unnamed = 0                                             # tokens so far without an id
    for number, sample in enumerate(samples, 1):
        try:
            row = row_of(sample, unnamed)
        except ValueError as error:
            raise ValueError(f"{path}, sample {number}: {error}") from None
        unnamed += len(row["token_ids"]) if "tokens" not in sample else 0
        yield row


def load(path: str | Path) -> Any:
    """Open a file that holds tensors, numbers, texts, lists and tables, and nothing else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise ValueError(f"{path} holds Python objects besides tensors{what}, which could run code "
                         f"when they are loaded, so it is not opened; {PAGE} says how to convert "
                         "a file of your own") from None
    except OSError:
        raise
    except Exception as error:                              # torch has many for a damaged file
        first = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        raise ValueError(f"{path} is no whole file of torch.save: {first}") from None


def samples_of(data: Any, path: str | Path) -> list[dict[str, Any]]:
    """Return the samples of a file, each a table with that sample's part of every column."""
    found = data.get("samples", data.get("rollout_data")) if isinstance(data, dict) else None
    if isinstance(found, dict):                             # columns, each a list of all samples
        rows = len(column_of(found, LENGTHS) or column_of(found, TRAINERS) or ())
        lists = {name: x for name, x in found.items()
                 if isinstance(x, (list, tuple)) and len(x) == rows}
        found = [{name: x[i] for name, x in lists.items()} for i in range(rows)]
    if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
        raise ValueError(f"{path} has neither the samples nor the rollout_data of a debug file of "
                         f"slime or miles; see {PAGE}")
    return found


def row_of(sample: dict[str, Any], unnamed: int) -> dict[str, Any]:
    """Return a sample as a row of a dump; without ids its tokens are numbered from `unnamed` on."""
    mu, pi = column_of(sample, ("rollout_log_probs",)), column_of(sample, TRAINERS)
    if mu is None:
        raise ValueError("it has no rollout_log_probs, which the engine records")
    if pi is None:
        raise ValueError("it has the engine's rollout_log_probs and no log_probs of the trainer: "
                         "of --dump-details take a file of train_data/, not of rollout_data/")
    if len(pi) == len(mu) and pi == mu and "train_log_probs" in sample:
        pi = listed(sample["train_log_probs"])

    length = column_of(sample, LENGTHS)
    n = len(mu) if length is None else int(length)
    mask = column_of(sample, MASKS)
    columns = {"rollout_log_probs": mu, "log_probs": pi, "loss_mask": mask}
    for name, column in columns.items():
        if column is not None and len(column) != n:
            raise ValueError(f"{name} has {len(column)} entries for a response of {n} tokens: a "
                             "part of it, as context parallelism leaves in each rank's file")

    row = {"rollout_log_probs": [finite(x) for x in mu], "train_log_probs": [
        x if x == -math.inf else finite(x) for x in pi]}
    if mask is not None:
        row["response_mask"] = [int(x) for x in mask]
    if "tokens" not in sample:
        return row | {"token_ids": [*range(unnamed, unnamed + n)]}
    tokens = listed(sample["tokens"])
    if len(tokens) < n:
        raise ValueError(f"it has {len(tokens)} tokens for a response of {n}")
    return row | {"prompt_ids": tokens[:len(tokens) - n], "token_ids": tokens[len(tokens) - n:]}


def column_of(table: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of some columns that is there, as a list or a number."""
    return next((listed(table[name]) for name in names if table.get(name) is not None), None)


def listed(x: Any) -> Any:
    """Return a tensor as a list; other values stay."""
    return x.flatten().tolist() if isinstance(x, torch.Tensor) and x.dim() else (
        x.item() if isinstance(x, torch.Tensor) else x)


def finite(x: float) -> float | None:
    """Return null for a log-prob that is not finite, as in dumps of JSON lines."""
    return x if math.isfinite(x) else None
