"""Debug files of slime and miles are read as tables of tensors, and nothing in them runs.

The code of math/appendix-dumps.md is executed as it stands there.
"""

import os
import pickle
import re
import types
from pathlib import Path

import pytest
import torch

from three_policies.doctor.command import main
from three_policies.doctor.dumps import read, response

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "math/appendix-dumps.md").read_text(encoding="utf-8")
ROWS = [{"prompt_ids": [5, 6], "token_ids": [1, 2, 3], "rollout_log_probs": [-1.0, -2.0, -0.5],
         "train_log_probs": [-1.0, -2.5, -0.25], "response_mask": [1, 0, 1]},
        {"prompt_ids": [7], "token_ids": [4], "rollout_log_probs": [-3.0],
         "train_log_probs": [-3.5], "response_mask": [1]}]
EXPECTED = [response(n, row) for n, row in enumerate(ROWS, 1)]


def columns():
    """Return slime's columns, a list of all samples each."""
    def of(name, dtype):
        return [torch.tensor(row[name], dtype=dtype) for row in ROWS]
    return {"tokens": [torch.tensor(row["prompt_ids"] + row["token_ids"]) for row in ROWS],
            "response_lengths": [3, 1], "total_lengths": [5, 2],
            "loss_masks": of("response_mask", torch.int), "raw_reward": [1.0, 0.0, 1.0, 1.0],
            "log_probs": of("train_log_probs", torch.float),
            "rollout_log_probs": of("rollout_log_probs", torch.float)}


def samples():
    """Return the samples of slime's format 2: each column's name, and its part of it."""
    return [{name: x[i] for name, x in columns().items()} | {"sample_index": i} for i in range(2)]


def miles():
    """Return the samples of a policy_loss_debug file, in which old_log_probs are a copy of μ."""
    return [{"index": i, "response_length": len(row["token_ids"]),
             "train_log_probs": torch.tensor(row["train_log_probs"]),
             "old_log_probs": torch.tensor(row["rollout_log_probs"]),
             "rollout_log_probs": torch.tensor(row["rollout_log_probs"]),
             "local_loss_mask": torch.tensor(row["response_mask"]).float()}
            for i, row in enumerate(ROWS)]


def saved(data, path):
    torch.save(data, path)
    return path


@pytest.mark.parametrize("data", [
    {"rollout_id": 0, "rank": 0, "rollout_data": columns()},
    {"format_version": 2, "rollout_id": 0, "samples": samples(), "dp_shards": [{"rank": 0}]}],
    ids=["columns", "samples"])
def test_both_layouts_of_slime_are_read(data, tmp_path):
    assert [*read(saved(data, tmp_path / "0.pt"))] == EXPECTED


@pytest.mark.parametrize("old, column", [(True, "train_log_probs"), (False, "old_log_probs")])
def test_miles_samples_have_numbers_in_the_place_of_ids(old, column, tmp_path):
    """π_old is read, or where that is a copy of μ the log-probs of the forward pass."""
    given = miles()
    for sample in given if not old else ():
        sample["old_log_probs"] = sample["train_log_probs"] - 0.125
    first, second = read(saved({"samples": given}, tmp_path / "rank_0_call_0.pt"))
    assert (first.token_ids, second.token_ids, first.prompt_ids) == ([0, 1, 2], [3], None)
    assert first.mask == EXPECTED[0].mask
    assert first.train_log_probs == given[0][column].tolist()


def test_what_is_not_finite_is_counted(tmp_path):
    given = columns()
    given["rollout_log_probs"][0][0] = torch.nan
    given["log_probs"][1][0] = -torch.inf
    first, second = read(saved({"rollout_data": given}, tmp_path / "0.pt"))
    assert first.not_finite == 1 and second.train_log_probs == [-torch.inf]


class Runs:
    """A pickle of it makes a directory where it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def without(*names):
    return {"samples": [{k: x for k, x in s.items() if k not in names} for s in samples()]}


@pytest.mark.parametrize("data, sentence", [
    ({"samples": [Runs()]}, r"holds Python objects besides tensors \(posix.mkdir\), which could"),
    (without("rollout_log_probs"), "sample 1: it has no rollout_log_probs, which the engine"),
    (without("log_probs"), "sample 1: it has the engine's .* take a file of train_data/"),
    ({"samples": [s | {"response_lengths": 4} for s in samples()]},
     "has 3 entries for a response of 4 tokens: a part of it, as context parallelism"),
    ({"samples": [s | {"tokens": torch.tensor([1])} for s in samples()]},
     "has 1 tokens for a response of 3"),
    ({"samples": [1]}, "has neither the samples nor the rollout_data"),
    ([1], "has neither the samples nor the rollout_data")])
def test_what_is_refused_is_one_sentence(data, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(saved(data, tmp_path / "0.pt"))]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1 and not Path("ran").exists()


@pytest.mark.parametrize("name, content, sentence", [
    ("0.pt", b"", "is no whole file of torch.save"), ("0.pt", b"PK\x03\x04x", "is no whole file"),
    ("0.pkl", pickle.dumps({"a": 1}), "this is not JSON, but a pickle, which could run code"),
    ("0.jsonl", b"PK\x03\x04x", "this is not JSON, but a file of torch.save or a zip")])
def test_a_damaged_or_misnamed_file_is_one_sentence(name, content, sentence, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_no_other_loader_is_called(monkeypatch, tmp_path):
    """A Python object is refused by torch before anything of it is made."""
    called = []
    monkeypatch.setattr(torch, "load", lambda path, **how: called.append(how) or {"samples": []})
    assert [*read(tmp_path / "0.pt")] == [] and called == [
        {"map_location": "cpu", "weights_only": True}]


# ----------------------------------------------------------------------- the page's own code

def block(heading):
    """Return the code below a heading of the page."""
    return re.search(rf"## {heading}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.parametrize("layout", ["columns", "samples"])
def test_the_pages_lines_convert_a_file_that_is_refused(layout, tmp_path, monkeypatch, capsys):
    numpy = pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)
    data = ({"rollout_data": columns() | {"rollout_routed_experts": [numpy.zeros(2)] * 2}}
            if layout == "columns" else
            {"samples": [s | {"routed": numpy.zeros(2)} for s in samples()]})
    assert main([str(saved(data, "0.pt"))]) == 2 and "numpy" in capsys.readouterr().err
    exec(block("slime and miles"), {})
    assert [*read("plain.pt")] == EXPECTED


def batch():
    """Return ROWS as one tensor: prompts padded left, responses right; and both log-probs."""
    sequences = torch.tensor([[5, 6, 1, 2, 3], [0, 7, 4, 0, 0]])
    late = {name: torch.tensor([ROWS[0][name], [*ROWS[1][name], 0, 0]])
            for name in ("rollout_log_probs", "train_log_probs", "response_mask")}
    return types.SimpleNamespace(sequences=sequences, attention_mask=(sequences > 0).long(),
                                 **late)


def test_the_pages_lines_for_skyrl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    b = batch()
    exec(block("SkyRL"), {"batch": {
        "sequences": b.sequences, "attention_mask": b.attention_mask,
        "loss_mask": b.response_mask, "rollout_logprobs": b.rollout_log_probs,
        "action_log_probs": b.train_log_probs}})
    stated = {"engine": "bfloat16", "trainer": "bfloat16", "experts": False}
    assert [*read("dump.jsonl")] == [row._replace(pair=stated) for row in EXPECTED]


def test_the_pages_lines_for_openrlhf(tmp_path, monkeypatch):
    """Its mask and log-probs are of all tokens but the first, and 0 for the prompt."""
    monkeypatch.chdir(tmp_path)
    b = batch()
    wide = {name: torch.nn.functional.pad(getattr(b, name), (1, 0)) for name in (
        "rollout_log_probs", "train_log_probs", "response_mask")}
    exec(block("OpenRLHF"), {"experience": types.SimpleNamespace(
        sequences=b.sequences, attention_mask=b.attention_mask, action_mask=wide["response_mask"],
        rollout_log_probs=wide["rollout_log_probs"], action_log_probs=wide["train_log_probs"])})
    assert [*read("dump.jsonl")] == EXPECTED


def test_the_pages_lines_for_areal(tmp_path, monkeypatch):
    """`prox_logp` is one place ahead of `logprobs`, and rows are padded at their end alone."""
    monkeypatch.chdir(tmp_path)
    b, ids = batch(), torch.tensor([[5, 6, 1, 2, 3], [7, 4, 0, 0, 0]])
    mu, pi, mask = (torch.zeros(2, 5, dtype=x.dtype) for x in (
        b.rollout_log_probs, b.train_log_probs, b.response_mask))
    for i, (start, n) in enumerate(((2, 3), (1, 1))):
        mu[i, start:start + n] = b.rollout_log_probs[i, :n]
        mask[i, start:start + n] = b.response_mask[i, :n]
        pi[i, start - 1:start + n - 1] = b.train_log_probs[i, :n]
    exec(block("AReaL"), {"batch": {
        "input_ids": ids, "attention_mask": (ids > 0).long(), "loss_mask": mask, "logprobs": mu,
        "prox_logp": pi}})
    assert [*read("dump.jsonl")] == EXPECTED


def test_an_image_is_refused_by_the_model_and_by_it_alone(tiny_model, tmp_path, capsys):
    import json
    import shutil

    from three_policies.doctor.dumps import append
    shutil.copytree(tiny_model, tmp_path / "model")
    place = tmp_path / "model/config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"image_token_id": 6}))
    append(tmp_path / "dump.jsonl", ROWS[:1])
    assert main([str(tmp_path / "dump.jsonl")]) != 2
    assert main([str(tmp_path / "dump.jsonl"), "--model", str(tmp_path / "model")]) == 2
    assert "line 1 has an image, a video or a sound (token 6)" in capsys.readouterr().err
