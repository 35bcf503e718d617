"""What is in a run's directory: finished runs, foreign files and links, what cannot be written."""

import os
import shutil
from pathlib import Path

import pytest

from three_policies.checks import UserError
from three_policies.tests.support.small import weights
from three_policies.training.directory import require_writable
from three_policies.training.faults import process_group
from three_policies.training.files import write_aside


def files(place):
    return {path: path.read_bytes() for path in sorted(Path(place).rglob("*"))
            if path.is_file()}


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
