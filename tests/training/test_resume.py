"""A run that stopped goes on as if it had not: after a full disk, Control-C, a dead engine."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from three_policies import trainer
from three_policies.checks import UserError
from three_policies.rollout import TransformersEngine
from three_policies.tests.support.launching import ROOT
from three_policies.tests.support.small import SMALL, steady, weights
from three_policies.tests.support.tolerances import gamma
from three_policies.tests.support.waiting import HANG, until
from three_policies.training import checkpoints, files
from three_policies.training.run import Run
from three_policies.training.settings import TrainConfig, load_config


@pytest.mark.parametrize("cut", [[], ["rollout.top_p=0.9", "rollout.top_k=8"]])
def test_resumed_is_uninterrupted(cut, run):
    settings = [*cut, "train.save_every=2", "rollout.staleness=2", "train.lr=0.01", "train.keep=2",
                "train.eval_every=9"]
    _, whole = run(*settings, "train.steps=6", name="whole")
    run(*settings, "train.steps=4", name="parts")
    with open("runs/parts/metrics.jsonl", "a") as file:      # killed in the fifth step, mid-line
        file.write(json.dumps({"step": 5, "reward/mean": 9}) + '\n{"step": 6')
    lines = Path("runs/parts/metrics.jsonl").read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    del first["reward/mean"]                       # as an early version's lines may lack a metric
    Path("runs/parts/metrics.jsonl").write_text("".join([json.dumps(first) + "\n", *lines[1:]]))
    code, lines = run(*settings, "train.steps=6", name="parts")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert steady(lines)[4:] == steady(whole)[4:]
    assert all(torch.equal(x, weights("parts")[name]) for name, x in weights("whole").items())
    left = sorted(path.name for path in Path("runs/parts/checkpoints").iterdir())
    assert left == ["step-000004", "step-000006"]


def test_finished_run_says_so_and_another_configuration_is_refused(run, capsys):
    run()
    before = weights("x")
    code, lines = run()
    assert code == 0 and len(lines) == 2 and "is finished" in capsys.readouterr().err
    code, _ = run("train.lr=0.5", "seed=3")
    said = capsys.readouterr().err
    assert code == 2 and "seed=0 (now 3)" in said
    assert f"train.lr={TrainConfig.lr} (now 0.5)" in said
    assert all(torch.equal(x, weights("x")[name]) for name, x in before.items())


def test_what_only_splits_the_work_may_change(run):
    """After "out of memory: lower train.micro_batch_size" the same run goes on."""
    run()
    code, lines = run("train.steps=3", "train.micro_batch_size=2", "rollout.batch_size=3")
    assert code == 0 and len(lines) == 3
    code, lines = run("train.steps=4", "train.micro_batch_tokens=50",
                      "policy.gradient_checkpointing=true")
    assert code == 0 and len(lines) == 4


def test_a_checkpoint_that_was_renamed_is_none(run, capsys):
    run()
    os.rename("runs/x/checkpoints/step-000002", "runs/x/checkpoints/step-000099")
    assert run("train.steps=3")[0] == 2
    assert "step-000099 is damaged, or no checkpoint of this program" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_say_its_data_model_or_moments_is_continued(run):
    """Earlier versions did not record them. Reading it leaves warnings switched on."""
    run("train.lr=0.01", "train.steps=3", name="whole")
    run("train.lr=0.01")
    path = Path("runs/x/checkpoints/step-000002/state.json")
    state = json.loads(path.read_text())
    for name in "data", "model", "moments":
        del state[name]
    path.write_text(json.dumps(state))
    code, _ = run("train.lr=0.01", "train.steps=3")
    assert all(torch.equal(x, weights("whole")[name]) for name, x in weights("x").items())
    assert code == 0 and logging.root.isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("key, value", [("before", "x"), ("before", None), ("engine", None)])
def test_a_changed_state_is_damage(key, value, run, capsys):
    run()
    path = Path("runs/x/checkpoints/step-000002/state.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert run("train.steps=3")[0] == 2
    assert "step-000002 is damaged, or no checkpoint of this program" in capsys.readouterr().err


def test_the_millionth_step_comes_after_the_one_before_it(tmp_path):
    """Names of six digits and of seven are not in the order of their letters."""
    kept = checkpoints.Checkpoints(tmp_path, load_config([]))
    for name in "step-1000000", "step-999999", "step-٠٠٠٠٠١", "step-99":
        (tmp_path / name).mkdir()
    assert [path.name for path in kept.whole()] == ["step-999999", "step-1000000"]
    assert "after step 1000000" in kept.resumption()
    assert "goes on from step-999999" in str(kept.unreadable(tmp_path / "step-1000000"))


def test_a_setting_that_is_new_had_its_default_and_one_that_is_gone_is_named(tmp_path):
    now = checkpoints.Checkpoints(tmp_path, load_config([]))
    then = {key: x for key, x in now.settings.items() if key != "train.schedule"}
    now.require_same(then)
    other = checkpoints.Checkpoints(tmp_path, load_config(["train.schedule=cosine"]))
    other.settings["run"] = now.settings["run"]
    with pytest.raises(UserError, match="is a run with train.schedule=constant .now cosine.:"):
        other.require_same(then)
    with pytest.raises(UserError, match="is a run with train.gone=1 .now None.:"):
        now.require_same({**then, "train.gone": 1})
    older = {**now.settings, "rollout.quantize_bits": 6, "rollout.adapter": "merged"}
    del older["rollout.quantize"], older["rollout.lora"]
    now.require_same(older)                                   # by their names of then
    with pytest.raises(UserError, match="is a run with rollout.quantize=5 .now 6.:"):
        now.require_same(older | {"rollout.quantize_bits": 5})
    slash = checkpoints.Checkpoints(tmp_path, load_config(["policy.path=seed0/model/"]))
    slash.require_same({**slash.settings, "policy.path": "seed0/model/"})   # as it was kept once
    assert load_config(["policy.path=//"]).policy.path == "/"               # and not no path at all


def test_a_run_that_ended_before_its_model_was_written_writes_it(run, monkeypatch):
    """A finished run went on, saved its last step and ended there: the old model is no result."""
    run("train.steps=4", "train.lr=0.01", name="whole")
    run("train.steps=2", "train.lr=0.01")
    old = weights("x")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "write_model", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        assert run("train.steps=4", "train.lr=0.01")[0] == 1
    assert all(torch.equal(x, weights("x")[name]) for name, x in old.items())
    Path("runs/x/metrics.jsonl").unlink()                     # there is a table without it, or none
    code, _ = run("train.steps=4", "train.lr=0.01")
    assert code == 0 and json.loads(Path("runs/x/finished.json").read_text())["step"] == 4
    assert all(torch.equal(x, weights("x")[name]) for name, x in weights("whole").items())
    answers, whole = (Path(f"runs/{name}/eval.jsonl").read_text() for name in ("x", "whole"))
    assert answers == whole and whole.count("\n") == 8        # it was evaluated at its end, too
    for path in (Path("runs/x/finished.json"), *Path("runs/x/model").iterdir()):
        path.unlink()
    assert run("train.steps=2", "train.lr=0.01")[0] == 0       # fewer steps than were taken
    assert json.loads(Path("runs/x/finished.json").read_text())["step"] == 4


MEMORY = "out of memory: lower "
ALONE = ("is damaged, or no checkpoint of this program, and there is none before it: choose "
         "another run=NAME, or delete runs/x")


@pytest.mark.parametrize("error, said", [
    (torch.OutOfMemoryError("CUDA out of memory"), MEMORY),
    (OSError(errno.EIO, "Input/output error"), "[Errno 5] Input/output error"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk or its quota is full"),
    (OSError(errno.EFBIG, "File too large"), "or a limit on the size of files is met"),
    (RuntimeError("I/O error: … (os error 122)"), "the disk or its quota is full"),
    (RuntimeError("Connection reset by peer"), "another rank has ended without a word"),
    (RuntimeError("Timed out waiting 6000ms for send operation"), "another rank has not answered"),
    (FileNotFoundError("rank-00001.safetensors"), ALONE), (ValueError("no"), ALONE)])
def test_only_a_damaged_checkpoint_is_called_damaged(error, said, run, monkeypatch, capsys):
    run()

    def load(*_, **__):
        raise dcp.CheckpointException("load", {0: (error, traceback.StackSummary())})
    monkeypatch.setattr(dcp, "load", load)
    code, _ = run("train.steps=3")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert code and last.startswith("trainer.py: ") and said in last, last
    assert (said == ALONE) == ("damaged" in last)


def test_with_a_damaged_checkpoint_moved_away_the_one_before_it_is_continued(run, capsys):
    run("train.save_every=1", "train.steps=3")
    Path("runs/x/checkpoints/step-000003/state.json").write_text("{")
    code, _ = run("train.save_every=1", "train.steps=4")
    assert code == 2 and ("move it away, and the same command goes on from step-000002"
                          in capsys.readouterr().err)
    shutil.rmtree("runs/x/checkpoints/step-000003")
    code, lines = run("train.save_every=1", "train.steps=4")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize("part", ["policy.", "exp_avg."])
def test_a_checkpoint_with_nan_is_damaged(part, run, capsys):
    """Otherwise the next step would blame a prompt, or the one after it."""
    run("train.save_every=1")
    [path] = Path("runs/x/checkpoints/step-000002").glob("*.safetensors")
    with safe_open(path, "pt") as file:
        state, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    name = next(name for name in state if name.startswith(part))
    state[name].flatten()[0] = torch.nan
    save_file(state, path, metadata)
    assert run("train.save_every=1", "train.steps=3")[0] == 2
    assert ("step-000002 is damaged, or no checkpoint of this program: move it away"
            in capsys.readouterr().err)


def test_a_failure_is_said_although_the_engine_then_fails_to_close(run, monkeypatch, capsys):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def close(self):
        raise RuntimeError("CUDA Error: invalid argument")
    monkeypatch.setattr(trainer, "update", out_of_memory)
    monkeypatch.setattr(TransformersEngine, "close", close)
    assert run()[0] == 1
    said = capsys.readouterr().err
    assert MEMORY in said.strip().splitlines()[-1] and "invalid argument" not in said


@pytest.mark.parametrize("keep, said", [
    ((0, 1), False), ((0, 0, 1), True), ((1,), True), ((0,), True)])
def test_metrics_that_lack_or_repeat_a_step_are_told(keep, said, run, capsys):
    run()
    lines = Path("runs/x/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("runs/x/metrics.jsonl").write_text("".join(lines[i] for i in keep))
    assert run("train.steps=3")[0] == 0
    assert ("metrics.jsonl lacks steps before step 3" in capsys.readouterr().err) == said


def test_the_metrics_are_on_the_disk_before_a_checkpoint_counts_on_them(run, monkeypatch):
    done, settle, save = [], Run.save_if_due.__globals__["settle"], checkpoints.Checkpoints.save
    monkeypatch.setitem(Run.save_if_due.__globals__, "settle",
                        lambda path: done.append(path.name) or settle(path))
    monkeypatch.setattr(checkpoints.Checkpoints, "save",
                        lambda *given: done.append("save") or save(*given))
    run()
    assert done == ["metrics.jsonl", "save"]


@pytest.mark.parametrize("line", ['{"step": true}', '{"step": 1, "reward/mean": null}',
                                  '{"step": 1, "reward/mean": "x"}'])
def test_a_line_of_metrics_that_is_none_is_one_sentence(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="has a line that is not the metrics of a step"):
        files.read_metrics(tmp_path / "metrics.jsonl")


def test_the_engine_sleeps_while_a_checkpoint_is_read(run, monkeypatch):
    """The moments are made meanwhile, and need the room that they have in an update."""
    run()
    done, load = [], dcp.load
    monkeypatch.setattr(TransformersEngine, "sleep", lambda self: done.append("sleep"))
    monkeypatch.setattr(dcp, "load", lambda *a, **b: done.append("load") or load(*a, **b))
    assert run("train.steps=3")[0] == 0 and done[:2] == ["sleep", "load"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(run, monkeypatch):
    """A machine that loses power later must not leave the name without the bytes."""
    done, sync, replace = [], os.fsync, os.replace

    def settled(handle):
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def renamed(part, place):
        done.append(f"{Path(place).name}!")
        replace(part, place)
    monkeypatch.setattr(os, "fsync", settled)
    monkeypatch.setattr(os, "replace", renamed)
    run()
    for name in "step-000002", "model":
        at = done.index(f"{name}!")
        kept = {*next(Path("runs/x").glob(f"**/{name}")).iterdir()}
        assert len(kept) > 1 and {path.name for path in kept} | {f".{name}.part"} <= {*done[:at]}
        assert done[at + 1] == ("checkpoints" if name.startswith("step") else "x")
    assert done.index("state.json!") > done.index(".state.json.part")


def test_a_file_that_cannot_be_brought_to_the_disk_is_an_error(tmp_path, monkeypatch):
    """Not every file system can do it for a directory, and that is none."""
    def failing(handle):
        raise OSError(errno.EIO, "no disk")
    monkeypatch.setattr(os, "fsync", failing)
    (tmp_path / "weights").write_text("")
    files.settle(tmp_path)
    with pytest.raises(OSError, match="no disk"):
        files.settle(tmp_path / "weights")


def test_a_run_of_fewer_steps_than_its_weights_are_late_is_continued(run):
    late = ["rollout.staleness=3", "train.save_every=1", "train.lr=0.01"]
    assert run(*late, "train.steps=3", name="whole")[0] == 0
    for steps in 1, 3:
        assert run(*late, f"train.steps={steps}")[0] == 0
    assert all(torch.equal(x, weights("whole")[name]) for name, x in weights("x").items())


def test_a_run_that_took_no_step_yet_is_continued(run):
    """AdamW has no moments before its first step, and a checkpoint without them is complete."""
    nothing = "correction={rollout_rs: {seq_max_k1: [1e9, null]}}"
    assert run(nothing, "train.save_every=1")[0] == 0
    code, lines = run(nothing, "train.save_every=1", "train.steps=3")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3]


def test_metrics_are_tensorboard_scalars_where_that_is_installed(run):
    """TensorBoard has each step's metrics once, even if a resumed run does the step again."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run("train.save_every=1")
    shutil.rmtree("runs/x/checkpoints/step-000002")
    shutil.rmtree("runs/x/model")
    _, lines = run("train.save_every=1", "train.steps=3")
    events = EventAccumulator("runs/x/tensorboard")
    events.Reload()
    for name in ("reward/mean", "loss/policy", "rollout_corr/k3_kl"):
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == [1, 2, 3]
        expected = pytest.approx([line[name] for line in lines], rel=gamma(1))     # float32
        assert [event.value for event in scalars] == expected


def test_full_disk_is_one_sentence_and_the_last_checkpoint_remains(run, monkeypatch, capsys):
    write = checkpoints.write

    def full(path, text):
        if path.name == "state.json" and "step-000002" in str(path):
            raise OSError(28, "No space left on device")
        write(path, text)
    monkeypatch.setattr(checkpoints, "write", full)
    code, _ = run("train.save_every=1")
    said = capsys.readouterr().err
    assert code == 1 and "the disk or its quota is full" in said and "Traceback" not in said
    assert [p.name for p in Path("runs/x/checkpoints").iterdir()] == ["step-000001"]
    monkeypatch.undo()


def test_control_c(tiny_model, forks, tmp_path):
    command = [sys.executable, *forks, str(ROOT / "trainer.py"), *SMALL, "run=x",
               f"policy.path={tiny_model}", "rollout.engine=transformers", "train.steps=100000",
               "train.save_every=2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "runs/x/checkpoints/step-000002").exists, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=HANG)[1]
    assert process.returncode == 130 and "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("trainer.py: interrupted")
    assert list((tmp_path / "runs/x/checkpoints").glob("step-*/state.json"))




@pytest.mark.parametrize("error, said", [
    (RuntimeError("EngineCore encountered an issue.\nSee stack"),
     "rollout.engine=transformers failed with RuntimeError: EngineCore encountered an issue."),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
     MEMORY + "train.micro_batch_size or _tokens, rollout.batch_size"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
     MEMORY),
    (MemoryError(), MEMORY),
])
@pytest.mark.parametrize("where", ["generate", "update_weights"])
def test_an_engine_that_dies_has_its_last_words_and_leaves_the_checkpoint(
        where, error, said, run, monkeypatch, capsys):
    real, calls = getattr(TransformersEngine, where), []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise error
        return real(*args, **kwargs)
    monkeypatch.setattr(TransformersEngine, where, dying)
    code, _ = run("train.save_every=1", "train.steps=9", "train.eval_every=99")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1 and last.startswith(f"trainer.py: {said}"), last
    assert list(Path("runs/x/checkpoints").glob("step-*/state.json"))


def test_a_cosine_that_is_given_another_end_says_so(run, capsys):
    run("train.schedule=cosine")
    for steps, said in (("train.steps=2", False), ("train.steps=3", True)):
        run("train.schedule=cosine", steps)
        assert ("cosine fell towards train.steps=2" in capsys.readouterr().err) == said


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
