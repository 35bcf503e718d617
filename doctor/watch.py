"""Watch a run from inside a trainer: say the doctor's line on the first batch, and when it changes.

    watch = Watch(dump="dumps")                                             # in the trainer
    watch.see(step, lambda: rows_of(…), metrics.__setitem__)               # once π_old is computed

This file decides three things. What the doctor costs: it examines at most EXAMINED tokens of a
batch, always of the first FREE batches, and of others while it has used less than SHARE of the
run's time (tools/watch_cost.py measures a batch). What an alarm is: a fault that is certain, as a
log-prob that is not finite, or one that two batches running show, since one in many honest batches
looks faulty by chance. And that a
run never ends by it: an exception is one warning, and the doctor is silent from then on.
`three-policies doctor --watch` is follow.py.
"""

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from three_policies.doctor.dumps import Response, append, response
from three_policies.doctor.normal import Class
from three_policies.doctor.report import UNKNOWN, VERDICTS, Report, examine

EXAMINED = 2 ** 13      # most tokens of a batch
FREE = 8                # batches that are examined whatever that costs
SHARE = 0.01            # of the run's time, for the batches after those


class Verdict(NamedTuple):
    """What the doctor says of one batch."""

    report: Report
    k3: float                           # nats per token
    changed: bool                       # another cause than before, or the first batch
    alarm: bool                         # a fault that is certain, or that two batches running show

    def line(self, step: int | str) -> str:
        if not self.report.tokens and not self.report.lost.tokens:
            return f"doctor, {step}: no token that counts"
        fault = ", a fault" * self.report.faulty
        return (f"{'ALARM ' * self.alarm}doctor, {step}: k3 {self.k3:.1e}{fault}; "
                f"{self.report.in_short()}")

    def metrics(self) -> dict[str, float]:
        """Return what a trainer logs."""
        return {"doctor/alarm": float(self.alarm), "doctor/fault": float(self.report.faulty),
                "doctor/unsure": float(self.report.verdict == "cannot tell"),
                "doctor/e_rho": self.report.mean, "doctor/k3": self.k3}


class Judge:
    """A Judge remembers what was said of the last batch. `pair`: what is known of both sides."""

    def __init__(self, pair: Class = UNKNOWN) -> None:
        self.pair, self.alarms = pair, 0
        self.last: str | None = None
        self.worst: str | None = None           # of the verdicts; None: no batch had a token

    def of(self, responses: Iterable[Response]) -> Verdict:
        """Examine a batch, and compare it with the one before."""
        report = examine(responses, self.pair)
        if not report.tokens and not report.lost.tokens:            # all masked, or all empty
            return Verdict(report, 0.0, False, False)
        d = report.examined.d()
        first = report.causes[0] if report.causes else None
        found = first.cause if first else "a fault" if report.faulty else "none"
        sure = report.lost.tokens or (first is not None and first.confidence == "certain")
        changed, again = found != self.last, found == self.last
        alarm = bool(report.faulty and (sure or again))
        self.last, self.alarms = found, self.alarms + alarm
        self.worst = max(report.verdict, self.worst or "healthy", key=[*VERDICTS].index)
        k3 = (d.clamp(max=20).expm1() - d).mean().item() if len(d) else 0.0
        return Verdict(report, k3, changed, alarm)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Watch:
    """Watch the batches of a run. `dump`: a directory for what is examined, a file a batch."""

    def __init__(self, dump: str | Path | None = None, say: Callable[[str], None] = to_stderr):
        self.dump, self.say, self.judge = dump, say, Judge()
        self.began, self.spent, self.batches, self.broken = time.monotonic(), 0.0, 0, False
        self.alarmed = False

    def see(self, step: int, rows: Callable[[], list[dict[str, Any]]],
            log: Callable[[str, float], object] = lambda name, value: None) -> None:
        """Examine a batch if the doctor's time allows it, and hand its metrics to the log.

        rows: returns the batch as rows of a dump; it is called only if they are examined.
        """
        began = time.monotonic()
        if self.broken or (self.batches >= FREE
                           and self.spent > SHARE * (began - self.began)):
            return
        try:
            for name, value in self._examine(step, rows()).items():
                log(name, value)
        except Exception as error:          # whatever it is: the run is worth more than the doctor
            self.broken = True
            logging.getLogger(__name__).warning(
                "the doctor watches no longer: %s: %s", type(error).__name__, error)
        self.spent += time.monotonic() - began

    def _examine(self, step: int, rows: list[dict[str, Any]]) -> dict[str, float]:
        few = rows[:count([len(row["token_ids"]) for row in rows])]
        self.batches += 1
        if self.dump is not None:
            place = Path(self.dump) / f"step-{step:06d}.jsonl"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            append(place, few)
        verdict = self.judge.of(response(n, row) for n, row in enumerate(few, 1))
        if verdict.changed or verdict.alarm > self.alarmed:
            self.say(verdict.line(f"step {step}"))
        self.alarmed = verdict.alarm
        return verdict.metrics()


def count(lengths: Iterable[int], most: int = EXAMINED) -> int:
    """Return how many responses are examined: all that together have no more tokens, at least 1."""
    return max(1, sum(total <= most for total in itertools.accumulate(lengths)))


def leading(mask: Tensor) -> slice:
    """Return the rows of a padded batch that are examined; mask: [B, T], its tokens."""
    return slice(count(mask.sum(1).tolist()))
