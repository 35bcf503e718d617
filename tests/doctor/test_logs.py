"""Logs of other systems are read by their own names of columns, and what is no log is refused."""

import csv
import json
import math
import sys
import types

import pytest

from three_policies.doctor.command import main
from three_policies.doctor.logs import is_log, read

VALUES = [(step, 1e-4 * step, 1e-6) for step in range(1, 7)]


def rows_named(step, gap, rate):
    return [{step: s, gap: k, rate: lr} for s, k, lr in VALUES]


def as_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def text(name, rows, step):
    """Return the file of a logger, by its name."""
    lines = {"metrics.jsonl": rows,
             "verl.jsonl": [{"step": r.pop(step), "data": r} for r in map(dict, rows)]}
    if name == "console.log":
        return "".join(" - ".join(f"{k}:{v}" for k, v in r.items()) + "\n" for r in rows)
    if name.endswith(".jsonl"):
        return "".join(json.dumps(r) + "\n" for r in lines[name])
    return json.dumps({"log_history": rows} if name == "trainer_state.json" else
                      {k: {str(i): r[k] for i, r in enumerate(rows)} for k in rows[0]}
                      if name == "table.json" else rows)


OURS = ("step", "rollout_corr/k3_kl", "learning_rate")
VERL = ("step", "rollout_corr/k3_kl", "actor/lr")


@pytest.mark.parametrize("name, columns, gap", [
    ("metrics.jsonl", OURS, "k3"), ("verl.jsonl", VERL, "k3"), ("console.log", VERL, "k3"),
    ("trainer_state.json", ("step", "sampling/sampling_logp_difference/mean", "learning_rate"),
     "abs"), ("history.json", ("_step", "mismatch_kl/mean", "optim/lr"), "k3"),
    ("table.json", ("_step", "train/gen_kl_error", "train/lr"), "k3"),
    ("wandb.csv", ("Step", "run-7 - rollout_corr/k3_kl", "run-7 - actor/lr"), "k3")])
def test_logs_are_read_by_their_own_names(name, columns, gap, tmp_path):
    rows = rows_named(*columns)
    if name.endswith(".csv"):
        as_csv(tmp_path / name, rows)
    else:
        (tmp_path / name).write_text(text(name, rows, columns[0]))
    assert is_log(tmp_path / name)
    log = read(tmp_path / name)
    assert log.names == dict(zip(("step", gap, "learning rate"), columns))
    assert log.size == gap and log.column(gap) == pytest.approx([k for _, k, _ in VALUES])


def test_tensorboard_is_read_by_its_package_or_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    place = "tensorboard.backend.event_processing.event_accumulator"
    monkeypatch.setitem(sys.modules, place, None)
    assert main([str(tmp_path)]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err

    class Accumulator:
        def __init__(self, path, size_guidance):
            assert path == str(tmp_path) and size_guidance == {"scalars": 0}

        def Reload(self): pass

        def Tags(self): return {"scalars": ["rollout_corr/k3_kl"]}

        def Scalars(self, tag): return [types.SimpleNamespace(step=s, value=k)
                                        for s, k, _ in VALUES]
    monkeypatch.setitem(sys.modules, place, types.SimpleNamespace(EventAccumulator=Accumulator))
    assert read(tmp_path).column("k3") == [k for _, k, _ in VALUES]


@pytest.mark.parametrize("name, content, words", [
    ("x.csv", "a,b\n1,2\n", "has no column of steps"), ("x.json", "{", "no list of rows"),
    ("x.csv", "Step,a - lr,b - lr\n1,2,3\n", "has 2 runs (a, b): export one"),
    ("x.jsonl", '{"step": 1, "lr": 1}', "--model and --figure go with one DUMP"),
    ("folder", None, "without a log and without a dump")])
def test_what_is_no_log_is_one_sentence(name, content, words, tmp_path, capsys):
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(content)
    extra = ["--model", "x"] * ("--model" in words)
    assert main([str(tmp_path / name), *extra]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_gap_that_is_no_number_is_a_fault(tmp_path, capsys):
    """Whatever the finite rows say: a log that turns NaN is not healthy."""
    rows = [{"step": n, "rollout_corr/k3_kl": 1e-3 if n < 9 else math.nan, "train/lr": 0.0}
            for n in range(1, 12)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read(path).lost == [9, 10, 11] and main([str(path)]) == 1
    assert "NaN or ∞ at 3 steps, the first of them 9" in capsys.readouterr().out


def test_a_log_is_judged_by_its_largest_gap(tmp_path, capsys):
    """Five rows far above all healthy pairs, in the middle of a quiet log, are a fault."""
    path = tmp_path / "log.jsonl"
    for spike, code in ((1e-4, 0), (5.0, 1)):
        path.write_text("\n".join(json.dumps(
            {"step": n, "rollout_corr/k3_kl": spike if 8 <= n <= 12 else 1e-4, "train/lr": 0.0})
            for n in range(1, 31)))
        assert main([str(path), "--precision", "bf16", "--no-experts"]) == code
    assert "the largest is 5, at step 8" in capsys.readouterr().out
