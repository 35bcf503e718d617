"""Check what a caller gives: one sentence says which key, what was given, and what is allowed."""

import difflib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields
from numbers import Real
from typing import Any, TypeGuard

from torch import Tensor


class UserError(Exception):
    """Carry one sentence, on one line, for the user."""

    silent: bool

    def __init__(self, sentence: str):
        super().__init__(" ".join(sentence.split()))


def nearest(word: Any, allowed: Any) -> str:
    """Return the end of an error message: the nearest allowed name, or all if they are few."""
    names = [str(a) for a in allowed]
    if close := difflib.get_close_matches(str(word), names, n=1):
        return f"; did you mean {close[0]!r}?"
    if len(names) <= 30:
        return f"; allowed: {', '.join(names)}"
    return f"; the nearest are {', '.join(difflib.get_close_matches(str(word), names, 3, 0))}"


def number(key: str, value: Any) -> float:
    """Return a positive number, or raise a ValueError that names the key."""
    with suppress(ValueError, OverflowError):
        known = not isinstance(value, bool) and isinstance(value, (Real, str))  # numpy's, too
        if known and not (isinstance(value, str) and "_" in value) and float(value) > 0:
            return float(value) if float(value) < 3e38 else math.inf        # float32 ends there
    raise ValueError(f"{key} must be a positive number, not {value!r}")


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """True if a value is a sequence other than text: a list, a tuple, Hydra's list."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def interval(key: str, value: Any) -> tuple[float | None, float | None]:
    """Return (lo, hi) with lo ≤ hi, or raise ValueError; one may be open: None, or lo = 0."""
    ends: list[Any] = [*value] if is_list(value) else []
    if len(ends) != 2:
        raise ValueError(f"{key} must be a pair [lo, hi] of bounds on ρ, either of which may be "
                         f"null, not {value!r}")
    if type(ends[0]) in (int, float) and ends[0] == 0:
        ends[0] = None                              # every ρ is above 0
    lo, hi = (None if end is None else number(key, end) for end in ends)
    if lo is None and hi is None:
        raise ValueError(f"{key} must have at least one bound that is not null")
    if lo is not None and hi is not None and lo > hi:
        raise ValueError(f"{key} must have lo ≤ hi, not [{lo:g}, {hi:g}]")
    return lo, hi


def choice(key: str, value: Any, allowed: Any) -> None:
    """Raise ValueError unless the value is one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key} cannot be {value!r}{nearest(value, allowed)}")


def flag(key: str, value: Any) -> bool:
    """Return true or false, or raise a ValueError that names the key."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return value


def setting(default: Any, meaning: str, low: float | None = None, high: float = 2 ** 31, *,
            above: float | None = None, choices: Sequence[str] = ()) -> Any:
    """Return a dataclass's field with its meaning and what makes sense: [low, high], or (above, ∞).

    Of a word, it is among the choices.
    """
    return field(default=default, metadata={"meaning": meaning, "low": low, "high": high,
                                            "above": above, "choices": choices})


def check_fields(of: Any, prefix: str = "") -> None:
    """Raise ValueError if a field of a dataclass is beyond the limits that `setting` gave it."""
    for row in fields(of):
        key, limits, value = f"{prefix}{row.name}", row.metadata, getattr(of, row.name)
        if limits.get("choices"):
            choice(key, value, limits["choices"])
        elif value is not None and "low" in limits and not in_limits(value, limits):
            raise ValueError(f"{key} must be {limits_of(limits, value)}, not {value!r}")


def in_limits(value: Any, limits: Mapping[str, Any]) -> bool:
    if limits["above"] is not None:
        return value > limits["above"]
    return limits["low"] is None or limits["low"] <= value <= limits["high"]


def limits_of(limits: Mapping[str, Any], value: float = 0) -> str:
    """Return what a number may be, or, of one that is far too large, the largest one."""
    low, high, above = limits["low"], limits["high"], limits["above"]
    if above is not None:
        return f"above {above}"
    if high < 2 ** 31:
        return f"{low} to {high}"
    return f"at most {high}" if value > high else f"at least {low}"


def same_shape(what: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one shape; broadcasting would give other numbers."""
    first, *others = tensors.values()
    if any(x.shape != first.shape for x in others):            # a traced size has no hash
        *shapes, last = (f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"{', '.join(shapes)} and {last} must have one shape {what}".rstrip())
