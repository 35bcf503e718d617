"""A run that is killed at any moment, and started again, ends as if nothing had happened.

pytest kills one small run at every place where it could hurt and at three random moments. A moment
is a number of calls and returns of functions, not of seconds: a slow machine is killed at the same
places as a fast one. The long form kills the demo's command once per run, by the clock, at random
moments between its first step and its end. Its exit code is 1 if one run ends differently:

    python tests/training/test_kills_and_signals.py 20 [SEED] [overrides]

A signal ends a run with one sentence, and SIGTERM lets the step in progress be saved.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from three_policies.tests.support.launching import shell
from three_policies.tests.support.small import SMALL
from three_policies.tests.support.starts import LONG, as_from_a_terminal, said_until, start
from three_policies.tests.support.waiting import HANG, until
from three_policies.training import faults, signals
from three_policies.training.files import read_metrics

HERE = Path(__file__).resolve().parents[2]

DEMO = ["rollout.engine=transformers", "train.steps=12", "train.save_every=2"]
KILLED = ["task.size=1", "task.eval_size=8", "rollout.engine=transformers", "rollout.prompts=4",
         "rollout.samples=4", "rollout.max_tokens=5", "train.mini_batches=2", "train.lr=0.01",
         "train.steps=8", "train.save_every=2", "train.keep=2", "train.eval_every=3"]

# Forks for every attempt: argv[1] is a list of [place, call that is the last] or
# ["moment", calls and returns after the attempt's first step was logged], the rest is the
# trainer's. Each attempt must be killed.
DRIVER = """
import json, os, signal, sys
import shutil
from three_policies import trainer, rollout
from three_policies.training import checkpoints, run
from three_policies.training.tasks import Task
faults, argv = json.loads(sys.argv[1]), sys.argv[2:]
Task.reward = lambda self, problem, response: float(len(response) % 2)     # untaught models earn it
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def half(self, named_tensors):
    for (name, tensor), _ in zip(named_tensors, range(5)):
        self.model.state_dict()[name].add_(1)
    die()
def renamed(part, place):
    if place.name.startswith("step-"): die()
def one_file(path, **_):
    if path.name.startswith("step-") and path.exists():
        min(path.iterdir()).unlink()
        die()
def half_a_line(self, step, metrics):
    with self.record.metrics.open("a") as file: file.write('{"step": 5, "rew')
    die()
# Owner, function, what happens at the fatal call: before or instead, or after.
PLACES = {
    "generation": (rollout.TransformersEngine, "_batch", die, None),
    "scoring": (trainer, "score", die, None),
    "update": (trainer, "update", None, die),
    "weight sync": (rollout.TransformersEngine, "update_weights", half, None),
    "metrics": (run.Run, "log", half_a_line, None),
    "checkpoint begun": (checkpoints.dcp, "save", die, None),
    "checkpoint without state": (checkpoints.dcp, "save", None, die),
    "before rename": (os, "replace", renamed, None),
    "after rename": (os, "replace", None, renamed),
    "removal of the oldest": (shutil, "rmtree", one_file, None),
    "curves": (run, "plot", die, None),
}
def moment(left):
    def call(*_):
        nonlocal left
        left -= 1
        if left <= 0: die()
    return run.Run, "log", None, lambda *_, **__: sys.setprofile(call)
def arm(owner, name, before, after, left):
    real = getattr(owner, name)
    def counted(*args, **kwargs):
        nonlocal left
        left -= 1
        if left <= 0 and before: before(*args, **kwargs)
        result = real(*args, **kwargs)
        if left <= 0 and after: after(*args, **kwargs)
        return result
    setattr(owner, name, counted)
for place, count in [*faults, (None, None)]:
    child = os.fork()
    if child == 0:
        if place: arm(*(moment(count) if place == "moment" else PLACES[place]),
                      1 if place == "moment" else count)
        os._exit(trainer.main(argv))
    status = os.waitpid(child, 0)[1]
    assert status == (0 if place is None else signal.SIGKILL), (place, count, status)
"""
FAULTS = [("generation", 2), ("weight sync", 3), ("scoring", 1), ("checkpoint begun", 1),
          ("before rename", 1), ("checkpoint without state", 1), ("after rename", 1),
          ("weight sync", 2), ("update", 3), ("metrics", 1), ("after rename", 1),
          ("removal of the oldest", 1), ("after rename", 1), ("curves", 1)]
CROSSING = [("weight sync", 6), ("weight sync", 3), ("weight sync", 7)]    # all within a response


def outcome(directory: Path):
    """Return final weights, held-out answers, and metrics without those of clock and memory."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items()
              if not k.startswith(("time/", "tokens_per", "memory/"))} for line in lines]
    [file] = directory.glob("model/*.safetensors")
    return (load_file(file),
            (directory / "eval.jsonl").read_text(), lines)


def differences(directory: Path, whole: Path) -> list[str]:
    (weights, answers, lines), (expected, right, metrics) = outcome(directory), outcome(whole)
    found = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
    found += (["steps"] if [line["step"] for line in lines] != [line["step"] for line in metrics]
              else [])
    found += [f"metrics of step {b['step']}" for a, b in zip(lines, metrics) if a != b]
    return found + (["eval.jsonl"] if answers != right else []) + (
        [] if (directory / "curves.png").exists() else ["curves.png"])


def drive(faults, arguments, cwd, forks):
    (cwd / "driver.py").write_text(DRIVER)
    result = shell([sys.executable, *forks, "driver.py", json.dumps(faults), *arguments], cwd)
    assert result.returncode == 0, result.stderr


def test_a_call_that_has_ended_is_watched_no_longer():
    with faults.end_after(600, "transformers"):
        [watch] = [x for x in threading.enumerate() if isinstance(x, threading.Timer)]
    watch.join(5)
    assert not watch.is_alive()


@pytest.mark.parametrize("case, settings", [
    ("places", ["rollout.staleness=2", "rollout.quantize=4"]),
    ("crossing", ["rollout.staleness=2", "rollout.update_every=2", "train.steps=4",
                  "train.save_every=1", "policy.lora_rank=4", "loss.kl_coef=0.1"]),
    ("moments", ["correction.preset=bypass_pg_is"])])
def test_a_killed_run_ends_as_an_uninterrupted_one(case, settings, tiny_model, forks, tmp_path):
    arguments = [*KILLED, *settings, *(["train.steps=24"] if case == "moments" else []),
                 f"policy.path={tiny_model}"]
    drive([], [*arguments, "run=whole"], tmp_path, forks)
    # A step is some 200 000 calls and returns.
    rng = random.Random(0)
    faults = {"places": FAULTS, "crossing": CROSSING,
              "moments": [("moment", rng.randrange(700_000)) for _ in range(3)]}[case]
    drive(faults, [*arguments, "run=parts"], tmp_path, forks)
    assert differences(tmp_path / "runs/parts", tmp_path / "runs/whole") == []
    # There are train.keep checkpoints, and no leftovers.
    assert len(list((tmp_path / "runs/parts/checkpoints").iterdir())) == 2


def main(faults: int, seed: int, overrides: list[str]) -> int:
    """Plant one fault a run, each run from its beginning; the demo's model is made once."""
    rng, failed, missed = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory() as directory:
        def start(name):
            return subprocess.Popen(
                [sys.executable, str(HERE / "trainer.py"), *DEMO, *overrides, f"run={name}"],
                cwd=directory, stderr=subprocess.DEVNULL)

        def wait_for_step(name, done, process):
            path = runs / name / "metrics.jsonl"
            while process.poll() is None and not (
                    path.exists() and path.read_text().count("\n") >= done):
                time.sleep(0.02)
            return time.monotonic()
        runs = Path(directory) / "runs"
        process = start("whole")
        began = wait_for_step("whole", 0, process)
        assert process.wait() == 0
        step_time = (time.monotonic() - began) / 12
        for i in range(faults):
            process, done, moment = (start(name := f"killed-{i}"), rng.randrange(13),
                                     rng.uniform(0, step_time))
            wait_for_step(name, done, process)
            time.sleep(moment)
            process.kill()
            killed = process.wait() == -9
            missed += not killed
            code = start(name).wait()
            found = differences(runs / name, runs / "whole") if code == 0 else [f"exit code {code}"]
            print(f"fault {i + 1}: {'killed' if killed else 'had ended'} {moment:.2f} s after step "
                  f"{done}: {', '.join(found) or 'identical'}", flush=True)
            failed += [name] if found else []
            shutil.rmtree(runs / name)
    print(f"{faults - missed} faults injected, {faults - missed - len(failed)} survived "
          f"({missed} came too late)")
    return 1 if failed else 0


CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
WORDS = {"SIGINT": "interrupted", "SIGTERM": "ended by SIGTERM", "SIGHUP": "ended by SIGHUP"}


@pytest.mark.parametrize("name", CODES)
def test_a_signal_while_python_imports_is_one_sentence(name, tmp_path):
    """The first import after the handlers are there sends the signal.

    torch stands for all imports that take long.
    """
    (tmp_path / "torch.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(60)")
    result = subprocess.run([sys.executable, "-m", "three_policies.trainer"], cwd=tmp_path,
                            capture_output=True, text=True, timeout=HANG,
                            preexec_fn=as_from_a_terminal)
    assert result.returncode == CODES[name] and result.stderr == f"trainer.py: {result.stderr[12:]}"
    assert result.stderr.count("\n") == 1 and result.stderr.startswith(f"trainer.py: {WORDS[name]}")


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("moment", ["before a checkpoint", "after a checkpoint"])
def test_a_signal_is_one_sentence_that_names_the_last_checkpoint(
        name, moment, tiny_model, forks, tmp_path):
    late = moment == "after a checkpoint"
    process = start([*LONG, "train.save_every=4" if late else "train.save_every=100000",
                     f"policy.path={tiny_model}"], tmp_path, forks)
    said_until(process, "5 tokens a step")
    until(lambda: not late or (tmp_path / "runs/x/checkpoints/step-000004").exists(), process)
    process.send_signal(getattr(signal, name))
    last = process.communicate(timeout=HANG)[1].strip().splitlines()[-1]
    assert process.returncode == CODES[name] and last.startswith(f"trainer.py: {WORDS[name]}"), last
    saved = sorted(path.name for path in (tmp_path / "runs/x/checkpoints").glob("step-*"))
    if saved:
        step = int(saved[-1].removeprefix("step-"))
        assert last.endswith(f": the same command goes on after step {step}, "
                             f"from runs/x/checkpoints/{saved[-1]}")
    else:
        assert "the same command begins anew" in last or "nothing had begun" in last
    assert saved or not late
    if name == "SIGTERM" and late:                 # the step in progress was saved: no step is lost
        assert len(read_metrics(tmp_path / "runs/x/metrics.jsonl")) == step


SIGNALLED = """
import os, signal, sys
from three_policies import trainer
from three_policies.training import checkpoints, run, signals
from three_policies.training.tasks import Task
run.plot = lambda *_: None
Task.reward = lambda self, problem, response: float(len(response) % 2)
place, name, argv = sys.argv[1], sys.argv[2], sys.argv[3:]
owner, function = {
    "update": (trainer, "update"), "save": (checkpoints.dcp, "save"), "finish": (run.Run, "finish"),
    "evaluate": (trainer, "evaluate"), "close": (run, "close")}[place]
real, calls = getattr(owner, function), []
def struck(*args, **kwargs):
    calls.append(1)
    if len(calls) == 1:
        os.kill(os.getpid(), getattr(signal, name))
    return real(*args, **kwargs)
setattr(owner, function, struck)
signals.catch()
sys.exit(trainer.main(argv))
"""


@pytest.mark.parametrize("place, name, grace, saved", [
    ("update", "SIGTERM", 600, 1), ("update", "SIGTERM", 0, 0), ("update", "SIGINT", 600, 0),
    ("save", "SIGINT", 600, 0), ("save", "SIGTERM", 600, 2), ("finish", "SIGTERM", 600, 2),
    ("evaluate", "SIGTERM", 600, 0), ("close", "SIGINT", 600, 2)])
def test_sigterm_saves_the_step_in_progress_within_its_grace(
        place, name, grace, saved, tiny_model, forks, tmp_path):
    """SIGTERM waits only for a step in progress.

    An interrupted call may wrap the signal in an error of its own.
    """
    arguments = [*SMALL, "rollout.engine=transformers", f"policy.path={tiny_model}", "run=x",
                 f"train.grace={grace}", "train.keep=1",
                 f"train.save_every={1 if place == 'save' else 2}"]
    (tmp_path / "driver.py").write_text(SIGNALLED)
    result = shell([sys.executable, *forks, "driver.py", place, name, *arguments], tmp_path)
    last = result.stderr.strip().splitlines()[-1]
    assert (result.returncode == CODES[name]
            and last.startswith(f"trainer.py: {WORDS[name]}")), result.stderr
    assert "Traceback" not in result.stderr
    found = [path.name for path in (tmp_path / "runs/x/checkpoints").glob("*")]
    assert (found == ([f"step-{saved:06d}"] if saved else [])
            and (f"after step {saved}" in last) == (saved > 0))
    if place == "update" and saved:                # and the run that goes on ends
        again = shell([sys.executable, *forks, str(HERE / "trainer.py"), *arguments], tmp_path)
        assert again.returncode == 0 and "continuing after step 1" in again.stderr


def test_a_step_that_outlasts_its_grace_is_ended(monkeypatch):
    """The alarm is planted: it comes when it is told to."""
    armed = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: armed.append(seconds))
    monkeypatch.setattr(signal, "signal", lambda number, handler: armed.append((number, handler)))
    signals.listen()
    with pytest.raises(signals.Ended, match="ended by SIGTERM"), signals.save_first(7.0):
        signals.answer(signal.SIGTERM, None)
        signals.answer(signal.SIGTERM, None)       # a launcher may send it twice
        (number, handler), seconds = armed
        assert (number, seconds) == (signal.SIGALRM, 7.0) and signals.Received.ending
        handler(number, None)
    assert armed[-1] == 0
    # It is raised again at the next step where a library has caught it.
    with pytest.raises(signals.Ended), signals.save_first(7.0):
        pytest.fail("a further step")
    signals.listen()
    assert not signals.Received.ending        # the next run of this process takes its steps


@pytest.fixture
def listening(monkeypatch):
    """Let signals be answered, by SystemExit where the process would end."""
    def end(code):
        raise SystemExit(code)
    monkeypatch.setattr(signals.os, "_exit", end)
    for name in "where", "listening", "failed", "ended":
        monkeypatch.setattr(signals.Received, name, getattr(signals.Received, name))
    signals.listen()


@pytest.mark.parametrize("rank, said", [("0", "trainer.py: ended by SIGTERM: "), ("1", "")])
def test_a_second_signal_ends_the_process_and_one_rank_says_why(
        rank, said, listening, monkeypatch, capfd):
    """The engine may hang while it is closed; the reason is that of the first signal."""
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(signals.Ended):
        signals.answer(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match="130"):
        signals.answer(signal.SIGINT, None)
    words = capfd.readouterr().err.strip()
    assert words.startswith(said) and bool(words) == bool(said)


def test_after_the_end_no_alarm_comes(monkeypatch):
    """SIGTERM in the last step sets an alarm, which would end the process after its success."""
    armed = []
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: armed.append(seconds))
    for name in "where", "listening", "failed":
        monkeypatch.setattr(signals.Received, name, getattr(signals.Received, name))
    signals.done(failed=False)
    assert armed == [0]


def test_the_last_words_have_a_line_of_their_own(listening, monkeypatch, capfd):
    """A progress bar may not have ended; where the terminal is gone, the exit code is left."""
    def gone(*_):
        raise OSError("no terminal")
    with pytest.raises(signals.Ended):
        signals.answer(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match="129"):
        signals.answer(signal.SIGHUP, None)
    assert capfd.readouterr().err == "\ntrainer.py: ended by SIGTERM: nothing had begun\n"
    monkeypatch.setattr(signals.os, "write", gone)
    with pytest.raises(SystemExit, match="130"):
        signals.answer(signal.SIGINT, None)


def test_nothing_of_a_run_is_left_for_the_next_one_of_this_process(monkeypatch):
    """After a step, and after an error in it, SIGTERM waits for nothing."""
    for name, value in (("where", lambda: "step 3"), ("listening", False), ("failed", True),
                        ("ended", signals.Ended(signal.SIGINT)), ("ending", True)):
        monkeypatch.setattr(signals.Received, name, value)
    signals.listen()
    found = signals.Received
    assert (found.where(), found.listening, found.failed, found.ended, found.ending) == (
        "nothing had begun", True, False, None, False)
    with pytest.raises(ZeroDivisionError), signals.save_first(7.0):
        assert found.grace == 7
        raise ZeroDivisionError
    assert found.grace == 0
    signals.done(failed=False)
    assert (found.where(), found.listening) == ("the run had ended", False)


def test_nohup_is_respected(monkeypatch):
    answered = {}
    monkeypatch.setattr(signal, "signal", answered.__setitem__)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    signals.catch()
    assert set(answered) == {signal.SIGINT, signal.SIGTERM}


@pytest.mark.parametrize("failed", [True, False])
def test_a_signal_after_a_failure_adds_no_other_reason(failed, listening, capfd):
    """torchrun sends SIGTERM to a rank that has already said why it ended."""
    signals.done(failed=failed)
    with pytest.raises(SystemExit, match="143"):
        signals.answer(signal.SIGTERM, None)
    assert ("the run had ended" in capfd.readouterr().err) == (not failed)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    sys.exit(main(*[*numbers, *(20, 0)[len(numbers):]],
                  [word for word in sys.argv[1:] if "=" in word]))
