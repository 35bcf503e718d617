"""Rows of every system are read; a bad row is one sentence, and a log-prob that is missing counts.

Sampled tokens without a finite log-prob are counted and said, wherever they come from.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from three_policies import doctor
from three_policies.doctor import examine, plants
from three_policies.doctor.command import main
from three_policies.doctor.dumps import ABOVE, FORMATS, Response, append, read, response, rows_of
from three_policies.doctor.report import Lost
from three_policies.rollout import TransformersEngine
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.margins import stands_clear
from three_policies.tests.support.planted import names, planted


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
    assert main([str(path), "--precision", "fp32"]) == 0 and main([str(path)]) == 3   # a copy?
    out = capsys.readouterr().out
    assert "No cause found" in out and "Without prompt_ids" in out and "Without entropy" in out
    dump(path, planted("shift", "Qwen2", "sampler-1"))
    assert main([str(path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["verdict", "proper", "e_rho", "tokens", "k3", "rms", "pair",
                          "causes"]
    assert said["causes"][0]["cause"] == "shift"
    assert main([str(tmp_path / "none.jsonl")]) == 2
    path.write_text("")
    assert main([str(path)]) == 2
    assert "no token" in capsys.readouterr().err


NULL_OURS = {"token_ids": [4, 5, 6], "rollout_log_probs": [-1.0, None, -0.5],
        "train_log_probs": [-1.0, -2.0, None]}
NULL_NEMO = {"token_ids": [9, 4, 5, 6], "generation_logprobs": [None, -1.0, None, -0.5],
        "prev_logprobs": [0, -1.0, -2.0, None], "token_loss_mask": [0, 1, 1, 1]}
NULL_PRIME = {"token_ids": [9, 4, 5, 6], "inference_logprobs": [None, -1.0, None, -0.5],
         "trainer_logprobs": [None, -1.0, -2.0, None], "loss_mask": [False, True, True, True]}


@pytest.mark.parametrize("row", [NULL_OURS, NULL_NEMO, NULL_PRIME], ids=["ours", "nemo", "prime"])
def test_a_null_is_masked_and_counted_in_every_format(row):
    """What precedes the response, and what a tool wrote, are no sampled tokens."""
    found = response(1, row)
    assert (found.token_ids, found.mask, found.not_finite) == ([4, 5, 6], [True, False, False], 2)
    assert found.rollout_log_probs[0] == found.train_log_probs[0] == -1
    masked = response(1, NULL_OURS | {"response_mask": [1, 0, 1]})
    assert (masked.mask, masked.not_finite) == ([True, False, False], 1)
    whole = response(1, NULL_OURS | {"rollout_log_probs": [None] * 3})
    assert (whole.mask, whole.not_finite) == ([False] * 3, 3)


def test_a_column_of_entropies_may_be_null_where_nothing_counts():
    with_entropy = response(1, NULL_OURS | {"entropy": [1.0, None, None]})
    assert with_entropy.entropy == [1.0, 0.0, 0.0] and with_entropy.not_finite == 2
    assert response(1, NULL_OURS | {"entropy": [None, 1.0, 1.0]}).entropy is None
    assert response(1, NULL_OURS | {"rollout_log_probs": [None] * 3}).entropy is None


@pytest.mark.parametrize("mu, pi, written", [
    (math.nan, -1.0, False), (-math.inf, -1.0, False), (math.inf, -1.0, False),
    (-1.0, math.nan, False), (-1.0, math.inf, False), (-1.0, -math.inf, True),
    (-1.0, -1.0, True)])
def test_rows_have_null_for_what_is_not_finite(mu, pi, written, tmp_path):
    """π may be 0, which is a cause. A tool's token may be anything, and is not counted."""
    ones = torch.ones(1, 2, dtype=torch.long)
    rows = rows_of(ones, ones, 4 * ones, ones, torch.tensor([[1, 0]]),
                   torch.full((1, 2), mu), torch.full((1, 2), pi), torch.full((1, 2), math.nan))
    assert rows[0]["response_mask"] == [1, 0] and rows[0]["entropy"] == [None, None]
    assert (rows[0]["rollout_log_probs"][0] is not None) is written
    assert "NaN" not in json.dumps(rows)
    append(tmp_path / "dump.jsonl", rows)
    [found] = read(tmp_path / "dump.jsonl")
    assert (found.mask, found.not_finite) == ([written, False], int(not written))


def dump_without(path, lost, rows=8):
    """Write rows of 50 tokens; `lost`: how many of each row have no log-prob."""
    append(path, [{"prompt_ids": [i], "token_ids": [5] * 50, "train_log_probs": [-1.0] * 50,
                   "rollout_log_probs": [None] * lost.get(i, 0) + [-1.0] * (50 - lost.get(i, 0))}
                  for i in range(rows)])


@pytest.mark.parametrize("lost, says", [
    ({0: 50, 4: 50}, "100 of 400 sampled tokens have no finite log-prob and are left out: whole "
                     "rows of them, 2 of 8. Look at the engine's output first."),
    ({0: 50, 4: 1}, "51 of 400 sampled tokens have no finite log-prob and are left out: in 2 of "
                    "8 responses, 1 of them whole."),
    ({3: 2}, "2 of 400 sampled tokens have no finite log-prob and are left out: in 1 of 8 "
             "responses, none whole.")])
def test_the_report_counts_them_in_words_in_json_and_in_the_exit_code(lost, says, tmp_path, capsys):
    dump_without(tmp_path / "dump.jsonl", lost)
    assert main([str(tmp_path / "dump.jsonl")]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    n, whole = sum(lost.values()), sum(x == 50 for x in lost.values())
    assert first == f"8 responses, {400 - n} tokens." and second.startswith(says)
    assert main([str(tmp_path / "dump.jsonl"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["not_finite"] == {"tokens": n, "responses": len(lost), "whole": whole}
    assert told["tokens"] == 400 - n and told["causes"] == []
    report = examine(read(tmp_path / "dump.jsonl"))
    assert report.in_short().endswith(says.split(". Look")[0].rstrip("."))


def test_a_dump_that_has_them_all_says_so_and_one_that_has_none_does_not(tmp_path, capsys):
    dump_without(tmp_path / "dump.jsonl", {})
    assert main([str(tmp_path / "dump.jsonl"), "--json"]) == 3      # as if π were a copy of μ
    assert "not_finite" not in json.loads(capsys.readouterr().out)
    assert examine(read(tmp_path / "dump.jsonl")).lost == Lost()
    (tmp_path / "dump.jsonl").unlink()
    dump_without(tmp_path / "dump.jsonl", dict.fromkeys(range(8), 50))
    assert main([str(tmp_path / "dump.jsonl")]) == 1
    said = capsys.readouterr().out
    assert "\nA fault: 400 of 400 sampled tokens have no finite log-prob.\n" in said


def spoil(monkeypatch, row=2, value=-math.inf):
    """Let the engine record no finite log-prob for one response's second token."""
    generate = TransformersEngine.generate

    def spoiled(*args, **kwargs):
        samples = generate(*args, **kwargs)
        if len(samples) > row and len(samples[row].rollout_log_prob) > 1:
            first, _, *others = samples[row].rollout_log_prob
            samples[row] = replace(samples[row], rollout_log_prob=[first, value, *others])
        return samples
    monkeypatch.setattr(TransformersEngine, "generate", spoiled)


def test_the_trainers_dump_has_what_the_trainer_left_out(run, monkeypatch, capsys):
    """It skips the whole response; the dump holds its finite tokens, and null for the other."""
    spoil(monkeypatch)
    code, lines = run("rollout.max_tokens=5", "train.on_nonfinite=skip", "run.dump=1")
    found = list(read(next(Path("runs/x/dumps").iterdir())))
    assert code == 0 and lines[0]["train/skipped_samples"] == 1
    [lost] = [r for r in found if r.not_finite]
    assert lost.not_finite == 1 and lost.mask == [True, False] + [True] * (len(lost.mask) - 2)
    assert all(all(r.mask) for r in found if r is not lost)
    assert "1 of " in capsys.readouterr().err.split("as the doctor sees it: ")[1].splitlines()[0]


def test_an_engine_that_is_sampled_by_the_doctor_may_record_nan(tiny_model, monkeypatch, capsys):
    """It counted as ρ = e²⁰ before, and no word was said of it."""
    spoil(monkeypatch, value=math.nan)
    assert main(["--model", str(tiny_model), "--engine", "transformers", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["not_finite"] == {"tokens": 1, "responses": 1, "whole": 0}
    assert told["proper"] and told["causes"] == []


# ------------------------------------------------------------------- log-probs above 0

@pytest.mark.parametrize("above, read_as", [
    (0.03, True), (0.125, True), (ABOVE, True), (1.0001 * ABOVE, False), (0.25, False)])
@pytest.mark.parametrize("column", ["rollout_log_probs", "train_log_probs"])
def test_a_log_prob_is_above_0_by_a_rounding_of_16_bits_alone(above, read_as, column):
    """eq:sixteen-bits: half a unit in the last place of a bfloat16 below 64 is an eighth."""
    row = {"token_ids": [4, 5], "rollout_log_probs": [-1.0, -1.0], "train_log_probs": [-1.0, -1.0]}
    row[column] = [-1.0, above]
    if read_as:
        assert getattr(response(1, row), column) == [-1.0, above]
    else:
        with pytest.raises(ValueError, match=f"line 1: {column} has a value above 0, {above:.3g}, "
                                             "which is no log-prob: logits in 16 bits leave an"):
            response(1, row)


@certifies("float64")
@pytest.mark.parametrize("at, most", [(20.0, 2 ** -4), (40.0, 2 ** -3)])
def test_half_a_unit_is_what_a_logit_in_16_bits_leaves(at, most):
    """eq:sixteen-bits: the largest error of bfloat16 in an octave is half of its spacing there."""
    octave = 2.0 ** math.floor(math.log2(at))
    z = torch.linspace(octave, 2 * octave, 100_001, dtype=torch.float64)
    error = (z.bfloat16().double() - z).abs().max().item()
    assert error <= most and error > 0.99 * most


def sixteen_bits(side, size):
    """Return a dump whose log-prob on one side is a bfloat16 logit less a log-sum in float64.

    size: what is added to all logits, which changes no probability but their rounding.
    """
    g = torch.Generator().manual_seed(0)
    z = 4 * torch.randn(3000, 30, generator=g).double() + size
    exact = z.log_softmax(-1)
    rough = z.bfloat16().double() - z.logsumexp(-1, keepdim=True)
    y = torch.multinomial(exact.exp(), 1, generator=g)
    mu, pi = (x.gather(-1, y)[:, 0].view(100, 30).tolist()
              for x in ((rough, exact) if side == "log μ" else (exact, rough)))
    return [response(i, {"prompt_ids": [i], "token_ids": y.view(100, 30)[i].tolist(),
                         "rollout_log_probs": mu[i], "train_log_probs": pi[i]})
            for i in range(100)]


@pytest.mark.parametrize("side", ["log μ", "log π"])
@pytest.mark.parametrize("size", [10.0, 40.0])
def test_logits_in_16_bits_are_read_and_named(side, size):
    """eq:sixteen-bits: many log-probs are above 0, by up to an eighth."""
    report = examine(sixteen_bits(side, size))
    over = report.examined.over[:, ("log μ", "log π").index(side)]
    print(f"{(over > 1e-4).double().mean():.1%} above 0, at most {over.max():.3f}")
    assert (over > 1e-4).sum() > 100 and over.max() <= 0.125
    first = report.causes[0]
    assert first.cause == "bf16-log-softmax" and first.evidence.startswith(f"{side} is above 0 on ")
    assert f"by up to {over.max():.3f}" in first.evidence
    assert report.examined.mu.max() <= 0 and report.examined.pi.max() <= 0


def test_float32s_own_rounding_above_0_is_no_sign_of_16_bits():
    rows = [response(1, {"token_ids": [4] * 60, "rollout_log_probs": [2e-6] * 30 + [-1.2345] * 30,
                         "train_log_probs": [-1e-6] * 30 + [-1.2345] * 30})]
    assert examine(rows).causes == []
