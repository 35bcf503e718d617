"""Is my number normal? What healthy pairs leave, by class, and what faults of that size there are.

This file decides from which k3 on a gap is a fault, and up to which it is healthy: the table PAIRS.
In between the doctor cannot tell, and says what would help. A pair's class is the coarser precision
of its two sides and whether the model has experts; from the user, or as the dump or a config.json
states it. k3 is E[ρ − 1 − log ρ] per token, in nats; the r.m.s. of log ρ is about √(2 k3).
Derivation: math/8-what-is-wrong.md.

    print(table())
    print(Class.of("bf16", experts=False).place(0.0045))
"""

import json
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MARGIN = 2.0            # over the largest k3 of a healthy pair: a gap above it is a fault
NOTHING = 1e-6          # k3: no gap below it is a fault by its size
SPELLED = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32",
           "float": "fp32", "float8": "fp8", "fp8_e4m3": "fp8", "float8-e4m3": "fp8"}


NOT_ROUNDED = ("none", "null", "no", "false")       # words for no quantisation
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")         # from fine to coarse


class Pair(NamedTuple):
    """What healthy pairs of one class left: below `usual` all is well, `most` is the largest."""

    precision: str
    experts: bool | None                # None: with experts or without
    usual: float
    most: float
    source: str


PAIRS = (
    Pair("fp32", None, 2.5e-9, 2.5e-9, "SmolLM2-135M, CPU: 1.3e-11; 0.5B on an H100, padded or "
         "not: log ρ at most 7e-5"),
    Pair("fp16", False, 3e-5, 2.5e-4, "SmolLM2-135M against float32 1.5e-5; the largest is bf16's "
         "over 64, since three bits more round eight times as finely"),
    Pair("fp16", True, 3e-5, 0.004, "bf16's over 8: an eighth as many tokens change their expert"),
    Pair("bf16", False, 0.002, 0.016, "27B of tinker 0.0002; SmolLM2-135M against float32 0.0008 "
         "to 0.0016; random weights on an H100, 0.5B 0.0045, at τ = 0.7 0.0093, 1.5B 0.016"),
    Pair("bf16", True, 0.002, 0.030, "35B-A3B of tinker 0.001 to 0.002; prime-rl 0.0015 to 0.030; "
         "miles 0.018"))

BEYOND = MARGIN * max(p.most for p in PAIRS)        # k3: a fault of any class

# What is rounded on purpose, and what faults leave, on SmolLM2-135M (studies/sizes): k3 and words.
LIKE = ((0.0046, "weights in 8 bits"), (0.015, "weights in 7 bits"), (0.042, "weights in float8"),
        (0.063, "weights in 6 bits"), (0.21, "a layer left out"), (0.55, "weights in 4 bits"))


class Class(NamedTuple):
    """What is known of a pair: its coarser precision, experts, and what was rounded on purpose."""

    precision: str | None = None
    experts: bool | None = None
    quantize: str | None = None

    @classmethod
    def of(cls, *precisions: str | None, experts: bool | None = None,
           quantize: Any = None) -> "Class":
        """Return the class of two sides, each in a precision; None is not known."""
        fine = [spelled(p) for p in precisions if p and known(p)]
        rounded = quantize and str(quantize).lower() not in NOT_ROUNDED
        return cls(max(fine, key=PRECISIONS.index, default=None), experts,
                   str(quantize) if rounded else None)

    @classmethod
    def stated(cls, row: Any) -> "Class":
        """Return the class that a dump's `pair` states; what is no table states nothing."""
        if not isinstance(row, Mapping):
            return cls()
        texts = [x for x in (row.get("engine"), row.get("trainer")) if isinstance(x, str)]
        both = len(texts) == 2 and all(map(known, texts))       # else the coarser is not known
        experts = row.get("experts")
        return cls.of(*texts * both, experts=experts if isinstance(experts, bool) else None,
                      quantize=row.get("quantize"))

    @classmethod
    def of_config(cls, path: str | Path) -> "Class":
        """Return the class that a model's config.json states."""
        try:
            config = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{path} is no model's config.json: it is no JSON") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path} is no model's config.json: it holds no table")
        text = config.get("text_config")
        config = text if isinstance(text, dict) else config
        dtype = config.get("dtype") or config.get("torch_dtype")
        how = config.get("quantization_config")
        how = how.get("quant_method") if isinstance(how, dict) else how
        return cls.of(dtype if isinstance(dtype, str) else None, experts=has_experts(config),
                      quantize=how)

    def over(self, other: "Class") -> "Class":
        """Return what this one knows, and where it does not know, what the other does."""
        return other._replace(**{name: x for name, x in self._asdict().items() if x is not None})

    @property
    def coarse(self) -> bool:
        """True if weights were rounded on purpose, to what no row of PAIRS has."""
        return bool(self.quantize) or self.precision not in {None, *(p.precision for p in PAIRS)}

    def pairs(self) -> list[Pair]:
        """Return the rows of PAIRS that this may be; those of 16 bits if nothing is known."""
        of = [p for p in PAIRS if p.precision == (self.precision or "bf16")]
        return [] if self.coarse else [
            p for p in of if None in (p.experts, self.experts) or p.experts == self.experts]

    @property
    def healthy(self) -> float:
        """The k3 up to which a pair is healthy: that of the best pair if the class is open."""
        rows = self.pairs()
        if self.precision is None or not rows:
            return BEST
        return min(p.usual for p in rows)

    @property
    def fault(self) -> float:
        """The k3 above which a pair is at fault; ∞ if it is rounded on purpose."""
        return max((max(NOTHING, MARGIN * p.most) for p in self.pairs()), default=math.inf)

    def __str__(self) -> str:
        kind = {True: " with experts", False: " without experts", None: ""}[self.experts]
        return (self.precision or "a precision that is not known") + kind + (
            f", rounded ({self.quantize})" if self.quantize else "")

    def place(self, k3: float) -> str:
        """Say where a k3 lies in the table."""
        rows, low = self.pairs(), self.healthy
        size = f"k3 {k3:.2g} a token"
        if not rows:
            return f"{size} of a pair that is rounded on purpose"
        if k3 <= low:
            return f"{size}, where {low:g} is usual for {named(rows)}"
        return f"{size}, " + ", and ".join(
            f"{k3 / p.most:.1f} times the most that {named([p])} left ({p.most:g})" if k3 > p.most
            else f"ordinary for {named([p])} (up to {p.most:g})" for p in rows)


EXPERTS = {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}


def has_experts(config: Mapping[str, Any]) -> bool:
    """True if a model's configuration, as a table, or a table in it has more than one expert."""
    for name, value in config.items():
        if isinstance(value, Mapping) and has_experts(value):
            return True
        counts = value if isinstance(value, list) else [value]
        if name in EXPERTS and any(str(n).isdigit() and int(str(n)) > 1 for n in counts):
            return True
    return False


BEST = 0.0002           # k3 of the best pair of 16 bits: a dense 27B, as tinker measured it


def spelled(precision: str) -> str:
    """Return a precision's short name: bfloat16 is bf16."""
    name = precision.lower().removeprefix("torch.")
    return SPELLED.get(name, name)


def known(precision: str) -> bool:
    return spelled(precision) in PRECISIONS


def named(rows: list[Pair]) -> str:
    """Name a few rows of PAIRS in words."""
    kinds = {row.experts for row in rows}
    model = ("models" if len(kinds) > 1 or None in kinds else
             "experts" if True in kinds else "dense models")
    return f"{model} in {rows[0].precision}"


def like(k3: float) -> str:
    """Say which faults are of this size, as they were on a real model of 135M."""
    near = [f"{words} ({size:g})" for size, words in LIKE if k3 / 3 <= size <= 3 * k3]
    (least, smallest), (most, largest) = LIKE[0], LIKE[-1]
    size = (f"as much as {' or '.join(near)}" if near else
            f"more than {largest} ({most:g})" if k3 > most else f"less than {smallest} ({least:g})")
    return f"it is {size} on a model of 135M; stale weights or another prompt can leave any gap"


def table() -> str:
    """Return PAIRS as lines of text, for a terminal."""
    lines = ["healthy pairs, k3 per token (r.m.s. of log ρ is about √(2 k3)):",
             "  precision, model      usual up to   largest   a fault above"]
    for p in PAIRS:
        kind = {True: "experts", False: "dense", None: "any"}[p.experts]
        lines += [f"  {p.precision:5} {kind:15} {p.usual:>10g}  {p.most:>9g}  "
                  f"{max(NOTHING, MARGIN * p.most):>9g}",
                  *textwrap.wrap(p.source, 72, initial_indent=8 * " ", subsequent_indent=8 * " ")]
    faults = ", ".join(f"{words} {k3:g}" for k3, words in LIKE)
    return "\n".join([*lines, *textwrap.wrap(f"faults on SmolLM2-135M: {faults}", 78)])
