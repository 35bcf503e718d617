"""Say what a dump of log-probs holds: whether π is a distribution, and the causes of a mismatch.

A dump has log μ and log π of sampled tokens. causes.py finds what made them differ.
"""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from three_policies.doctor.causes import BY_SIZE, CAUSES, find_causes
from three_policies.doctor.laws import Finding
from three_policies.doctor.normal import BEYOND, Class, like
from three_policies.doctor.tokens import LOWEST, ROUNDING, Tokens, confident, one_sided, undrawn

LIMIT = 300_000         # most tokens, masked ones too, that are searched for causes
CHANCE = -25.0          # nats: a row less likely than e to it, twice to the last digit, is a copy
EXACT = 1e-4            # logits: two kernels in float32 leave less in most tokens
TELLS = 0.05            # E[ρ] is affirmed if its doubt is at most this: see `Report.proper`
COSTS = (("prompt_ids", "temperature, penalty, padding and window are found less well or never"),
         ("entropy", "a mistake that both sides make cannot be found, nor a division after the "
          "softmax told from a cut"))


UNKNOWN = Class()
# From the best to the worst: the words that an answer begins with, and the command's exit code.
# 2 is for what cannot be read. A script that stops at 1 goes on where nothing is known, and one
# that wants to be sure asks for 0.
VERDICTS = {"healthy": ("Healthy:", 0), "cannot tell": ("Cannot tell:", 3),
            "fault": ("A fault:", 1)}
FEWEST = 100            # tokens: with fewer only what no pair of any class leaves is a fault


class Lost(NamedTuple):
    """The sampled tokens of which a side has no finite log-prob."""

    tokens: int = 0
    responses: int = 0                  # that have such a token
    whole: int = 0                      # of these, that have no other sampled token

    def line(self, tokens: int, responses: int) -> str:
        """Return a sentence, given how many other tokens and how many responses there are."""
        rows = (f"whole rows of them, {self.whole} of {responses}" if self.whole == self.responses
                else f"in {self.responses} of {responses} responses, "
                f"{f'{self.whole} of them' if self.whole else 'none'} whole")
        return (f"{self.tokens} of {tokens + self.tokens} sampled tokens have no finite log-prob "
                f"and are left out: {rows}")


class Report(NamedTuple):
    """What a dump says: E[ρ] over all its tokens, and at most three causes."""

    responses: int
    tokens: int
    mean: float                         # E[ρ], and its standard error
    error: float
    missing: tuple[str, ...]            # names of COSTS that the dump lacks
    causes: list[Finding]
    examined: Tokens                   # those that were searched for causes
    lost: Lost = Lost()
    k3: float = 0.0                     # E[ρ − 1 − log ρ] per token
    square: float = 0.0                 # E[(log ρ)²]
    of: Class = Class()                 # what is known of the pair
    rescored: bool = False              # whether the model found no fault in either column
    copies: int = 0                     # rows that are left out, since they repeat others
    pairs: int = 0                      # how many different pairs the rows state

    @property
    def verdict(self) -> str:
        """One of "fault", "healthy" and "cannot tell".

        A law that is broken is a fault of any size, and so is a token of which the engine is sure
        and the trainer is not (eq:confident), if there are no experts: in 16 bits a token may go to
        another one, which moves logits by more than rounding. What is found by its size alone is a
        fault above what any healthy pair of its class left (normal.py). A pair is healthy below
        what is usual in its class; one class more than another leaves room for doubt. With fewer
        than FEWEST tokens a law may be broken by chance.
        """
        return self.decided[0]

    @property
    def decided(self) -> tuple[str, str]:
        """Return the verdict, and what decided it, in words; "" if that was the size alone."""
        first = self.causes[:1]                # of what comes after it a suggestion is no law
        law = next((f for f in self.causes if f.confidence != "suggested"
                    or (f in first and f.cause not in BY_SIZE)), None)
        sure = 0 if self.rescored or self.of.coarse else confident(self.examined)
        denied = f"of {sure} tokens μ is above ½ and π over 2 nats less"

        if self.lost.tokens:
            return "fault", (f"{self.lost.tokens} of {self.tokens + self.lost.tokens} sampled "
                             "tokens have no finite log-prob")
        if self.tokens < FEWEST and not self.rescored:
            large = self.k3 > max(self.of.fault, BEYOND)
            return ("fault", "") if large else ("cannot tell", f"{self.tokens} tokens are too few")
        if law:
            return "fault", CAUSES[law.cause][0]
        if sure and self.of.experts is False:
            return "fault", f"{denied}, as no noise is without experts"
        if self.proper is False:
            return "fault", "π is no distribution over what μ sampled"
        if self.rescored:
            return "healthy", "the model finds no fault in either column"
        if self.k3 > self.of.fault:
            return "fault", ""
        if sure and self.of.experts is None:
            return "cannot tell", f"{denied}, a fault if the model has no experts"
        if self.copied:
            return "cannot tell", "both columns are equal to the last digit"
        if self.k3 > self.of.healthy:
            return "cannot tell", ""
        if self.causes:
            return "cannot tell", f"its size is usual, but it looks like {self.causes[0].cause}"
        return "healthy", ""

    @property
    def exit_code(self) -> int:
        """0 for healthy, 1 for a fault, 3 if the dump cannot tell."""
        return VERDICTS[self.verdict][1]

    @property
    def copied(self) -> bool:
        """True if all log-probs agree to the last digit, where that is not known to be so."""
        return self.of.precision != "fp32" and len(self.examined.mu) > 0 and (
            not self.examined.d().any())

    @property
    def proper(self) -> bool | None:
        """True if π is a distribution over what μ sampled, False if not, None if undecided.

        A broken record moves E[ρ]: a cut that keeps the mass Z makes it Z. Five standard errors are
        in doubt, and so is what n tokens need not show, a mass of 5/n (`undrawn`). Near 1, E[ρ]
        affirms a distribution if all doubt is at most TELLS, since then a loss of more would have
        been seen. That is 5/n at n = 100, with fewer tokens nothing is said; so the error must be
        at most 0.01. Far from 1, E[ρ] denies it, unless five errors reach 0: then a few tokens
        make up the mean, and its error is as unknown.  (eq:martingale, eq:affirmed)
        """
        if self.tokens < FEWEST:
            return None
        doubt = max(5 * self.error, ROUNDING)
        if abs(self.mean - 1) <= doubt:
            return True if doubt <= TELLS else None
        if self.mean <= doubt or undrawn(self.examined.d().expm1(), 1.0):
            return None
        return False

    @property
    def faulty(self) -> bool:
        """True if the verdict is a fault."""
        return self.verdict == "fault"

    def as_json(self) -> dict[str, Any]:
        """Return what --json prints; some names are there if such rows are."""
        lost = {"not_finite": self.lost._asdict()} if self.lost.tokens else {}
        lost |= {"copies": self.copies} if self.copies else {}
        lost |= {"differing_pairs": self.pairs} if self.pairs > 1 else {}
        return {"verdict": self.verdict, "proper": self.proper, "e_rho": [self.mean, self.error],
                "tokens": self.tokens, "k3": self.k3, "rms": math.sqrt(self.square),
                "pair": self.of._asdict(), **lost,
                "causes": [{"cause": f.cause, "confidence": f.confidence, "evidence": f.evidence,
                            "remedy": CAUSES[f.cause][1]} for f in self.causes]}

    def in_short(self) -> str:
        """Return one line: E[ρ], the first cause, and what is not finite."""
        first = self.causes[0] if self.causes else None
        undecided = " (undecided)" * (self.proper is None)
        lost = f"; {self.lost.line(self.tokens, self.responses)}" * bool(self.lost.tokens)
        unsure = "cannot tell: " * (self.verdict == "cannot tell")
        return f"E[ρ] = {self.mean:.4f} ± {self.error:.4f}{undecided}; {unsure}" + (
            f"{first.cause} ({first.confidence}): {first.evidence}" if first else
            f"no cause found: {self.without_cause()}") + lost

    def without_cause(self) -> str:
        """Say what is known without a cause: the noise of two kernels explains no E[ρ] but 1."""
        if self.proper is False:
            return "E[ρ] says only that log μ is not of what was drawn, or that π " + (
                "lacks a cut that μ had" if self.mean < 1 else "adds up to more than 1")
        if self.copied:
            return ("both columns are equal to the last digit, as if one were a copy of the other, "
                    "or two kernels agreed in every bit")
        if self.verdict == "healthy":
            return "what differs is within the noise of two kernels"
        return f"the gap is {'more than' if self.faulty else 'not clearly'} noise of two kernels"

    def answer(self) -> str:
        """Return the verdict in a line: what decided it, and where k3 lies."""
        verdict, why = self.decided
        return " ".join([VERDICTS[verdict][0], *([f"{why}."] if why else []),
                         *([self.normal()] if self.tokens else [])])

    def normal(self) -> str:
        """Say where the reader's k3 lies, what else looks like that, and what to give."""
        line = f"{self.of.place(self.k3)} (r.m.s. of log ρ {math.sqrt(self.square):.2g})."
        if self.verdict == "healthy" or self.copied:
            return line
        lacks = [flag for flag, known in (("--precision", self.of.precision),
                                          ("--experts or --no-experts", self.of.experts))
                 if known is None]
        say = f"Say {' and '.join(lacks)}, or give --model." if lacks else "Give --model."
        return f"{line} By size {like(self.k3)}. {say}"

    def on_rho(self) -> str:
        """Say whether π is a distribution, or what leaves that undecided."""
        found = f"E[ρ] = {self.mean:.4f} ± {self.error:.4f} (expected 1)"
        if self.proper is None:
            why = (f"fewer than {FEWEST} tokens cannot tell" if self.tokens < FEWEST else
                   f"an error above {TELLS / 5:g} would hide a broken record"
                   if self.error > TELLS / 5 else
                   "tokens that were never drawn may make up the difference")
            return f"{found} is undecided: {why}."
        if self.proper:
            return f"π is a distribution over what μ sampled: {found}."
        over = self.examined.d().expm1()                           # ρ − 1
        unless = ", unless it has over twice μ's mass on tokens that were never drawn" * (
            bool(over.mean() < 0) and one_sided(over))
        return f"π is NOT a distribution over what μ sampled{unless}: {found}."

    def __str__(self) -> str:
        lines = [f"{self.responses} responses, {self.tokens} tokens."]
        if self.lost.tokens:
            lines.append(f"{self.lost.line(self.tokens, self.responses)}. Look at the engine's "
                         "output first.")
        if self.copies:
            lines.append(f"{self.copies} rows more are copies of these to the last digit, and are "
                         "left out.")
        if self.pairs > 1:
            lines.append(f"Rows state different pairs, {self.pairs} of them: what differs is taken "
                         "as unknown. Split the dump by engine.")
        lines += [f"Without {name}: {cost}." for name, cost in COSTS if name in self.missing]
        lines.append(self.on_rho())
        lines.append(self.answer())

        others = {f.other.cause for f in self.causes if f.other}
        for f in self.causes:
            what, remedy = CAUSES[f.cause]
            word = "Or" if f.cause in others and f.left >= 1 else "Then"
            lines += [f"{'Cause' if f is self.causes[0] else word:8}{what} ({f.cause}): "
                      f"{f.confidence}", f"        {f.evidence}", f"Do      {remedy}"]

        if not self.causes:
            lines.append(f"No cause found: {self.without_cause()}.")
        return "\n".join(lines)


@dataclass
class Sums:
    """The Sums are what is added up over all rows of a dump, with one of each copied row."""

    responses: int = 0
    tokens: int = 0
    copies: int = 0
    total: float = 0.0                  # of ρ − 1, and its squares
    squares: float = 0.0
    k3: float = 0.0
    square: float = 0.0                 # of log ρ
    lost: Lost = field(default_factory=Lost)
    lacking: set[str] = field(default_factory=set[str])
    stated: set[Class] = field(default_factory=set[Class])
    known: set[int] = field(default_factory=set[int])

    def add(self, r: Any) -> bool:
        """Add a row; return False for a copy, which is counted and nothing else."""
        sampled = [(mu, pi) for mu, pi, counts in zip(
            r.rollout_log_probs, r.train_log_probs, r.mask) if counts]
        if sum(mu for mu, _ in sampled) < CHANCE:
            content = hash((*map(tuple, (r.prompt_ids or (), r.token_ids, r.mask)), *sampled))
            if content in self.known:
                self.copies += 1
                return False
            self.known.add(content)

        over = [math.expm1(min(20.0, pi - mu)) for mu, pi in sampled]               # ρ − 1
        sizes = [min(max(pi - mu, LOWEST), 20.0) for mu, pi in sampled]
        self.responses, self.tokens = self.responses + 1, self.tokens + len(over)
        self.total, self.squares = self.total + sum(over), self.squares + sum(x * x for x in over)
        self.k3, self.square = self.k3 + sum(over) - sum(sizes), self.square + sum(
            x * x for x in sizes)
        lost = r.not_finite > 0
        self.lost = Lost(self.lost.tokens + r.not_finite, self.lost.responses + lost,
                         self.lost.whole + (lost and not over))
        self.lacking |= {name for name, x in (("prompt_ids", r.prompt_ids), ("entropy", r.entropy))
                         if x is None and r.token_ids}
        self.stated |= {Class.stated(r.pair)} - {UNKNOWN}
        return True

    def pair(self) -> Class:
        """Return what all rows state that state something; what differs is open.

        But if some are rounded on purpose, no size is a fault of the whole.
        """
        agreed = [values.pop() if len(values := {*column}) == 1 else None
                  for column in zip(*self.stated)]
        rounded = next((of.quantize for of in self.stated if of.quantize), None)
        return Class(*agreed)._replace(quantize=rounded)


def examine(dump: Iterable[Any], of: Class = UNKNOWN) -> Report:
    """Read responses (doctor.dumps.Response) once: E[ρ] is of all, the causes of a part.

    of: what is known of the pair; what it leaves open the dump may state, or show.

    (eq:affirmed)
    The part has at most LIMIT tokens, in whole groups of equal prompts, chosen by a hash of the
    prompt. So memory is bounded, and tokens after one prefix stay together. Of a group that is
    larger by itself, only a part stays.
    """
    kept: list[tuple[float, int, Any]] = []             # each with its place by hash and in order
    share, held, sums = 1.0, 0, Sums()
    for number, r in enumerate(dump):
        if not sums.add(r):
            continue
        if (place := _place(r)) < share:
            kept.append((place, number, r))
            held += len(r.token_ids)
        while held > LIMIT and len(kept) > 1:
            share /= 2
            kept = [one for one in kept if one[0] < share] or kept[:len(kept) // 2]
            held = sum(len(r.token_ids) for *_, r in kept)

    part = Tokens.of([r for *_, r in kept], [number for _, number, _ in kept])
    n = max(1, sums.tokens)
    of = of.over(sums.pair()).over(Class("fp32" if is_exact(part) else None))
    return Report(sums.responses, sums.tokens, 1 + sums.total / n, math.sqrt(sums.squares) / n,
                  tuple(sorted(sums.lacking)), find_causes(part, of.experts, of.coarse), part,
                  sums.lost, sums.k3 / n, sums.square / n, of, copies=sums.copies,
                  pairs=len(sums.stated))


def is_exact(x: Tokens) -> bool:
    """True if half of the tokens differ by what float32 leaves, and some do."""
    e = x.take(x.unsure()).e().abs()
    return len(e) >= 100 and 0 < e.median().item() < EXACT


def _place(r: Any) -> float:
    """Return a number in [0, 1) that the responses to one prompt share."""
    text = repr(r.token_ids if r.prompt_ids is None else (r.prompt_ids, r.line >> 12))
    return zlib.crc32(text.encode()) / 2 ** 32
