"""Say what the gap of a run follows over its steps, from a log or from several dumps.

This file decides what a fit (growth.py) may be called. What the log counts by itself comes first: a
delay that grows by one a step, a gap that grows while the learning rate is 0, a gap that equals the
KL to the reference. A fault is named only if no healthy hypothesis comes near.

    print(of(["metrics.jsonl"]))
"""

# pyright: reportUnknownMemberType=false
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from three_policies.doctor import dumps
from three_policies.doctor.growth import Law, Series, fitted, lag_of, room
from three_policies.doctor.logs import OF_DUMPS, Lag, Log, Row, in_folder, is_log, of_dumps, read
from three_policies.doctor.normal import Class
from three_policies.doctor.report import VERDICTS as ANSWERS, Report, examine

FEWEST = 5              # rows that a trend needs
SEEN = 6.0              # nats that a hypothesis must save
TIE = 3.0               # nats within which another one is as good
GROWS = 4.0             # least growth of k3, which is a doubling of log ρ
SURE = 2.4              # standard errors of a rank correlation; five rows in order have 2.45
SAME = 1.5              # factor within which k3 is the KL to the reference
SYNCED = 0.5            # steps that a lag must be short of growing by one a step, after a sync

VERDICTS = {            # what each means, and what to do
    "order": ("the gap grows while no weight moves: an index or an order, not weights",
              "compare what both sides are fed at the first and at the last step: ids, positions, "
              "the order of rows; look for an index that runs on with the steps"),
    "never-synced": ("the engine's weights stay as they are: their delay grows by one a step",
                     "find why the sync does not run, and log the version that the engine has"),
    "failed-sync": ("the trainer's weights do not reach the engine",
                    "compare a checksum of one weight on both sides after a sync; look at weights "
                    "that are renamed, at LoRA that is not merged, and at what skips the sync "
                    "(verl: free_cache_engine=False did)"),
    "below-grid": ("the updates are below the grid of the engine's weights",
                   "train in the engine's precision, or take larger steps; another sync of the "
                   "same weights brings nothing"),
    "stale": ("the engine is behind, and syncs arrive",
              "nothing is broken; sync more often, or lower the learning rate, if ESS asks for it"),
    "follows": ("the gap follows another column, and not the weights",
                "look at that column first; a floor of arithmetic moves with the entropy"),
    "floor": ("no trend: the gap is the engine's floor, or that of one fixed delay",
              "whether its size is healthy, one dump says"),
    "undecided": ("undecided", "")}
UNKNOWN = Class()
FAULTS = ("order", "never-synced", "failed-sync", "below-grid")
# What a log may lack, and how it comes into the next one.
RECORD = {
    "k3": "k3 per token of both log-probs (verl: actor_rollout_ref.rollout.calculate_log_probs=True"
          "; TRL: use_vllm=True, which logs the mean |log ρ|)",
    "learning rate": "the learning rate: without it, steps stand for the way of the weights",
    "staleness": "the version of the engine's weights, or its delay in steps: it decides between a "
                 "sync that fails and a delay that is meant",
    "dump": "a dump of the first and one of the last step: with --model and --older of that step "
            "the doctor says whose weights the engine has"}


class Trend(NamedTuple):
    """What a log says, and what would decide what it leaves open."""

    log: Log
    verdict: str
    confidence: str = ""
    evidence: Sequence[str] = ()
    record: Sequence[str] = ()          # of RECORD
    lags: Sequence[Lag] = ()
    of: Class = Class()                 # what is known of the pair
    worst: Report | None = None         # of one dump alone, and its file
    where: str = ""

    @property
    def faulty(self) -> bool:
        return self.verdict in FAULTS

    @property
    def k3(self) -> float | None:
        """The largest k3 of the log."""
        gap = ends(self.log)
        return gap["largest"] if gap and gap["name"] == "k3" else None

    @property
    def exit_code(self) -> int:
        """0 if nothing is broken, 1 for a fault, 3 if this cannot tell.

        A gap without a trend is judged by its size, that of dumps by all that the worst one shows.
        """
        if self.faulty or self.log.lost or (self.worst and self.worst.faulty):
            return 1
        if self.verdict == "stale":
            return 0
        if self.worst and self.verdict != "undecided":
            return self.worst.exit_code
        if self.verdict == "undecided" or self.k3 is None or self.of.healthy < self.k3:
            return 1 if self.k3 is not None and self.k3 > self.of.fault else 3
        return 0

    @property
    def answer(self) -> str:
        """One of "fault", "healthy" and "cannot tell", as of a dump."""
        return next(name for name, (_, code) in ANSWERS.items() if code == self.exit_code)

    def why(self) -> str:
        """Return in words what decided the answer."""
        if lost := self.log.lost:
            return f"the gap is NaN or ∞ at {len(lost)} steps, the first of them {lost[0]:g}"
        if self.faulty:
            return VERDICTS[self.verdict][0]
        if self.worst and (self.worst.faulty or self.verdict not in ("stale", "undecided")):
            return f"{self.where}, the worst of {self.log.source}: {self.worst.in_short()}"
        if self.verdict == "stale":
            return VERDICTS[self.verdict][0]
        if self.k3 is None or (self.verdict == "undecided" and self.k3 <= self.of.healthy):
            return [*self.evidence, VERDICTS[self.verdict][0]][0]
        return self.of.place(self.k3)

    @property
    def room(self) -> str:
        """Say how much staler the engine may be, where staleness may make the gap."""
        stale = self.verdict in ("stale", "undecided") or len(self.lags) > 1
        return room(self.log, self.lags) if stale else ""

    def as_json(self) -> dict[str, Any]:
        steps = self.log.column("step")
        return {"source": self.log.source, "columns": self.log.names, "rows": len(steps),
                "lost": [*self.log.lost], "steps": [steps[0], steps[-1]], "gap": ends(self.log),
                "verdict": self.answer, "trend": self.verdict, "worst": self.where or None,
                "confidence": self.confidence, "evidence": [*self.evidence],
                "remedy": VERDICTS[self.verdict][1], "record": [RECORD[x] for x in self.record],
                "lags": [lag._asdict() for lag in self.lags], "ess": self.room}

    def __str__(self) -> str:
        steps, (what, remedy) = self.log.column("step"), VERDICTS[self.verdict]
        lines = [f"{self.log.source}: {len(steps)} rows, steps {steps[0]:g} to {steps[-1]:g}.",
                 f"{ANSWERS[self.answer][0]} {self.why()}."]
        if self.log.names.get("k3") != OF_DUMPS:
            lines.append("Read    " + ", ".join(
                f"{name} = {theirs}" for name, theirs in self.log.names.items()))
        if gap := ends(self.log):
            lines.append(f"Gap     {gap['name']} {gap['first']:.3g} at step {gap['at'][0]:g}, "
                         f"{gap['last']:.3g} at step {gap['at'][1]:g}; the largest is "
                         f"{gap['largest']:.3g}, at step {gap['at'][2]:g}")
        for lag in self.lags:
            denied = (f"; {lag.denied} of them have p ≥ 0.5 in the engine and 2 nats less in the "
                      "trainer" + ", which no staleness explains" * (lag.lag == 0)) * (
                          lag.denied > 0)
            lines.append(f"Lag {lag.lag:<4}k3 {lag.k3:.3g} over {lag.tokens} tokens{denied}")
        lines.append(f"Trend   {what}" + f" ({self.verdict}): {self.confidence}" * bool(
            self.confidence))
        lines += [f"        {sentence}" for sentence in self.evidence]
        if self.k3 is not None and self.worst is None:
            lines.append(f"Size    {self.of.place(self.k3)}.")
        lines += [f"Do      {remedy}"] * bool(remedy)
        lines += [f"ESS     {self.room}"] * bool(self.room)
        return "\n".join(lines + [f"Next    record {RECORD[name]}" for name in self.record])


def of(paths: Sequence[str | Path], pair: Class = UNKNOWN) -> Trend:
    """Judge one log, or several dumps in the order of their steps; a folder stands for its files.

    Of the first and of the last dump, and of the worst, it says what the doctor finds in that dump
    alone.
    """
    files = [file for path in paths for file in (in_folder(Path(path)) if Path(path).is_dir()
                                                 else [Path(path)])]
    if not files:
        raise ValueError(f"{paths[0]} is a folder without a log and without a dump")
    if len(paths) == 1 and is_log(paths[0]):
        return judge(read(paths[0]))._replace(of=pair)
    if logs := [str(file) for file in files if is_log(file)]:
        raise ValueError(f"{logs[0]} is a log: give one log, or dumps alone")
    log, lags = of_dumps(files)
    steps, order = log.column("step"), [*ANSWERS].index
    alone, worst = dict[float, str](), (-1, 0.0)
    trend = judge(log, lags)

    for step, file in zip(steps, log.files):            # one report at a time is kept
        report = examine(dumps.read(file), pair)
        bad = order(report.verdict), report.k3
        if bad > worst:
            worst, trend = bad, trend._replace(of=report.of, worst=report, where=file)
        if step in (steps[0], steps[-1]):
            alone[step] = report.in_short()
    evidence = [f"the dump of step {step:g} alone: {words}" for step, words in alone.items()]
    return trend._replace(evidence=[*trend.evidence, *evidence])


def ends(log: Log) -> dict[str, Any] | None:
    """Return the gap at the first and at the last step that has one, and where it is largest."""
    name = log.size
    if not name:
        return None
    rows = [row for row in log.rows if name in row]
    most = max(rows, key=lambda row: row[name])
    return {"name": name, "first": rows[0][name], "last": rows[-1][name], "largest": most[name],
            "at": [rows[0]["step"], rows[-1]["step"], most["step"]]}


def judge(log: Log, lags: Sequence[Lag] = ()) -> Trend:
    """Return the verdict of the first law that a log decides."""
    lacking = [name for name in ("learning rate", "staleness") if name not in log.names
               and not (name == "staleness" and "version" in log.names)]
    dump = ["dump"] * (log.names.get("k3") != OF_DUMPS)
    trend = Trend(log, "undecided", lags=lags, record=[*lacking, *dump])
    rows = [row for row in log.rows if log.size and row.get(log.size, 0) > 0]

    if found := without_sync(log.rows, log.size):
        return trend._replace(verdict="never-synced", confidence=found[0], evidence=found[1:],
                              record=dump)
    if not log.size:
        return trend._replace(evidence=["the log has no column of the gap between both sides"],
                              record=["k3", *lacking])
    if len(rows) < FEWEST:
        return trend._replace(evidence=[f"{len(rows)} rows with a gap are too few for a trend, "
                                        f"which needs {FEWEST}"])
    still = [row for row in rows if row.get("learning rate") == 0]
    if len(still) >= FEWEST and (found := without_motion(still, log.size)):
        return trend._replace(**found)
    if found := as_the_reference(rows, log.size):
        return trend._replace(verdict="failed-sync", confidence="certain", evidence=[found])
    if len(still) == len(rows):
        return trend._replace(verdict="floor", confidence="certain", evidence=[
            "the learning rate is 0 throughout: what is left is the engine's floor"], record=[])
    return of_fits(trend, fitted(Series.of(log)))


# ----------------------------------------------------------------------- what a log counts itself

def without_sync(rows: Sequence[Row], size: str | None) -> list[str] | None:
    """Return how sure it is, and why, if the engine's delay grows by one a step to the end.

    A sync between two rows makes their delays differ by less than their steps. So rows may be left
    out: a sync that fell between two rows is still seen. The stretch without a sync must be three
    times as long as any before it, or all of the log.
    """
    known = [(row["step"], x) for row in rows if not math.isnan(x := lag_of(row))]
    synced = [b for (b, lag_b), (c, lag_c) in pairwise(known) if lag_c - lag_b < c - b - SYNCED]
    if len(known) < FEWEST:
        return None
    begins = next(step for step, _ in known if not synced or step > synced[-1])
    stretch, before = known[-1][0] - begins, [b - a for a, b in pairwise([known[0][0], *synced])]
    if stretch < 4 or stretch < 3 * max(before, default=0):
        return None

    first, last = next(lag for step, lag in known if step == begins), known[-1][1]
    moved = f"from {first:g} to {last:g} " if last > 0 else f"by {stretch:g} "
    sure = "certain"
    reasons = [f"the delay grew {moved}between steps {begins:g} and {known[-1][0]:g}: no sync in "
            f"{stretch:g} steps" + ", unless syncs are meant to be rarer than that" * (not synced)]
    gaps = [row[size] for row in rows if size and row["step"] >= begins and size in row]
    if len(gaps) < 2 or gaps[-1] < 2 * gaps[0]:
        sure = "suggested"
        reasons.append("the gap does not grow: or the version that is logged is a placeholder")
    return [sure, *reasons]


def without_motion(rows: Sequence[Row], size: str) -> dict[str, Any] | None:
    """Return a verdict if the gap grows in rows of learning rate 0, whose weights are all the same.

    Both policies stay as they are, so k3 of a token has one distribution at all steps, whatever the
    engine's arithmetic. Its rank correlation with the step is then 0, unless what both sides are
    fed changes. Longer responses are such a change, and no fault of an index.
    """
    gap, length = ([row.get(name, 1.0) for row in rows] for name in (size, "length"))
    third = max(1, len(gap) // 3)
    growth, longer = (sum(x[-third:]) / sum(x[:third]) for x in (gap, length))
    if rank_z(gap) < SURE or growth < (math.sqrt(GROWS) if size in ("abs", "prob") else GROWS):
        return None
    grown = f"at learning rate 0 the gap grew {growth:.3g} times in {len(rows)} rows"
    if longer > 1.5 and rank_z(length) > SURE:
        return {"verdict": "undecided", "evidence": [
            f"{grown}, and the responses {longer:.2g} times: a gap that grows with the position, "
            "or an index"], "record": ["dump"]}
    return {"verdict": "order", "confidence": "likely", "evidence": [grown], "record": ["dump"]}


def rank_z(x: Sequence[float]) -> float:
    """Return Kendall's rank correlation of a column with its order, in standard errors."""
    n = len(x)
    total = sum((b > a) - (b < a) for i, a in enumerate(x) for b in x[i + 1:])
    return total / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def as_the_reference(rows: Sequence[Row], size: str) -> str | None:
    """Say so if the gap is the KL to the reference: an engine that still has its weights.

    Then μ = π_ref on every token, so both columns are k3 of one difference, which is d²/2 with
    either sign. An engine that gets weights has a gap that does not follow π_ref.
    """
    pairs = [(row[size], row["reference"]) for row in rows if row.get("reference", 0) > 0]
    late = pairs[len(pairs) // 2:]
    if size != "k3" or len(pairs) < FEWEST or late[-1][1] < GROWS * pairs[0][1]:
        return None
    if not all(1 / SAME < gap / kl < SAME for gap, kl in late):
        return None
    return (f"k3 is the KL to the reference, {late[-1][0]:.3g} and {late[-1][1]:.3g} at the end: "
            "the engine has the reference's weights")


# ---------------------------------------------------------------------------- what a fit is called

def of_fits(trend: Trend, laws: Sequence[Law]) -> Trend:
    """Name the hypothesis that explains most, and every one that comes near.

    If both a fault and what is healthy come near, the log cannot tell. Where the log has the lag of
    the engine's weights, syncs are known to happen, since `without_sync` has not seen otherwise.
    """
    best = [next((law for law in laws if law.verdict == verdict), None)
            for verdict in ("failed-sync", "below-grid", "stale", "follows")]
    near = sorted((law for law in best if law and law.nats >= max(SEEN, laws[0].nats - TIE)
                   and (law.growth >= GROWS or law.verdict not in FAULTS)),
                  key=lambda law: -law.nats)
    reasons = [f"the gap follows {law.words}: {law.left:.0%} of its variation is left"
               for law in near]
    if not near:
        return trend._replace(verdict="floor", evidence=[
            "neither the way of the weights nor a delay explains its variation"],
            record=[x for x in trend.record if x == "learning rate"])

    kinds = {law.verdict for law in near}
    syncs = not {"staleness", "version"}.isdisjoint(trend.log.names)
    if syncs and near[0].verdict in ("failed-sync", "below-grid"):
        stays = "the log has syncs at all times, so they bring too little" if kinds == {
            "failed-sync"} else "the log has syncs at all times, and the growth ends"
        return trend._replace(verdict="below-grid", confidence="suggested",
                              evidence=[*reasons, stays],
                              record=[x for x in trend.record if x == "dump"])
    if kinds & {*FAULTS} and kinds - {*FAULTS}:
        return trend._replace(evidence=reasons)
    if near[0].verdict == "failed-sync" and len(kinds) == 1:
        reasons.append("an engine's grid leaves the same trend while the updates are below it: if "
                    "every sync is known to arrive, the cause is below-grid")
    return trend._replace(verdict=near[0].verdict, evidence=reasons,
                          confidence="likely" if len(kinds) == 1 else "suggested",
                          record=trend.record if kinds & {*FAULTS} else [])
