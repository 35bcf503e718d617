"""A run's directory belongs to one process at a time: a second start is told who has it.

pytest starts one command twice at three random delays. The long form does it as often as it is
told. Its exit code is 1 if two starts trained, or neither, or if files are of both:

    python tests/training/test_locks.py 50 [SEED]
"""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from three_policies.checks import UserError
from three_policies.tests.support.launching import shell
from three_policies.tests.support.small import SMALL, make_tiny_model
from three_policies.tests.support.starts import LONG, said_until, start
from three_policies.tests.support.waiting import HANG
from three_policies.training import directory
from three_policies.training.directory import hold_directory, lock_file, take_turns
from three_policies.training.files import read_metrics


# ------------------------------------------------------------------------------------ one at a time

def test_a_second_start_is_told_who_trains(tiny_model, forks, tmp_path):
    arguments = [*LONG, f"policy.path={tiny_model}"]
    (tmp_path / "first.py").write_text(
        "import os, sys; from three_policies import trainer\n"
        "print('I am', os.getpid(), file=sys.stderr); trainer.main(sys.argv[1:])")
    first = start(arguments, tmp_path, forks, "first.py")
    said = said_until(first, "5 tokens a step")
    pid, = re.findall(r"^I am (\d+)$", said, re.MULTILINE)
    assert "runs/x" in said
    second = start(arguments, tmp_path, forks)
    _, said = second.communicate(timeout=HANG)
    first.kill()                                   # its lock dies with it
    first.communicate()
    assert second.returncode == 2 and said.count("\n") == 1, said
    assert (f"runs/x is in use by process {pid} on " in said
            and "choose another run=NAME" in said)
    third = start([*arguments, "train.steps=2"], tmp_path, forks)
    assert (third.wait(HANG) == 0 and
            [line["step"] for line in read_metrics(tmp_path / "runs/x/metrics.jsonl")][-1] >= 2)


# Forks two starts of the same command for each delay, and says of each pair how both ended.
TWICE = """
import json, os, sys, time
from three_policies import trainer
from three_policies.training import run
from three_policies.training.tasks import Task
run.plot = lambda *_: None             # the curves are no matter of who trains
Task.reward = lambda self, problem, response: float(len(response) % 2)
delays, argv = json.loads(sys.argv[1]), sys.argv[2:]
def start(name, delay, said):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        time.sleep(max(0.0, delay))
        os._exit(trainer.main([*argv, f"run={name}"]))
    return child
for i, delay in enumerate(delays):
    children = [start(f"x{i}", d, f"said-{i}-{j}") for j, d in enumerate((delay, -delay))]
    codes = {child: os.waitstatus_to_exitcode(status) for child, status in (os.wait(), os.wait())}
    print(json.dumps([codes[child] for child in children]), flush=True)
"""


def started_twice(delays, tiny_model, cwd, begin=()):
    """Return a sentence for each pair of starts that did not end as it should."""
    (cwd / "twice.py").write_text(TWICE)
    arguments = [*SMALL, "rollout.engine=transformers", f"policy.path={tiny_model}",
                 "train.save_every=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *begin, "twice.py", json.dumps([0.0, *delays]), *arguments], cwd=cwd,
        text=True, capture_output=True, timeout=HANG, env=environment)
    assert result.returncode == 0, result.stderr
    wrong, endings = [], {"in use": 0, "is finished": 0}
    whole = (cwd / "runs/x0/model/model.safetensors").read_bytes()
    for i, line in enumerate(result.stdout.splitlines()):
        codes, said = json.loads(line), [(cwd / f"said-{i}-{j}").read_text() for j in (0, 1)]
        trained = [j for j in (0, 1) if "model, metrics and curves" in said[j]]
        other = said[1 - trained[0]].strip() if trained else ""
        ending = (next((words for words in endings if words in other.splitlines()[-1]), None)
                  if other else None)
        steps = [step["step"] for step in read_metrics(cwd / f"runs/x{i}/metrics.jsonl")]
        same = (cwd / f"runs/x{i}/model/model.safetensors").read_bytes() == whole
        if (len(trained) != 1 or not ending or sorted(codes) != [0, 2 * (ending == "in use")]
                or steps != [1, 2] or not same):
            wrong.append(f"pair {i}: {codes}, {trained} trained, steps {steps}, "
                         f"the same weights: {same}; {said}")
        else:
            endings[ending] += 1
    return wrong, endings


def test_of_two_starts_one_trains_and_the_other_says_who_does(tiny_model, forks, tmp_path):
    wrong, _ = started_twice([random.Random(0).uniform(-1, 1) for _ in range(3)],
                             tiny_model, tmp_path, forks)
    assert wrong == []


def test_a_lock_that_was_removed_meanwhile_is_no_lock(forks, tmp_path, monkeypatch):
    """A lock whose file was unlinked between our opening and our locking it does not count.

    Then the new file is the one to hold.
    """
    path, real, calls = tmp_path / "x" / ".lock", fcntl.lockf, []

    def lockf(*given):
        calls.append(given)
        if len(calls) == 1:
            path.unlink()
        return real(*given)
    monkeypatch.setattr("fcntl.lockf", lockf)
    file = lock_file(path)
    assert len(calls) == 2 and path.stat().st_ino == os.fstat(file.fileno()).st_ino
    (tmp_path / "ask.py").write_text(
        "import sys; from pathlib import Path\n"
        "from three_policies.training.directory import lock_file\n"
        "lock_file(Path(sys.argv[1]))")
    asking = shell([sys.executable, *forks, "ask.py", str(path)], tmp_path)
    assert f"BlockingIOError: process {os.getpid()} on " in asking.stderr
    file.close()


def test_a_lock_on_a_file_that_was_replaced_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Another process has made the file anew, and may hold a lock on it."""
    path, real, calls = tmp_path / ".lock", fcntl.lockf, []

    def lockf(*given):
        calls.append(given)
        if len(calls) == 1:
            path.unlink()
            path.touch()
        return real(*given)
    monkeypatch.setattr("fcntl.lockf", lockf)
    with lock_file(path) as file:
        assert len(calls) == 2 and path.stat().st_ino == os.fstat(file.fileno()).st_ino


@pytest.fixture
def locks(monkeypatch):
    """Plant the system's answers: a list of (file, flags) that were locked, and of barriers.

    locks(n, errors) makes this process rank n, whose first locks fail with these errors.
    """
    calls = []

    def plant(rank=0, errors=(), said=""):
        left = list(errors)

        def lockf(file, flags):
            calls.append((file, flags))
            if left:
                raise OSError(left.pop(0), "no")

        def broadcast(words):
            words[0] = words[0] or said
        monkeypatch.setattr("fcntl.lockf", lockf)
        monkeypatch.setattr(directory, "dist", SimpleNamespace(
            get_rank=lambda: rank, broadcast_object_list=broadcast,
            barrier=lambda: calls.append("barrier")))
        return calls
    return plant


@pytest.mark.parametrize("error", [errno.EACCES, errno.EAGAIN])
@pytest.mark.parametrize("holder, named", [("process 7 on here", "process 7 on here"),
                                           ("", "another process")])
def test_a_lock_that_is_held_names_its_holder(error, holder, named, locks, tmp_path):
    """POSIX leaves the choice of two errors; a holder may not have written its name yet."""
    locks(errors=[error])
    (tmp_path / ".lock").write_text(holder)
    with pytest.raises(BlockingIOError, match=f"^{named}$"):
        lock_file(tmp_path / ".lock")
    assert (tmp_path / ".lock").read_text() == holder


def test_who_waits_for_its_turn_says_for_whom(locks, tmp_path, capsys):
    """The second try waits; its lock is exclusive, ends with the turn, and has its own name."""
    calls, path = locks(errors=[errno.EAGAIN]), tmp_path / ".demo.lock"
    path.write_text("process 7 on here, with a name longer than any that comes after it" * 9)
    with take_turns(path):
        said = capsys.readouterr().err
        assert said.startswith("waiting for process 7 on here") and "which makes demo" in said
        (_, first), (file, second), last = calls
        assert (first, second, last) == (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX, "barrier")
        assert not file.closed
        found = path.read_text()
        assert found.startswith(f"process {os.getpid()} on ") and "process 7 on" not in found
    assert file.closed
    calls = locks(rank=1)
    calls.clear()
    with take_turns(path):
        assert calls == ["barrier"]                                # another rank holds no lock


@pytest.mark.parametrize("made", ["", "runs", "runs/x"])
def test_a_directory_that_stays_empty_is_removed_if_it_was_made(made, locks, tmp_path):
    """What was there before stays, and so does what the run has written."""
    calls, place = locks(), tmp_path / "runs/x"
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    with hold_directory(place):
        assert [path.name for path in place.iterdir()] == [".lock"]
        [(file, _)] = calls
        assert not file.closed
    assert file.closed
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        name for name in ("runs", "runs/x") if made.startswith(name)]
    with hold_directory(place):
        shutil.rmtree(place)                       # it is gone before its end, and nobody minds
    with hold_directory(place):
        (place / "notes").write_text("mine")
    assert {path.name for path in place.iterdir()} == {".lock", "notes"}


def test_a_rank_that_is_not_the_first_hears_what_the_first_has_met(locks, tmp_path):
    calls = locks(rank=1, said="runs/x is in use")
    with pytest.raises(UserError, match="runs/x is in use"), hold_directory(tmp_path / "x"):
        pytest.fail("held")
    assert calls == [] and not (tmp_path / "x").exists()


def test_a_file_system_without_locks_is_said(run, monkeypatch, capsys):
    def none(*_):
        raise OSError(37, "No locks available")
    monkeypatch.setattr("fcntl.lockf", none)
    assert (run()[0] == 2 and
            "file system without locks (No locks available)" in capsys.readouterr().err)


def test_what_a_lock_that_is_a_link_leads_to_is_not_written(run, tmp_path, capsys):
    (tmp_path / "theirs").write_text("precious")
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/.lock").symlink_to(tmp_path / "theirs")
    assert run()[0] == 2 and "written: .lock is a link there" in capsys.readouterr().err
    assert (tmp_path / "theirs").read_text() == "precious"


if __name__ == "__main__":
    count, seed = [*map(int, sys.argv[1:]), *(50, 0)[len(sys.argv) - 1:]]
    rng, scratch = random.Random(seed), Path(tempfile.mkdtemp())
    found, ends = started_twice([rng.uniform(-2, 2) for _ in range(count)],
                                make_tiny_model(scratch / "tiny"), scratch)
    print(*found, f"{count + 1} pairs: {len(found)} wrong; the other start ended with {ends}",
          sep="\n")
    sys.exit(bool(found))
