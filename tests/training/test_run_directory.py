"""A run's directory belongs to one run: locks, finished runs and foreign files.

pytest starts one command twice at three
random delays. The long form does it as often as it is told. Its exit code is 1 if two starts
trained, or neither, or if files are of both:

    python tests/training/test_run_directory.py 50 [SEED]
"""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from three_policies.checks import UserError
from three_policies.tests.support.launching import shell
from three_policies.tests.support.small import SMALL, make_tiny_model, weights
from three_policies.tests.support.waiting import HANG
from three_policies.training import directory
from three_policies.training.files import read_metrics, write_aside
from three_policies.training.directory import (hold_directory, lock_file, require_writable,
                                               take_turns)
from three_policies.training.faults import process_group
from three_policies.training.models import digest_of

HERE = Path(__file__).resolve().parents[2]

LONG = [*SMALL, "rollout.engine=transformers", "train.steps=100000", "train.save_every=2", "run=x"]


def as_from_a_terminal():
    """Give SIGHUP its default: nohup, which these tests may run under, has it ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(arguments, cwd, begin=(), program=HERE / "trainer.py"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *begin, str(program), *arguments],
                            cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True,
                            preexec_fn=as_from_a_terminal)  # noqa: PLW1509


def said_until(process, words):
    """Return what the process says on stderr up to a line with these words.

    A process that ends says no more.
    """
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            break
    return "".join(said)


def files(directory):
    return {path: path.read_bytes() for path in sorted(Path(directory).rglob("*"))
            if path.is_file()}


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


@pytest.mark.parametrize("part", ["", "checkpoints", "model"])
def test_each_part_of_a_run_must_be_writable(part, tmp_path, monkeypatch):
    """What does not exist can be made."""
    (tmp_path / part).mkdir(exist_ok=True)
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path) or path.exists())
    require_writable(tmp_path)
    assert set(asked) == {tmp_path, tmp_path / part}
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / part)
    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        require_writable(tmp_path)


def test_a_mistake_leaves_no_directory(run):
    assert run("task.kind=jsonl", "task.path=nowhere.jsonl")[0] == 2 and not Path("runs").exists()
    Path("runs/other").mkdir(parents=True)
    assert (run("task.kind=jsonl", "task.path=nowhere.jsonl")[0] == 2
            and os.listdir("runs") == ["other"])


@pytest.mark.parametrize("place", ["runs", "runs/x", "runs/x/checkpoints"])
def test_a_place_that_cannot_be_written_is_found_before_anything_is_loaded(
        place, run, monkeypatch, capsys):
    """The system's answer is planted, since a user with all rights can write anywhere."""
    Path(place).mkdir(parents=True)
    if place == "runs":
        (Path("runs") / "x").write_text("a file where the directory should be")
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path(place))
    monkeypatch.setattr("three_policies.training.loading.make_task",
                        lambda *_: pytest.fail("loaded"))
    code, lines = run()
    said = capsys.readouterr().err
    what = "is not a directory: move it away" if place == "runs" else "cannot be written"
    assert (code == 2 and lines == [] and what in said and "runs/x" in said
            and said.count("\n") == 1), said


@pytest.mark.parametrize("missing", [os.W_OK, os.X_OK])
def test_a_directory_that_lacks_one_of_two_rights_cannot_be_written(missing, tmp_path, monkeypatch):
    """A file is made in a directory that can be written and entered."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & missing)
    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        require_writable(tmp_path)


def test_a_file_system_without_locks_is_said(run, monkeypatch, capsys):
    def none(*_):
        raise OSError(37, "No locks available")
    monkeypatch.setattr("fcntl.lockf", none)
    assert (run()[0] == 2 and
            "file system without locks (No locks available)" in capsys.readouterr().err)


# --------------------------------------------------------------------------- what is finished stays

@pytest.mark.parametrize("overrides, code, said", [
    ([], 0, "is finished after 2 steps"), (["train.steps=1"], 0, "is finished after 2 steps"),
    (["train.steps=4"], 2, "has a finished run or a model, and no checkpoint to go on from"),
    (["train.lr=0.5"], 2, "(now 0.5)")])
def test_a_finished_run_without_its_checkpoints_is_not_trained_again(
        overrides, code, said, run, capsys):
    run()
    shutil.rmtree("runs/x/checkpoints")
    before = files("runs/x")
    assert run(*overrides)[0] == code and said in capsys.readouterr().err
    assert {**files("runs/x"), Path("runs/x/.lock"): b""} == {**before, Path("runs/x/.lock"): b""}


def test_a_finished_run_that_lost_its_last_checkpoint_is_not_trained_again(run, capsys):
    run("train.save_every=1")
    shutil.rmtree("runs/x/checkpoints/step-000002")
    before = files("runs/x/model")
    assert (run("train.save_every=1")[0] == 0
            and "is finished after 2 steps" in capsys.readouterr().err)
    assert files("runs/x/model") == before
    # Asked to go on, it does so from what is there.
    code, lines = run("train.save_every=1", "train.steps=3")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3]
    assert "* steps repeated, since the last checkpoint is older: 1\n" in capsys.readouterr().err


def test_a_model_that_the_run_has_not_written_is_not_replaced(run, tiny_model, capsys):
    shutil.copytree(tiny_model, "runs/x/model")
    before = files("runs/x/model")
    assert (run()[0] == 2 and
            "has a finished run or a model, and no checkpoint" in capsys.readouterr().err)
    assert files("runs/x/model") == before


def test_foreign_files_and_links_are_left_alone_and_stop_nothing(run, tmp_path):
    place = Path("runs/x/checkpoints")
    place.mkdir(parents=True)
    for name in (".DS_Store", ".nfs000001", "step-000004.good", "step-notes.txt", "step-000009"):
        (place / name).write_text("mine")
    (place / "step-000003.backup").mkdir()
    (place / ".step-000008.part").mkdir()      # half written by a run that was killed: not foreign
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/notes").write_text("mine")
    Path("runs/x/model").symlink_to(tmp_path / "elsewhere")
    code, lines = run("train.save_every=1", "train.keep=1")
    assert code == 0 and [line["step"] for line in lines] == [1, 2]
    code, lines = run("train.save_every=1", "train.keep=1", "train.steps=3")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3]
    assert {path.name for path in place.iterdir()} == {
        ".DS_Store", ".nfs000001", "step-000004.good", "step-notes.txt", "step-000009",
        "step-000003.backup", "step-000003"}
    assert (Path("runs/x/model").is_symlink()
            and (tmp_path / "elsewhere/notes").read_text() == "mine")
    assert {"config.json", "model.safetensors"} <= set(os.listdir(tmp_path / "elsewhere"))


def test_what_was_put_beside_a_model_stays(run):
    run()
    Path("runs/x/model/scores").mkdir()
    mine = "README.md", "notes.txt", "scores.json", "scores/a.md"
    for name in mine:
        (Path("runs/x/model") / name).write_text("mine")
    stale = [Path("runs/x/model", name) for name in (
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json")]
    for path in stale:
        path.write_bytes(b"of another model")
    before = weights("x")
    assert run("train.steps=3")[0] == 0 and not any(path.exists() for path in stale)
    assert any((x != before[name]).any() for name, x in weights("x").items())
    for name in mine:
        assert (Path("runs/x/model") / name).read_text() == "mine"
    assert not Path("runs/x/.model.old").exists()


def test_a_checkpoint_that_is_a_link_to_itself_is_one_sentence(tmp_path):
    (tmp_path / "step-000002").symlink_to("step-000002")
    with process_group(), pytest.raises(UserError, match="is a link to itself: remove it"):
        with write_aside(tmp_path / "step-000002"):
            pass


def test_older_weights_do_not_stay_in_the_target_of_a_link(tmp_path):
    """transformers would read model.safetensors, whatever the new index says."""
    (tmp_path / "model").symlink_to(tmp_path / "there")
    (tmp_path / "there").mkdir()
    for name in "model.safetensors", "README.md":
        (tmp_path / "there" / name).write_text("mine")
    with process_group(), write_aside(tmp_path / "model") as part:
        (part / "model-00001-of-00001.safetensors").write_text("new")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        "README.md", "model-00001-of-00001.safetensors"}


@pytest.mark.parametrize("at", range(1, 5))
def test_an_interrupted_write_loses_nothing_that_a_user_put_there(at, tmp_path, monkeypatch):
    """It is interrupted before each of the four renames; the next write ends what it began."""
    place, renamed, replace = tmp_path / "model", [], os.replace
    (place / "scores").mkdir(parents=True)
    for name in "config.json", "scores/a.md", "b.txt":
        (place / name).write_text("mine")

    def interrupt(*paths):
        renamed.append(paths)
        if len(renamed) == at:
            raise KeyboardInterrupt
        replace(*paths)

    def write():
        with write_aside(place) as part:
            (part / "config.json").write_text("new")
    with process_group():
        monkeypatch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write()
        monkeypatch.setattr(os, "replace", replace)
        write()
    assert (place / "config.json").read_text() == "new"
    assert (place / "scores/a.md").read_text() == (place / "b.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "finished.json",
                                  "checkpoints/step-000002/state.json"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(name, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is not a file: move it away"):
        require_writable(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "model", "dumps"])
def test_a_file_in_the_place_of_a_directory_is_named(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"{name} is not a directory: move it away"):
        require_writable(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)
    with pytest.raises(UserError, match=f"{name} is a link to itself: remove it"):
        require_writable(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "finished.json", "curves.png",
                                  "eval.jsonl"])
def test_a_directory_in_the_place_of_a_file_is_named(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name} is not a file: move it away"):
        require_writable(tmp_path)


def test_what_a_lock_that_is_a_link_leads_to_is_not_written(run, tmp_path, capsys):
    (tmp_path / "theirs").write_text("precious")
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/.lock").symlink_to(tmp_path / "theirs")
    assert run()[0] == 2 and "written: .lock is a link there" in capsys.readouterr().err
    assert (tmp_path / "theirs").read_text() == "precious"


def test_a_link_to_itself_is_one_sentence(run, capsys):
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/model").symlink_to("model")
    assert run()[0] == 2
    assert "runs/x/model is a link to itself: remove it" in capsys.readouterr().err


def test_a_link_to_a_checkpoint_is_continued_and_stays(run, tmp_path):
    run("train.save_every=1")
    Path("runs/x/checkpoints/step-000002").rename(tmp_path / "moved")
    Path("runs/x/checkpoints/step-000002").symlink_to(tmp_path / "moved")
    code, lines = run("train.save_every=1", "train.keep=1", "train.steps=4")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3, 4]
    assert sorted(os.listdir("runs/x/checkpoints")) == ["step-000002", "step-000004"]
    assert (tmp_path / "moved/state.json").exists()


@pytest.mark.parametrize("at", [0, 5 * 2 ** 20, 9 * 2 ** 20 - 1])
def test_of_a_large_file_of_weights_the_ends_and_the_middle_are_read(at, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file, whole = tmp_path / "model.safetensors", bytearray(9 * 2 ** 20)
    file.write_bytes(whole)
    before, whole[at] = digest_of(str(tmp_path)), 1
    file.write_bytes(whole)
    assert digest_of(str(tmp_path)) != before


def test_every_file_of_weights_is_read(tmp_path):
    """A large model has several."""
    (tmp_path / "config.json").write_text("{}")
    found = set[str]()
    for n in range(4):                          # of two files neither, the first, the second, both
        for i in range(2):
            (tmp_path / f"model-0000{i}-of-00002.safetensors").write_bytes(bytes([n >> i & 1]))
        found.add(digest_of(str(tmp_path)))
    assert len(found) == 4


@pytest.mark.parametrize("share", [0.5, 1])
def test_another_model_is_no_continuation(share, run, tiny_model, tmp_path, capsys):
    """The weights under a LoRA, π_ref and the tokenizer come from policy.path every time."""
    shutil.copytree(tiny_model, tmp_path / "model")
    weights, settings = tmp_path / "model/model.safetensors", ["policy.path=model", "task.size=1"]
    assert run(*settings)[0] == 0
    first = weights.read_bytes()
    i = int(share * (len(first) - 1))
    weights.write_bytes(first[:i] + bytes([first[i] ^ 1]) + first[i + 1:])              # one bit
    code, lines = run(*settings, "train.steps=4")
    assert code == 2 and len(lines) == 2 and (
        "began from another model than policy.path=model is now" in capsys.readouterr().err)
    weights.write_bytes(first)
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_version": "9"}))
    assert run(*settings, "train.steps=4")[0] == 0
    tokenizer = tmp_path / "model/tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"version": "2.0"}))
    assert run(*settings, "train.steps=5")[0] == 2


def test_other_questions_are_no_continuation(run, tmp_path, capsys):
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("task.kind=jsonl", "task.path=rows.jsonl")[0] == 0
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    code, lines = run("task.kind=jsonl", "task.path=rows.jsonl", "train.steps=4")
    assert (code == 2 and len(lines) == 2 and
            "other questions or answers than task.path has now" in capsys.readouterr().err)


if __name__ == "__main__":
    count, seed = [*map(int, sys.argv[1:]), *(50, 0)[len(sys.argv) - 1:]]
    rng, scratch = random.Random(seed), Path(tempfile.mkdtemp())
    found, ends = started_twice([rng.uniform(-2, 2) for _ in range(count)],
                                make_tiny_model(scratch / "tiny"), scratch)
    print(*found, f"{count + 1} pairs: {len(found)} wrong; the other start ended with {ends}",
          sep="\n")
    sys.exit(bool(found))
