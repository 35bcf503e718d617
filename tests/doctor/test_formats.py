"""The doctor reads rows of several systems, and a bad row is one sentence."""

import json
import math

import pytest

from three_policies import doctor
from three_policies.doctor import plants
from three_policies.doctor.command import main
from three_policies.doctor.dumps import FORMATS, Response, read, response
from three_policies.tests.doctor.test_causes import names, planted
from three_policies.tests.support.margins import stands_clear


def row(**changes):
    return {"prompt_ids": [5, 6], "token_ids": [1, 2, 3], "rollout_log_probs": [-1.0, -2.0, -0.5],
            "train_log_probs": [-1.0, -2.5, -0.5], **changes}


PRIME = {"token_ids": [5, 6, 1, 2, 3], "loss_mask": [False, False, True, False, True],
         "inference_logprobs": [0, 0, -1.0, -2.0, -0.5], "entropy": [0, 0, 1.0, 2.0, 0.5],
         "trainer_logprobs": [0, 0, -1.0, -2.5, -0.5]}
NEMO = {"token_ids": [5, 6, 1, 2, 3, 0, 0], "token_loss_mask": [0, 0, 1, 0, 1, 0, 0],
        "generation_logprobs": [0, 0, -1.0, -2.0, -0.5, 0, 0], "input_lengths": 5,
        "prev_logprobs": [0, 0, -1.0, -2.5, -0.5, 0, 0]}


def test_formats(tmp_path):
    ours = Response(1, [1, 2, 3], [-1, -2, -0.5], [-1, -2.5, -0.5], [5, 6], [True] * 3, None, None)
    assert response(1, row()) == ours
    masked = ours._replace(mask=[True, False, True])
    assert response(1, NEMO) == masked == response(1, row(response_mask=[1, 0, 1]))
    assert response(1, PRIME) == masked._replace(entropy=[1, 2, 0.5])
    above = response(1, row(train_log_probs=[-1, 0.05, -0.5])).train_log_probs     # in 16 bits
    assert above == [-1, 0.05, -0.5]
    assert response(1, row(weight_version=7)).versions == [7, 7, 7]
    assert response(1, row(weight_version=[7, 7, 8])).versions == [7, 7, 8]
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(row())}\n\n{json.dumps(PRIME)}\n")
    assert [r.line for r in read(tmp_path / "x.jsonl")] == [1, 3]


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    parquet.write_table(arrow.Table.from_pylist([row(), row()]), tmp_path / "x.parquet")
    first, second = read(tmp_path / "x.parquet")
    assert first == response(1, row()) and second.line == 2
    parquet.write_table(arrow.Table.from_pylist([row()] * 600), tmp_path / "x.parquet")
    assert [r.line for r in read(tmp_path / "x.parquet")] == [*range(1, 601)]


def test_every_format_has_a_row_here():
    for of in FORMATS.values():
        assert any(of.names["rollout_log_probs"] in row for row in (PRIME, NEMO))


@pytest.mark.parametrize("text, says", [
    ("{", "line 2: this is not JSON"), ("[1]", "a row must be a table"),
    ('{"token_ids": [1]}', "rollout_log_probs is missing"),
    (json.dumps(row(token_ids=[1, 2])), "rollout_log_probs must be a list with an entry for each"),
    (json.dumps(row(token_ids=[1, 2, "x"])), "token_ids has an entry that is no whole number"),
    (json.dumps(row(weight_version=5.0)), "weight_version must be a whole number or a list"),
    (json.dumps(row(entropy=[1, 2, -1])), "entropy has a value below 0"),
    (json.dumps(row(token_ids=[1, 2, 2.5])), "token_ids has an entry"),
    (json.dumps(row(rollout_log_probs=[0, 0, math.nan])), "rollout_log_probs has an entry"),
    (json.dumps(row(rollout_log_probs=[0, 0, -math.inf])), "rollout_log_probs has an entry"),
    (json.dumps(row(train_log_probs=[0, 0.7, 0])), "a value above 0"),
    (json.dumps(row(entropy=[1])), "entropy must be a list"),
    (json.dumps(row(prompt_ids="hello")), "prompt_ids has an entry"),
    ("\x80\x04", "this is not JSON")])
def test_a_bad_row_is_one_sentence_with_its_line(tmp_path, capsys, text, says):
    path = tmp_path / "dump.jsonl"
    path.write_text(f"{json.dumps(row())}\n{text}\n", "latin-1")
    assert main([str(path)]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("doctor: line 2: ")
    assert says in error and error.count("\n") == 1


def dump(path, found):
    plants.write([{"token_ids": r.token_ids, "rollout_log_probs": r.rollout_log_probs,
                   "train_log_probs": r.train_log_probs} for r in found], path)


@pytest.mark.made_here
@pytest.mark.parametrize("cause, variant, first", [("healthy", "same", []),
                                                   ("shift", "sampler-1", ["shift"])])
def test_a_verdict_without_prompts_and_entropy(cause, variant, first, tmp_path):
    """The dumps of the next test."""
    dump(tmp_path / "dump.jsonl", planted(cause, "Qwen2", variant))
    report = stands_clear(lambda: doctor.examine(read(tmp_path / "dump.jsonl")),
                          lambda report: names(report)[:1])
    assert names(report)[:1] == first and report.missing == ("entropy", "prompt_ids")


@pytest.mark.made_here
def test_exit_statuses_and_json(tmp_path, capsys):
    """Prompts and entropy may be missing; the report says what that costs."""
    path = tmp_path / "dump.jsonl"
    dump(path, planted("healthy", "Qwen2", "same"))
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "No cause found" in out and "Without prompt_ids" in out and "Without entropy" in out
    dump(path, planted("shift", "Qwen2", "sampler-1"))
    assert main([str(path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["proper", "e_rho", "tokens", "causes"]
    assert said["causes"][0]["cause"] == "shift"
    assert main([str(tmp_path / "none.jsonl")]) == 2
    path.write_text("")
    assert main([str(path)]) == 2
    assert "no token" in capsys.readouterr().err
