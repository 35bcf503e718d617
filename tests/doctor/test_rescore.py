"""Rescoring finds the guilty side, the cause and its value; plants are those of rescore_rates.py.

The rates over other models are printed by `python doctor/rescore_rates.py`.
"""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from three_policies.doctor.laws import Finding
from three_policies.doctor.command import explained, main
from three_policies.doctor.dumps import Response, append
from three_policies.doctor.hypotheses import TABLE, Scorer, module_of, paddings, to_fp8
from three_policies.doctor.rescore import (AHEAD, Match, Rescored, likeliest, random_prompts,
                                           rescore, sample_and_score)
from three_policies.doctor.rescore_rates import (dropped, make_models, planted, sample, score,
                                                 verdict)
from three_policies.estimators import sampling_log_probs


@pytest.mark.made_here
@pytest.mark.parametrize("kind, seed, causes", [
    ("Qwen2", 20, ["raw", "shift", "window", "in-flight", "penalty"]),
    ("Gemma2", 21, ["none", "softcap", "padding"]),
    ("Llama", 23, ["weights", "context", "unknown", "bf16-log-softmax"])])
def test_plants_are_found_on_either_side(kind, seed, causes, tmp_path, monkeypatch):
    """Side, cause and value are found, with and without noise of bfloat16: 12 rows of 16 tokens.

    Some of each cause's plants are tried, at the sampler and at the trainer in turn. What each
    column is called is CLEAR nats ahead of what would be another verdict.
    """
    wrong, seen, judged = [], dict[str, int](), []
    monkeypatch.setattr("three_policies.doctor.rescore.likeliest", lambda fits: judged.append(
        likeliest(fits)) or judged[-1])
    for plant in planted(kind, seed, tmp_path, groups=3, longest=16, only=causes):
        seen[plant.cause] = seen.get(plant.cause, -1) + 1
        if seen[plant.cause] not in (0, 3, 4, 8, 13):
            continue
        judged.clear()
        found = rescore(plant.paths[0], plant.paths[1:], plant.responses)
        lead = min(map(ahead, judged))
        print(f"{kind} {seed}, {plant[:4]}: {found.guilty}, {lead:.1f} nats ahead")
        if not all(verdict(plant, found)) or lead < CLEAR:
            wrong.append((plant[:4], found.guilty, found.lines(), lead))
    assert not wrong and set(seen) == set(causes)


CLEAR = 5        # nats: another kernel in bfloat16 moves the lead of rounding by up to 5 of 20


def ahead(fits):
    """Return the nats by which a column's verdict is ahead of another cause, or of none."""
    first, *others = fits
    innocent = min(m.cost for m in fits if m.cause is None) - AHEAD
    rivals = [m.cost for m in others if m.cause not in (None, first.cause)]
    if first.cause is None:
        return min(rivals, default=math.inf) - innocent
    return min(innocent, *rivals, math.inf) - first.cost


def test_a_fault_must_be_likelier_than_the_rounding_of_another_kernel():
    """A row fits the rest that a kernel in bfloat16 leaves by a nat, and is no fault for that."""
    plain = Match("plain", None, None, 1.0, 0.0)
    rounded = plain._replace(name="plain in bfloat16", left=0.03, cost=-280.0)
    for nats, first in ((1.2, rounded), (9.9, rounded), (10.1, None)):
        cut = Match("min-p 0.00244", "cut", 0.00244, 0.028, rounded.cost - nats)
        found = likeliest([plain, rounded, cut])
        assert found[0] == (first or cut) and found[-1] == plain and len(found) == 3


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return a tiny model, its directory, prompts, and responses drawn at temperature 0.7."""
    model, _, paths = make_models("Qwen2", 22, tmp_path_factory.mktemp("models"))
    prompts = [[3 + i, 5, 7, 9 + i][:3 + i % 2] for i in range(12)]
    return model, paths[0], prompts, sample(model, prompts, 20, lambda z, p, y: z / 0.7)


def dump(prompts, tokens, rollout, train):
    return [Response(n, y, a.tolist(), b.tolist(), p, [True] * len(y))
            for n, (p, y, a, b) in enumerate(zip(prompts, tokens, rollout, train), 1)]


def test_another_architecture_is_no_older_checkpoint(drawn, tmp_path, capsys):
    model, path, prompts, tokens = drawn
    _, _, [other, *_] = make_models("Gemma2", 0, tmp_path)
    same = score(model, prompts, tokens)
    rows = [r._asdict() | {"response_mask": [1] * len(r.token_ids)}
            for r in dump(prompts, tokens, same, same)]
    append(tmp_path / "dump.jsonl", rows)
    assert main([str(tmp_path / "dump.jsonl"), "--model", path, "--older", path, other]) == 2
    assert (f"--older {other} has weights of other names or shapes than --model {path}"
            in capsys.readouterr().err)


def test_a_model_from_which_both_sides_depart_alike_is_doubted():
    """It is not known then which model the dump is of, and nothing is certain."""
    hot = Match("log π/2", "temperature", 2.0, 0.01, 0.0)
    whole, apart, one = (Rescored(hot, other, "both") for other in (
        hot._replace(parameter=2.1), hot._replace(parameter=0.5), hot._replace(cause=None)))
    for rescored, certain in ((whole, False), (apart, True), (one, True)):
        for finding in explained(rescored, []):
            assert (finding.confidence == "certain") is certain
            assert ("is --model the model of this run?" in finding.evidence) is not certain


@pytest.mark.parametrize("one, other, alike", [
    (2.0, 2.4, True), (2.4, 2.0, True), (2.0, 2.6, False), (2.6, 2.0, False), (None, None, True),
    (4, 4, True), (4, 5, False)])
def test_a_value_is_near_another_within_a_quarter_and_a_count_if_it_is_equal(one, other, alike):
    first = Match("strange", "temperature", one, 0.01, 0.0, row="strange")
    second = first._replace(parameter=other)
    for match, near in ((second, alike), (second._replace(row="another"), False)):
        found = explained(Rescored(first, match, "both"), [])
        assert [("is --model" in finding.evidence) for finding in found] == [near] * 2


def test_where_a_column_is_unknown_the_dumps_own_suggestions_stay():
    """Otherwise a column that is at fault is a finding, and one that is not is none."""
    hint, plain = [Finding("eos", 0.5, "a place")], Match("plain", None, None, 1.0, 0.0)
    hot = Match("hot", "temperature", 2.0, 0.01, 0.0, rest=9.0, next=("cut", 0.5))
    odd = hot._replace(cause="unknown")
    assert explained(Rescored(odd, hot, "both"), hint) == hint
    assert explained(Rescored(hot, odd, "both"), hint) == hint
    said = " is hot: 1.0% of the gap left (next: cut, 50.0%)"
    assert explained(Rescored(hot, plain, "rollout"), hint) == [
        Finding("temperature", 0.01, "log μ" + said)]
    assert explained(Rescored(plain, hot, "train"), hint) == [
        Finding("temperature", 0.01, "log π" + said)]


@pytest.mark.made_here
def test_what_both_sides_have_is_no_fault(drawn):
    """A sampling temperature on both sides is no fault; a cut on top of it is the sampler's."""
    model, path, prompts, tokens = drawn
    hot = score(model, prompts, tokens, readout=lambda z, p, y: z / 0.7)
    found = rescore(path, [], dump(prompts, tokens, hot, hot))
    assert found.guilty == "none" and not found.rollout.cause and not found.train.cause
    assert "at temperature 0.7" in found.lines()[0]

    def cut(z, p, y):
        return sampling_log_probs(z, 0.7, top_k=4)[0]
    tokens = sample(model, prompts, 20, cut)
    hot = score(model, prompts, tokens, readout=lambda z, p, y: z / 0.7)
    kept = score(model, prompts, tokens, readout=cut)
    found = rescore(path, [], dump(prompts, tokens, kept, hot))
    assert (found.guilty, found.rollout.cause, found.rollout.parameter) == ("rollout", "cut", 4)
    assert found.rollout.name == "top-k 4, at temperature 0.7"


@pytest.mark.made_here
def test_two_guilty_sides_are_both_named(drawn):
    model, path, prompts, tokens = drawn
    plain = score(model, prompts, tokens)
    late = [x.roll(1) for x in plain]
    hot = score(model, prompts, tokens, readout=lambda z, p, y: z / 1.5)
    found = rescore(path, [], dump(prompts, tokens, late, hot))
    assert (found.guilty, found.rollout.cause, found.train.cause) == (
        "both", "shift", "temperature")
    given = json.loads(json.dumps(found.as_json()))
    assert set(given) == {"rollout", "train", "guilty"}
    assert set(given["train"]) == {"is", "cause", "parameter", "left", "next"}
    assert round(given["train"]["parameter"], 2) == 1.5 and given["train"]["left"] < 1e-3
    assert found.lines()[2:] == ["Cause: temperature, at the trainer",
                                 "Cause: shift, at the sampler"]


@pytest.mark.made_here
def test_dropout_is_told_from_a_fault_that_nothing_explains(drawn):
    model, path, prompts, tokens = drawn
    plain = score(model, prompts, tokens)
    torch.manual_seed(0)
    found = rescore(path, [], dump(prompts, tokens, plain, dropped(model, prompts, tokens, 0.3)))
    assert (found.guilty, found.train.cause) == ("train", "dropout")
    noise = [x + 0.3 * torch.randn_like(x) for x in plain]
    found = rescore(path, [], dump(prompts, tokens, plain, noise))
    assert (found.guilty, found.train.cause) == ("train", "unknown")
    assert "is --model" not in "".join(found.lines())


@pytest.mark.made_here
def test_the_model_of_another_step_makes_no_side_innocent(drawn, tmp_path):
    """Both columns are of weights that --model does not have."""
    model, path, prompts, tokens = drawn
    torch.manual_seed(0)
    noise = [0.3 * torch.randn(len(x)) for x in tokens]
    both = [x + e for x, e in zip(score(model, prompts, tokens), noise)]
    found = rescore(path, [], dump(prompts, tokens, both, both))
    assert found.rollout.cause == found.train.cause == "unknown"
    asked = "is --model the model of this dump?"
    assert all(line.endswith(asked) for line in found.lines()[:2])
    late = [x.roll(1) for x in score(model, prompts, tokens)]
    found = rescore(path, [], dump(prompts, tokens, late, both))
    assert (found.rollout.cause, found.train.cause) == ("shift", "unknown")
    assert [line.endswith(asked) for line in found.lines()[:2]] == [True, False]


@pytest.mark.made_here
@pytest.mark.parametrize("given", [dict(top_k=5), dict(top_p=0.8)])
def test_a_cut_is_found_though_noise_decides_who_is_at_its_edge(given, drawn):
    _, path, _, _ = drawn
    rows = sample_and_score(path, "transformers", random_prompts(path), max_tokens=20,
                            dtype="bfloat16", **given)
    found, [value] = rescore(path, [], rows), given.values()
    assert (found.guilty, found.rollout.cause) == ("rollout", "cut")
    assert found.rollout.name.startswith(next(iter(given)).replace("_", "-"))
    assert found.rollout.parameter == pytest.approx(value, rel=0.01)


@pytest.mark.made_here
def test_masked_tokens_say_nothing(drawn):
    model, path, prompts, tokens = drawn
    plain = score(model, prompts, tokens)
    rows = [r._replace(rollout_log_probs=[0.0, *r.rollout_log_probs[1:]],
                       mask=[False] + [True] * (len(r.token_ids) - 1))
            for r in dump(prompts, tokens, plain, plain)]
    assert rescore(path, [], rows).guilty == "none"


@pytest.mark.made_here
def test_a_raw_record_is_told_by_tokens_that_count(drawn):
    """E[log π − log μ] ≤ 0 on samples of μ; here π drew them, and a masked token hides it."""
    model, path, prompts, tokens = drawn
    hot = score(model, prompts, tokens, readout=lambda z, p, y: z / 0.7)
    rows = [r._replace(train_log_probs=[-50.0, *r.train_log_probs[1:]],
                       mask=[False] + [True] * (len(r.token_ids) - 1))
            for r in dump(prompts, tokens, score(model, prompts, tokens), hot)]
    found = rescore(path, [], rows)
    assert (found.guilty, found.rollout.cause) == ("rollout", "raw")


def test_without_a_prompt_the_line_is_named(drawn):
    _, path, _, _ = drawn
    row = Response(7, [3], [-1.0], [-1.0], None, [True])
    with pytest.raises(ValueError, match="line 7 has no prompt_ids"):
        rescore(path, [], [row._replace(line=6, prompt_ids=[3]), row, row._replace(line=9)])


def test_a_token_that_the_model_does_not_have_is_named_with_its_line(drawn):
    """An IndexError would exit with 1, which means a cause."""
    _, path, _, _ = drawn
    rows = [Response(n, [3, n], [-1.0] * 2, [-1.0] * 2, [4], [True] * 2) for n in (5, 10 ** 6)]
    with pytest.raises(ValueError, match="line 1000000 has token 1000000, and the vocabulary of"):
        rescore(path, [], rows)


def test_the_first_token_that_the_model_does_not_have_may_be_the_prompts(drawn):
    model, path, _, _ = drawn
    row = Response(1, [3], [-1.0], [-1.0], [4, model.config.vocab_size], [True])
    with pytest.raises(ValueError, match=f"line 1 has token {model.config.vocab_size}, and the"):
        rescore(path, [], [row])


@pytest.mark.parametrize("tokens, kept", [(1, 1), (3, 1), (4, 2), (99, 3)])
def test_responses_are_scored_as_long_as_their_logits_fit_and_one_is_always(
        tokens, kept, drawn, monkeypatch):
    model, path, _, _ = drawn
    monkeypatch.setattr("three_policies.doctor.rescore.LOGITS", tokens * model.config.vocab_size)
    monkeypatch.setattr("three_policies.doctor.rescore.Scorer", lambda *_: None)
    rows = [Response(n, [3, 4], [-1.0] * 2, [-1.0] * 2, [5], [True] * 2) for n in range(3)]
    seen = []
    monkeypatch.setattr(
        "three_policies.doctor.rescore.judge", lambda s, column, mask: seen.append(
            len(column)) or Match("plain", None, None, 1.0, 0.0))
    assert rescore(path, [], rows).guilty == "none" and seen == [2 * kept] * 2


def test_a_damaged_model_is_one_sentence(drawn, tmp_path, capsys):
    shutil.copytree(drawn[1], tmp_path / "model")
    with (tmp_path / "model/model.safetensors").open("r+b") as file:
        file.truncate(5)
    append(tmp_path / "dump.jsonl", [{"prompt_ids": [3], "token_ids": [4], "train_log_probs": [-1],
                                      "rollout_log_probs": [-1]}])
    for given, words in (([str(tmp_path / "dump.jsonl")], "cannot be loaded: "),
                         (["--engine", "transformers"], "--engine transformers does not start ")):
        assert main([*given, "--model", str(tmp_path / "model")]) == 2
        said = capsys.readouterr().err
        assert said.startswith("doctor: ") and words in said and said.count("\n") == 1


def test_rows_after_the_256th_keep_their_own_positions(drawn):
    """A pass of the model takes 256 rows; the last row here is alone in the second."""
    model, rows = drawn[0], [([3, 5, 9], [7])] * 257
    found = Scorer(model, [], rows).logits(starts=[0] * 256 + [-2])
    alone = Scorer(model, [], rows[:1])
    assert torch.equal(found[-1:], alone.logits(starts=[-2]))
    assert not torch.allclose(found[-1:], alone.plain, atol=0.1)


def test_a_single_row_has_no_value_behind_its_end(drawn):
    scorer = Scorer(drawn[0], [], [([3], [4, 5, 6])])
    for by, expected in ((1, [1, 2, math.nan]), (-1, [math.nan, 0, 1])):
        found = scorer.shifted(torch.arange(3.0), by)
        assert found.tolist() == pytest.approx(expected, nan_ok=True)


def test_prompts_are_padded_by_the_pad_token_to_the_longest_of_each_few_rows(drawn, monkeypatch):
    """Beside one longer prompt no other batch of two is padded; positions begin before 0."""
    scorer = Scorer(drawn[0], [], [(prompt, [9]) for prompt in ([3], [3, 4], [3, 4, 5], [6])])
    scorer.config, seen = SimpleNamespace(pad_token_id=7), []
    monkeypatch.setattr(scorer, "scored", lambda key, starts, rows: seen.append(
        ([prompt for prompt, _ in rows], starts)))
    for places, starts in (("right", [-1, 0, 0, -2]), ("wrong", ())):
        scorer.padded(0, 2, places)
        assert seen.pop() == ([[7, 3], [3, 4], [3, 4, 5], [7, 7, 6]], starts)
    scorer.padded(4, 1, "wrong")
    assert [len(prompt) for prompt in seen.pop()[0]] == [4] * 4
    widths = {width for width, *_ in paddings(scorer, torch.zeros(4))}
    assert {0, *range(3, 12), 16, 512} <= widths and 2 not in widths
    scorer.prompted("last", lambda prompt, _: prompt[:-2])       # never empty: the last one stays
    assert seen.pop()[0] == [[3], [4], [3], [6]]


def test_a_model_may_have_several_end_tokens_or_none(drawn):
    [row] = [row for row in TABLE if row.name == "prompt with token {} before it"]
    for ends, expected in (([1, 2], {5}), (None, {5}), (4, {4, 5})):
        config = SimpleNamespace(bos_token_id=5, eos_token_id=ends)
        assert set(row.values(SimpleNamespace(config=config), None)) == expected


@pytest.mark.parametrize("name, x, expected", [
    ("top-p {:.3g}", 0.5, (1, 2)), ("min-p {:.3g}", 0.61, (1, 2)), ("top-k {}", 1, (1, 1))])
def test_noise_takes_to_the_edge_of_a_cut_what_is_near_it(name, x, expected):
    """Logits that move by 0.1 may let in the second of three tokens, but not the third."""
    [row] = [row for row in TABLE if row.name == name]
    s = SimpleNamespace(ordered=torch.tensor([[0.5, 0.3, 0.2]]), cut=lambda inside: inside,
                        before=torch.tensor([[0.0, 0.5, 0.8]]))
    assert tuple(int(row.score(s, x)(e).sum()) for e in (0.0, 0.1)) == expected


def test_a_row_that_is_short_enough_is_not_cut():
    [row] = [row for row in TABLE if row.name.startswith("prompt and response cut")]
    s = SimpleNamespace(prompted=lambda _, change: change([1, 2, 3], [4]))
    assert [row.score(s, x) for x in (2, 3, 4, 5)] == [[3], [2, 3], [1, 2, 3], [1, 2, 3]]


def test_fp8_ends_at_448_and_a_scale_is_of_a_row_or_of_all():
    w = torch.tensor([[896.0, 1.0], [2.0 ** -10, 2.0 ** -12]])
    assert to_fp8(w, "fp8").tolist() == [[448.0, 1.0], [0.0, 0.0]]
    assert to_fp8(w, "fp8, a scale per tensor").tolist() == [[896.0, 1.0], [0.0, 0.0]]
    assert torch.equal(to_fp8(w, "fp8, a scale per row"), w)           # the scales are powers of 2


def test_dropout_leaves_the_model_and_the_callers_random_numbers_as_they_were(drawn):
    scorer, before = Scorer(drawn[0], [], [([3, 5], [7])]), torch.get_rng_state()
    scorer.dropped(0.1, draws=2)
    assert not scorer.model.training and torch.equal(before, torch.get_rng_state())


def test_an_engine_is_closed_also_where_it_fails(drawn, monkeypatch):
    closed = []

    def fail(*_, **__):
        raise ZeroDivisionError
    monkeypatch.setattr(
        "three_policies.doctor.rescore.make_engine", lambda *_, **__: SimpleNamespace(
            generate=fail, close=lambda: closed.append(True)))
    with pytest.raises(ZeroDivisionError):
        sample_and_score(drawn[1], "vllm", [[3]])
    assert closed == [True]


def test_a_weight_belongs_to_its_layer_or_module():
    assert module_of("model.layers.10.self_attn.q_proj.weight") == "model.layers.10"
    assert module_of("model.embed_tokens.weight") == "model.embed_tokens"
    assert module_of("lm_head.weight") == "lm_head"


@pytest.mark.made_here
@pytest.mark.parametrize("settings, guilty, cause, value", [
    (dict(temperature=0.7), "none", None, 0.7),
    (dict(top_k=5), "rollout", "cut", 5)])
def test_any_model_and_engine_are_measured_in_one_command(settings, guilty, cause, value, drawn):
    _, path, _, _ = drawn
    rows = sample_and_score(path, "transformers", random_prompts(path), max_tokens=20, **settings)
    assert len(rows) == 32 and all(len(r.token_ids) == 20 == len(r.train_log_probs) for r in rows)
    found = rescore(path, [], rows)
    assert (found.guilty, found.rollout.cause) == (guilty, cause)
    assert found.rollout.parameter == pytest.approx(value, rel=0.01)
