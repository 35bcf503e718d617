"""Follow a run in a terminal: a line for each step that its log or its dumps show.

    three-policies doctor --watch RUN                     # a run of this trainer: name or place
    three-policies doctor --watch DUMPS [--idle MINUTES]  # a file or folder of dumps that grows

This file decides what a step is: a line of metrics.jsonl, a new file of dumps, or the rows that one
has gained. A file is read once it has stopped growing for a look, up to its last whole line, and at
the end whole. An alarm is the one of watch.py; of metrics, a number that is not finite, or a
sentence of `diagnose` that two steps running earn.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from three_policies.doctor.dumps import Response, read, response
from three_policies.doctor.health import diagnose
from three_policies.doctor.normal import Class
from three_policies.doctor.report import UNKNOWN, VERDICTS
from three_policies.doctor.watch import Judge, Verdict

LOOK = 1.0                                  # seconds from one look to the next
KINDS = (".jsonl", ".parquet", ".pt", ".pth")
SHOWN = (("reward/mean", "reward"), ("rollout_corr/k3_kl", "k3"),
         ("rollout_corr/rollout_is_raw_eff_sample_size", "ESS/N"))


class Grown:
    """A file of lines, of which the new ones are asked for again and again."""

    def __init__(self, path: Path):
        self.path, self.size, self.at, self.line = path, -1, 0, 0

    def rows(self, at_once: bool, end: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield each new line's number and its JSON, if the file has rested since the last look.

        end: also a last line that nothing ends, unless it is cut.
        """
        size, self.size = self.size, self.path.stat().st_size
        if self.size < self.at:                                     # it was written anew
            self.at = self.line = 0
        if self.size == self.at or not (at_once or size == self.size):
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            for text in file:
                if not text.endswith(b"\n") and not (end and is_json(text)):
                    break
                self.at, self.line = self.at + len(text), self.line + 1
                try:
                    row = json.loads(text)
                except ValueError:
                    raise ValueError(f"{self.path}, line {self.line}: this is not JSON") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{self.path}, line {self.line}: this is no table")
                yield self.line, row

    def whole(self, at_once: bool) -> Iterator[Response]:
        """Yield the responses of a file that is no lines, once, when it has stopped growing."""
        size, self.size = self.size, self.path.stat().st_size
        if not self.at and (at_once or size == self.size):
            self.at = self.size
            yield from read(self.path)


class Follower:
    """Follow one place, and count its alarms."""

    def __init__(self, place: Path, say: Callable[[str], None], figure: str | None = None,
                 pair: Class = UNKNOWN):
        self.place, self.say, self.figure = place, say, figure
        self.judge, self.files = Judge(pair), dict[Path, Grown]()
        self.named, self.steps, self.logged, self.alarms = set[str](), 0, 0, 0

    def look(self, at_once: bool = False, end: bool = False) -> int:
        """Say what is new; return how many steps that was. end: nothing is added any more."""
        new = 0
        log = self.place / "metrics.jsonl"
        if log.is_file():
            for _, metrics in self.file(log).rows(at_once, end):
                self.step(metrics)
                new += 1
        for path in self.dumps():
            file = self.file(path)
            responses = ([response(line, row) for line, row in file.rows(at_once, end)]
                         if path.suffix == ".jsonl" else [*file.whole(at_once)])
            if responses:
                self.batch(path.stem, responses)
                new += 1
        return new

    def file(self, path: Path) -> Grown:
        return self.files.setdefault(path, Grown(path))

    def dumps(self) -> list[Path]:
        """Return the files of dumps there are, in the order of their names."""
        if self.place.is_file():
            return [self.place]
        folder = self.place / "dumps" if (self.place / "metrics.jsonl").exists() else self.place
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted((path for path in found if path.suffix in KINDS), key=in_order)

    def batch(self, name: str, responses: list[Response]) -> None:
        """Say a batch's line, and draw it where the verdict changed."""
        verdict: Verdict = self.judge.of(responses)
        self.alarms += verdict.alarm
        self.say(verdict.line(name))
        if self.figure and verdict.changed and verdict.report.tokens:
            from three_policies.doctor.panels import save
            save(verdict.report.examined, self.figure)

    def step(self, metrics: dict[str, Any]) -> None:
        """Say a step's metrics and what looks wrong in them."""
        self.steps, self.logged = metrics.get("step", self.steps + 1), self.logged + 1
        sentences = {x.split()[0]: x for x in diagnose(metrics)}
        lost = any(re.match(r"\S+ is -?(nan|inf)\b", x) for x in sentences.values())
        alarm = lost or bool(self.named & sentences.keys())
        self.named, self.alarms = {*sentences}, self.alarms + alarm
        numbers = [f"{name} {metrics[key]:.3g}" for key, name in SHOWN
                   if isinstance(metrics.get(key), int | float)]
        fault = ", a fault" * lost
        self.say("; ".join([f"{'ALARM ' * alarm}step {self.steps}: {', '.join(numbers)}{fault}",
                            *sentences.values()]))

    def ended(self) -> bool:
        """True if a run of this trainer has made all the steps that its settings ask for."""
        settings = self.place / "config.yaml"
        if not settings.is_file():
            return False
        asked = re.search(r"^train:\n(?:[ #].*\n)*?  steps: (\d+)$",
                          settings.read_text(encoding="utf-8"), re.MULTILINE)
        return asked is not None and self.steps >= int(asked[1])


def is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def in_order(path: Path) -> list[Any]:
    """Return a key by which step 10 comes after step 9."""
    return [(0, int(x), "") if x.isdigit() else (1, 0, x) for x in re.split(r"(\d+)", path.name)]


def place_of(name: str) -> Path:
    """Return the place that is named, or that of a run of this name; ValueError if neither is."""
    for place in (Path(name), Path("runs") / name):
        if place.exists():
            return place
    raise ValueError(f"--watch {name}: there is no such file or folder, and no run runs/{name}")


def follow(name: str, say: Callable[[str], None], figure: str | None = None,
           idle: float | None = None, pair: Class = UNKNOWN) -> int:
    """Follow a place until Ctrl-C, the run's end, or `idle` minutes without news.

    Return the exit code of the worst answer, and 1 after an alarm. idle 0: say what is there, and
    end. Raises ValueError if there is nothing to read then.
    """
    follower = Follower(place_of(name), say, figure, pair)
    seen, last = 0, time.monotonic()
    try:
        while True:
            new = follower.look(at_once=idle == 0)
            seen, last = seen + new, time.monotonic() if new else last
            if idle is not None and time.monotonic() - last >= 60 * idle:
                break
            if not new and follower.ended():
                break
            time.sleep(LOOK)
    except KeyboardInterrupt:
        pass
    seen += follower.look(at_once=True, end=True)
    if not seen:
        raise ValueError(f"{name} has no step and no dump so far: a folder of {', '.join(KINDS)}, "
                         "such a file, or a run's directory is followed")
    worst = follower.judge.worst
    if not follower.logged and worst is None:
        raise ValueError(f"{name} has no token that counts")
    return 1 if follower.alarms else VERDICTS[worst or "healthy"][1]
