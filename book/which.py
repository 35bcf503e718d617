"""Read book/which.yaml, the path of "Which correction do I need?", and add the studies' numbers.

An evidence names two arms of a study in one regime. Means, difference and verdict are computed from
the study's table, by that study's own criterion: Holm's adjustment over the declared family in the
second study, an unadjusted 95 % interval in the first.
"""

import statistics
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from three_policies.book import tables
from three_policies.doctor.causes import CAUSES, HONEST
from three_policies.studies.study import config_of

ROOT = Path(__file__).resolve().parent.parent

VERDICT = {"better": "separable", "worse": "separable", "open": "not separable", None: "not tested"}
SEPARABLE = ("*Separable* means p ≤ 0.05 by sign flips after Holm's adjustment in the second "
             "study, and an interval without 0 in the first (chapter 11).")
SYSTEMS = {"verl": "verl 0.9", "skyrl": "SkyRL 0.3 and 0.4", "trl": "TRL 1.16, GRPOConfig"}
ORDER = {"nine": "first", "sixty-four": "second"}
ENDPOINT = {"nine": ("final_accuracy", "held-out accuracy at the end of training"),
            "sixty-four": ("area", "held-out accuracy averaged over training")}


class Evidence(NamedTuple):
    """Compare an arm with its baseline, in one regime of one study."""

    key: dict[str, str]                  # as which.yaml has it
    arms: tuple[str, str]                # what the page calls the arm and its baseline
    seeds: tuple[list[float], list[float]]         # the endpoint, run by run, in the same order
    difference: str                      # paired by seed, with its 95 % interval
    found: str | None                    # better, worse or open; None: no declared contrast
    where: str                           # the regime in words
    below: tuple[int, int]               # runs that are below the accuracy they started from
    endpoint: str
    source: str                          # where chapter 11 has the numbers

    @property
    def means(self) -> list[str]:
        """Return both means with their standard deviations over the runs."""
        return [f"{statistics.mean(x):.2f} ± {statistics.stdev(x):.2f}" for x in self.seeds]


class Answer(NamedTuple):
    """An answer, its evidence, and what follows: another question, or an outcome's name."""

    place: str                           # the answers so far, joined by "-": an id of the page
    says: str
    why: str
    evidence: list[Evidence]
    causes: dict[str, tuple[str, str]]   # what the doctor names → what it means, what to turn
    then: "Question | None"
    take: str | None


class Question(NamedTuple):
    """A question and its answers."""

    name: str
    asks: str
    help: str
    answers: list[Answer]


@cache
def settings(study: str, regime: str, arm: str) -> Any:
    """Return the whole configuration of an arm's runs, as the study declared it."""
    declared = yaml.safe_load((ROOT / "studies" / study / "declared.yaml").read_text())
    return config_of(declared | {"name": study}, regime, arm, 1)


@cache
def judged() -> dict[tuple[str, str, str | None], bool]:
    """Return whether each declared contrast of the second study is separable."""
    return {(x.regime, x.arm, x.other): x.separable for x in tables.judged_contrasts()}


def regime_in_words(study: str, regime: str, arms: tuple[str, str]) -> str:
    """Write the length, the rounding, the staleness and the learning rate of both arms' runs."""
    one, other = (settings(study, regime, arm) for arm in arms)
    bits, late = one.rollout.quantize, one.rollout.staleness
    tokens = one.task.length if one.task.kind == "dyck" else one.task.size + 1
    rates = " against ".join(dict.fromkeys(
        f"{x.train.lr:f}".rstrip("0") for x in (one, other)))
    return ", ".join([f"{tokens} tokens", f"{bits}-bit weights" if bits else "unrounded weights",
                      f"{late} steps stale" if late else "on time", f"learning rate {rates}"])


def verdict(key: dict[str, str], rows: list[dict]) -> str | None:
    """Judge a difference as its study does: better, worse, open, or None where none is declared."""
    gap, width = tables.paired(rows[0], rows[1], ENDPOINT[key["study"]][0])
    separable = abs(gap) > width
    if key["study"] == "sixty-four":
        wanted = (key["regime"], key["arm"], key["against"])
        if wanted not in judged():
            return None
        separable = judged()[wanted]
    return ("better" if gap > 0 else "worse") if separable else "open"


def evidence(key: dict[str, str], called: dict[str, str]) -> Evidence:
    """Compute one evidence of which.yaml; a name that no table has is a KeyError."""
    study, arms = key["study"], (key["arm"], key["against"])
    of_regime, column = tables.runs(study)[key["regime"]], ENDPOINT[study][0]
    rows = [of_regime[arm] for arm in arms]
    if "runs" in key:                    # of the late runs of the first study: also other rounding
        rows = [{which: row for which, row in tables.late_runs(arm).items()
                 if tables.FRONTIER[key["runs"]](*which)} for arm in arms]
    shared = sorted(set(rows[0]) & set(rows[1]))
    rows = [{seed: of_arm[seed] for seed in shared} for of_arm in rows]
    one, other = ([float(row[column]) for row in of_arm.values()] for of_arm in rows)
    begun = [[float(row["first_accuracy"]) for row in of_arm.values()] for of_arm in rows]
    gap, width = tables.paired(rows[0], rows[1], column)
    return Evidence(
        key, (called.get(arms[0], f"`{arms[0]}`"), called.get(arms[1], f"`{arms[1]}`")),
        (one, other), f"{gap:+.2f} ± {width:.2f}".replace("-", "−"), verdict(key, rows),
        f"{regime_in_words(study, key['regime'], arms)}, {len(shared)} runs each"
        + (f" ({key['runs']})" if "runs" in key else ""),
        (sum(x < x0 for x, x0 in zip(one, begun[0])),
         sum(x < x0 for x, x0 in zip(other, begun[1]))), ENDPOINT[study][1],
        f"Chapter 11, {ORDER[study]} study, `{tables.called(key['regime'])}`")


def doctor_rates(causes: list[str]) -> str:
    """Return how often the doctor named these causes where planted, and on healthy dumps."""
    rows = {cells[0]: cells[1:] for cells in (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for which in (0, 1) for line in tables.rates("rates.txt", which).split("\n"))}
    named, dumps = (sum(int(rows[cause][i]) for cause in causes if cause in rows) for i in (1, 0))
    largest = max(int(name) for name in rows if name.isdigit())
    return (f"named first in {named} of {dumps} dumps of {largest} responses in which one of them "
            f"was planted; false alarms on healthy dumps: {rows[str(largest)][2]}")


def named(which: str) -> dict[str, tuple[str, str]]:
    """Return the doctor's causes of one kind: "honest", or "faults", which no weight repairs."""
    of = {"honest": HONEST, "faults": CAUSES.keys() - HONEST}[which]
    return {name: words for name, words in CAUSES.items() if name in of}


def read(path: Path = ROOT / "book/which.yaml") -> tuple[Question, dict[str, dict[str, Any]]]:
    """Return the first question, which holds all others, and the outcomes by name."""
    given = yaml.safe_load(path.read_text())

    def question(node: dict, place: str) -> Question:
        about = given["questions"][node["question"]]
        return Question(node["question"], about["asks"], about["help"],
                        [answer(x, f"{place}-{x['id']}".strip("-")) for x in node["answers"]])

    def answer(node: dict, place: str) -> Answer:
        if ("then" in node) == ("take" in node):
            raise ValueError(f"{place} must have either `then` or `take`")
        found = [evidence(key, given["arms"]) for key in node.get("evidence", ())]
        causes = named(node["causes"]) if "causes" in node else {}
        return Answer(place, node["says"], node["why"], found, causes,
                      question(node["then"], place) if "then" in node else None, node.get("take"))

    return question(given["path"], ""), given["outcomes"]


def answers(question: Question) -> list[Answer]:
    """Return every answer below a question, in the page's order."""
    return [x for one in question.answers
            for x in [one, *(answers(one.then) if one.then else [])]]


def longest(question: Question) -> int:
    """Return the number of questions on the longest path."""
    return 1 + max(longest(one.then) if one.then else 0 for one in question.answers)
