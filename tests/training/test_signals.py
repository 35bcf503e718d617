"""A signal ends a run with one sentence, and SIGTERM lets the step in progress be saved."""

import signal
import subprocess
import sys

import pytest

from three_policies.tests.support.launching import shell
from three_policies.tests.support.small import SMALL
from three_policies.tests.support.waiting import HANG, until
from three_policies.tests.training.test_run_directory import (HERE, LONG, as_from_a_terminal,
                                                          said_until, start)
from three_policies.training import signals
from three_policies.training.files import read_metrics

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


DRIVER = """
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
    (tmp_path / "driver.py").write_text(DRIVER)
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
