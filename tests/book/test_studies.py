"""The studies ran what was declared, judge it by exact tests, and do in expectation what is said.

What a merge loses is predicted from units in the last place.
"""

import collections
import csv
import dataclasses
import itertools
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from three_policies.book import tables
from three_policies.losses import LossConfig, policy_loss
from three_policies.oracle import (Policy, close, estimator_moments, exact_gradient, grad_J,
                                   rewards, words as world)
from three_policies.presets import RolloutCorrectionConfig
from three_policies.studies import contrasts, merging, study
from three_policies.tests.support.certified import certifies

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------- declarations

@pytest.mark.parametrize("name", ["nine", "sixty-four"])
def test_every_method_is_explained_in_the_appendix(name):
    """A preset explains itself; any other method of a file has a row in the appendix.

    Rounding has a sentence.
    """
    appendix = (ROOT / "math" / "appendix-studies.md").read_text()
    declared = study.declared(name)["methods"]
    table = appendix.split("\n## Names\n")[1].split("\n## ")[0].split("\n")
    rows = {line.split("`")[1] for line in table if line.startswith("| `")}
    assert {method for method in declared if not method.endswith("_again")} <= rows


@pytest.mark.parametrize("name, lines", [
    ("nine", 564), ("sixty-four", 520), ("crossing", 40),
    ("lora", 60), ("lora-rates", 50)])
def test_every_declared_cell_is_a_run_and_every_line_was_declared(name, lines):
    declared, cells = study.declared(name), set()
    for regime, method, seed in study.wanted(declared):
        cells.add((regime, method, seed))
        if seed in (1, 101):
            assert study.config_of(declared, regime, method, seed).seed == seed
    rows = study.read(ROOT / "studies" / name / "results.csv")
    assert {(row["regime"], row["method"], int(row["seed"])) for row in rows} == cells
    assert len(rows) == len(cells) == lines                         # each study was run to its end


@pytest.mark.parametrize("method, crossed, mask, score", [
    ("old_masked", 0.5, [[0, 0, 1, 1], [1, 1, 0, 0]], 0.0),
    ("old_masked", 0.0, [[1, 1, 1, 1], [1, 1, 0, 0]], 0.0),        # the first step has one version
    ("recomputed", 0.5, [[1, 1, 1, 1], [1, 1, 0, 0]], -7.0)])
def test_a_wrong_record_is_planted_in_the_batch_and_nothing_else(method, crossed, mask, score):
    """The engine is left with the end version; a response that ended before it keeps its tokens."""
    Batch = collections.namedtuple("Batch", "response_mask rollout_log_prob")
    batch = Batch(torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(), torch.zeros(2, 4))
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: None), score=-7.0)
    run = SimpleNamespace(
        loaded=SimpleNamespace(engine=SimpleNamespace(model=model)),
        config=SimpleNamespace(rollout=SimpleNamespace(update_every=2, temperature=1.0)))
    unused = dict.fromkeys(("policy_loss", "correct", "train"))
    fake = SimpleNamespace(
        **unused, sample=lambda run, step: (batch, {"response/crossed_fraction": crossed}),
        score=lambda policy, batch, config: torch.full((2, 4), policy.model.score))
    study.plant(method, fake)
    found, _ = fake.sample(run, 3)
    assert found.response_mask.int().tolist() == mask
    assert (found.rollout_log_prob == score).all() and batch.response_mask[0].all()


@pytest.mark.parametrize("empty", [True, False])
def test_a_step_on_nothing_is_adams_on_a_gradient_of_0(empty):
    """The arm `geo_rs_steps_on_nothing` takes it; after one real step momentum moves the weight."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.zero_grad()
    run, before = SimpleNamespace(loaded=SimpleNamespace(
        policy=SimpleNamespace(parameters=lambda: [weight]), optimizer=optimizer)), weight.item()
    fake = SimpleNamespace(policy_loss=None, correct=None, train=None, sample=None,
                           update=lambda run, batch: SimpleNamespace(empty=empty))
    study.plant("geo_rs_steps_on_nothing", fake)
    assert fake.update(run, None).empty == empty
    assert (weight.item() < before) == empty and weight.grad is None


def test_matched_is_six_bits_on_time_in_the_first_study_and_equal_weights_in_the_second():
    first, second = (
        study.declared(name) for name in ("nine", "sixty-four"))
    assert study.config_of(first, "matched", "naive", 1).rollout.quantize == 6
    for regime in second["regimes"]:
        rollout = study.config_of(second, regime, "matched", 101).rollout
        assert (rollout.quantize, rollout.staleness, rollout.dtype) == (None, 0, "float32")


def test_the_second_study_judges_what_it_runs_on_seeds_of_its_own():
    declared = study.declared("sixty-four")
    cells, judged = set(study.wanted(declared)), declared["judged"]
    arms = {arm for contrast in judged["contrasts"] for arm in contrast} - {"best"}
    assert {(r, a, s) for r in judged["regimes"] for a in arms for s in judged["seeds"]} <= cells
    assert len(judged["regimes"]) * len(judged["contrasts"]) == 18 and len(judged["seeds"]) == 10
    assert min(seed for _, _, seed in cells) > 100 > max(declared["quick"]["seeds"])


def test_the_second_family_is_of_other_contrasts_and_all_of_them_are_among_the_cells():
    declared = study.declared("sixty-four")
    cells, seeds = set(study.wanted(declared)), declared["judged"]["seeds"]
    first, later = ([(regime, one, other) for part in family for regime in part["regimes"]
                     for one, other in part["contrasts"]]
                    for family in ([declared["judged"]], declared["judged_later"]))
    assert len(later) == 23 and not set(first) & set(later)
    assert {(regime, arm, seed)
            for regime, *arms in later for arm in arms for seed in seeds} <= cells


def test_the_area_is_by_trapezoids_and_a_table_keeps_its_columns(tmp_path):
    assert (study.area([0.0, 1.0, 0.0]) == 0.5 and study.area([0.3, 0.5]) == 0.4
            and study.area([0.7]) == 0.7)
    old = [{"seed": "1", "final_accuracy": "0.5"}]
    study.write(tmp_path / "x.csv", [*old, {"seed": 2, "final_accuracy": 0.6, "area": 0.4}])
    assert study.read(tmp_path / "x.csv") == [*old, {"seed": "2", "final_accuracy": "0.6"}]


def test_a_line_of_a_study_is_its_runs_metrics():
    """Means over steps, medians of χ², crossings of means of five; step 1 is before any update."""
    lines = [{"step": i, "reward/mean": 0.6 if i < 3 else 0.8 if i < 9 else 0.5,
              "grad_norm": 1.0 + (i > 4) * 2, "response/tokens": 10,
              "loss/clip_fraction": 0.1 * (i == 2), "train/empty_updates": 1,
              **({"eval/accuracy": {1: 0.7, 5: 0.8, 10: 0.5}[i]} if i in (1, 5, 10) else {}),
              **{f"rollout_corr/{name}": x for name, x in (
                  ("chi2_seq", 7.0 if i > 4 else -0.1), ("chi2_token", 9.0 if i == 1 else 1.0),
                  ("k3_kl", 0.05 if i > 5 else 0.0), ("rollout_rs_masked_fraction", 0.25),
                  ("rollout_is_eff_sample_size", 0.75))}} for i in range(1, 11)]
    assert study.summary(lines) == {
        "final_accuracy": "0.5", "best_accuracy": "0.8", "first_accuracy": "0.7",
        "steps_to_0.8": 5, "max_grad_norm": "3", "ess_raw": "0.475", "ess_applied": "0.75",
        "k3": "0.025", "chi2_seq": "7", "kept": "0.75", "drop_step": 10, "warned_ess": 7,
        "warned_k3": 8, "warned_grad_norm": 7, "first_reward": "0.6", "last_reward": "0.68",
        "tokens": 100, "area": "0.65",
        "curve": "0.8000 0.5000", "chi2_token": "1", "clip_fraction": "0.01", "empty_updates": 10}


def test_the_shares_beyond_the_clip_are_those_of_the_first_update():
    """π_θ/μ is 0.7, 1.3 and 1 in the first update, and 2 in the next, which changes nothing."""
    fake = SimpleNamespace(policy_loss=lambda *_: "loss")
    found, mask = study.watch(fake), torch.tensor([[True, True, True, True, False]])
    a, mu = torch.tensor([[1.0, -1, 1, -1, 1]]), torch.zeros(1, 5)
    for ratio in ([0.7, 0.7, 1.3, 1.0, 1.3], [2.0] * 5):
        assert fake.policy_loss(torch.tensor([ratio]).log(), None, mu, a, mask) == "loss"
    assert found == {"below_negative": "0.25", "below_positive": "0.25", "above_negative": "0",
                     "above_positive": "0.25"}


@pytest.mark.parametrize("method, weights", [
    ("prefix_is", [1.5, 2.0, 0.9]), ("mixture_is", [(1.5 + 4) / 2, (2 + 4) / 2, (0.3 + 4) / 2])])
def test_a_planted_weight_is_the_products_or_the_mean_capped_at_2(method, weights):
    def of(*numbers):
        return torch.tensor([numbers], dtype=torch.float64)
    found = dataclasses.make_dataclass("Found", ["weights"])(of(4, 4, 4, 0))
    fake = SimpleNamespace(policy_loss=None, train=None, sample=None, correct=lambda *_: found)
    study.plant(method, fake)
    old = of(1.5, 2.0 if method == "prefix_is" else 2.5, 0.3, 9.0).log()
    mask = torch.tensor([[True, True, True, False]])
    assert fake.correct(old, 0 * old, mask).weights.tolist() == [
        pytest.approx([*weights, 0.0], rel=1e-12)]


def cells(arm, areas, final=0.5):
    """Return lines of studies/sixty-four/results.csv: an area for each seed from 101."""
    return {arm: {101 + i: {"area": str(a), "final_accuracy": str(final)}
                  for i, a in enumerate(areas)}}


def verdicts(tables, monkeypatch, arms):
    monkeypatch.setattr(tables, "runs", lambda name: {"int4_fast": arms})
    rows = [[x.strip() for x in line.split("|")[1:-1]]
            for line in tables.TABLES["study-64-contrasts"]().split("\n")[2:]]
    return {(row[0].strip("`"), row[1]): row[2:] for row in rows}


def test_a_contrast_has_a_verdict_when_all_its_seeds_are_there_and_is_adjusted_for_all_eighteen(
        monkeypatch):
    low, high = ([0.1 + 0.01 * i for i in range(10)],
                         [0.3 + 0.02 * i for i in range(10)])
    token, naive = "`decoupled_token_is` − `naive`", cells("naive", low)
    found = verdicts(tables, monkeypatch, naive | cells("decoupled_token_is", high, final=0.0))
    assert len(found) == 18 and found["int4_fast", token] == [
        "10", "+0.245 ± 0.022", "10 : 0", "0.0020", f"{18 * 2 / 1024:.3f}", "separable"]
    assert (found["int4_fast", "`matched` − `decoupled_token_is`"][-1]
            == found["int4_slow", token][-1] == "not run")
    found = verdicts(tables, monkeypatch, naive | cells("decoupled_token_is", high[:9]))
    assert (found["int4_fast", token][0] == "9"
            and found["int4_fast", token][3:] == [""] * 2 + ["not run to the end"])
    found = verdicts(tables, monkeypatch, naive | cells("decoupled_token_is", low[::-1]))
    assert found["int4_fast", token][-1] == "not separable"


def test_the_quick_picture_is_drawn_of_what_was_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def run_all(declared, path, workers):
        asked.extend(study.wanted(declared))
        study.write(path, [{"method": method, "curve": "0.1 0.2 0.3"} for _, method, _ in asked])
    monkeypatch.setattr(study, "run_all", run_all)
    study.quick(1)
    assert len(asked) == 3 and (tmp_path / "runs/quick.png").stat().st_size > 1000


# ------------------------------------------------------------------- brackets in the oracle's world

@pytest.mark.parametrize("name", [
    "naive", "decoupled_token_is", "decoupled_seq_is", "token_is_opsm", "bypass_ppo_clip",
    "bypass_low_open", "bypass_high_open", "bypass_open", "bypass_pg_is"])
def test_what_an_arm_does_in_expectation_is_the_oracles(name):
    """All strings in one call, by the homogeneity of the loss, agree with the oracle one by one."""
    config, clip = world.arm(name)
    pi = world.Words(1)
    mu = pi.moved(0.8 * world.damage(1))
    mean, deviation = world.expected(config, pi, pi, mu, **clip)
    advantages = (pi.reward - mu.probs().detach() @ pi.reward)[:, None].expand(-1, world.LENGTH)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
    slow = estimator_moments(pi, mu, lambda i: policy_loss(
        lp[i], lp[i], mu_lp[i], advantages[i], pi.mask[i], config,
        LossConfig(aggregation="seq-mean-token-sum", **clip))[0])
    assert close(mean[0], -slow.mean) and close(deviation[0] ** 2, slow.variance)
    assert close(world.true_gradient(pi)[0], grad_J(pi, pi.reward[:, None]))
    assert pi.reward.sum() == 13


def test_with_the_clip_open_bypass_is_exact_and_its_ends_are_where_they_are_said_to_be():
    error, reversed_at = 0.025, 1 - (1 - 0.025) / 1.2
    for of_mu in (0.0126, 0.05, 0.2, 0.5):           # above half of π's: a cap of 2 does not bind
        assert all(close(world.push(name, error, of_mu), 1.0)
                   for name in ("bypass_open", "decoupled_token_is"))
    assert close(world.push("bypass_ppo_clip", error, error / 0.8 - 1e-6), 1.0)
    # Wrong is never blamed, right still earns.
    for of_mu in (error / 0.8 + 1e-6, 0.1, reversed_at - 1e-6):
        assert close(world.push("bypass_ppo_clip", error, of_mu), of_mu)
    assert world.push("bypass_ppo_clip", error, reversed_at + 1e-6) < -0.3


@certifies("float64")
@pytest.mark.parametrize("arm, clip", [
    ("bypass_ppo_clip", {}), ("bypass_ppo_clip", {"clip_low": 0.1, "clip_high": 0.28}),
    ("bypass_low_open", {}), ("bypass_high_open", {}), ("bypass_open", {})])
def test_one_expected_update_at_one_place_is_a_sum_of_three_terms(arm, clip):
    """eq:clip-one-place: the loss's expected gradient is the formula, with its three values.

    π takes the wrong token with probability p, μ with m; q is the chance that the rest is right.
    """
    low, high = (({"clip_low": 0.2, "clip_high": 0.2} | world.arm(arm)[1] | clip)[end]
                 for end in ("clip_low", "clip_high"))
    ranges = set()
    for p, m, q in itertools.product((0.01, 0.025, 0.09), (0.005, 0.03, 0.12, 0.25, 0.45),
                                     (0.1, 0.5, 0.8)):
        wrong, right = p / m >= 1 - low, (1 - p) / (1 - m) <= 1 + high
        found = world.push(arm, p, m, q, **clip)
        terms = (wrong * (1 - m), right * (1 - q * (1 - m)), -(1 - q) * (1 - m))
        assert abs(found - sum(terms)) < 1e-12
        if wrong or right:
            value = 1 if wrong and right else m if right else q * (1 - m)
            assert abs(found - value) < 1e-12
        ranges.add((wrong, right))
    expected = {"bypass_ppo_clip": {(True, True), (False, True), (False, False)},
                "bypass_low_open": {(True, True), (True, False)},
                "bypass_high_open": {(True, True), (False, True)}, "bypass_open": {(True, True)}}
    assert ranges == expected[arm]


@certifies("float64")
@pytest.mark.parametrize("end, sign", [("clip_low", -1.0), ("clip_high", 1.0)])
def test_each_end_of_a_clip_around_the_sampler_pulls_towards_it(end, sign):
    """eq:clip-pull: what an end adds has the formula's product with log μ − log π in every state.

    It is positive; for the upper end in the states with KL(π‖μ) < log 1.2.
    """
    config = RolloutCorrectionConfig.bypass_ppo_clip()
    for seed in range(20):
        pi = Policy(4, 3, seed)
        mu = pi.perturbed(seed + 50, 0.3)
        lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
        # The weights give A one sign.
        weights = (sign * mu.probs().detach()[:, None].expand_as(lp)
                   * (1 + rewards(pi, seed).abs()))
        both_open = {"clip_low": 1.0, "clip_high": 1e9}
        ascent = [
            -exact_gradient(pi, policy_loss(
                lp, lp.detach(), mu_lp, weights, pi.mask, config,
                LossConfig(aggregation="seq-mean-token-sum", **(both_open | closed)))[0]
            ).reshape(-1, 4)
            for closed in ({}, {end: 0.2})]
        towards = (mu.step_log_probs() - pi.step_log_probs()).detach()
        divergence = -(pi.step_log_probs().exp() * towards).sum(-1)      # KL(π‖μ) of each state
        pull = ((ascent[1] - ascent[0]) * towards).sum(-1)
        ratio = (-towards).exp()                                         # π/μ of each token
        dropped = ratio < 0.8 if end == "clip_low" else ratio > 1.2
        visits = torch.zeros_like(ratio).index_put(                      # of h and v, times |A|
            (pi.states[pi.mask], pi.tokens[pi.mask]), weights[pi.mask].abs(), accumulate=True)
        terms = -sign * visits * ratio * dropped * (towards + divergence[:, None])
        assert close(pull, terms.sum(-1) / len(lp))
        near = divergence < (math.inf if end == "clip_low" else math.log(1.2))
        assert (pull[near] > -1e-12).all() and (pull[near] > 1e-6).any()


def test_sign_flips_by_hand_and_by_counting_in_another_way():
    assert contrasts.sign_flip([0.2, 0.1, 0.3]) == 2 / 8           # all of one sign: ± all
    assert contrasts.sign_flip([3.0, -1.0]) == 1                   # |2| ≤ |±3 ± 1|: all four
    assert contrasts.sign_flip([0.3] * 10) == 2 / 1024
    assert contrasts.sign_flip([0.1, 0.2, -0.2]) == 1              # 0.1, rounded in another order
    rng = random.Random(0)
    values = [rng.randrange(-9, 10) for _ in range(10)]
    ways = {0: 1}                                                  # sum → number of signs for it
    for v in values:
        steps = [(s + e * v, n) for s, n in ways.items() for e in (1, -1)]
        ways = {s: sum(n for t, n in steps if t == s) for s, _ in steps}
    beyond = sum(n for s, n in ways.items() if abs(s) >= abs(sum(values)))
    assert contrasts.sign_flip(list(map(float, values))) == beyond / 1024


def test_holm_on_the_worked_example():
    """0.01, 0.04, 0.03, 0.005 are sorted, multiplied by 4, 3, 2, 1, and never fall."""
    found = contrasts.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert contrasts.holm({"a": 0.01, "b": 0.4}, family=5) == pytest.approx({"a": 0.05, "b": 1.0})


def test_mcnemar_is_the_tails_of_a_fair_coin():
    for n in range(13):
        for more in range(n + 1):
            one, other = ([True] * more + [False] * (n - more) + [True],
                          [False] * more + [True] * (n - more) + [True])
            as_far = sum(abs(sum(x) - n / 2) >= abs(more - n / 2)
                         for x in itertools.product((0, 1), repeat=n))
            assert contrasts.mcnemar(one, other) == pytest.approx(as_far / 2 ** n)
    assert contrasts.mcnemar([True] * 10, [False] * 10) == 2 / 1024


CHAPTER = "".join((ROOT / "math" / f"{name}.md").read_text()
                  for name in ("1-three-policies", "appendix-studies"))


def test_a_unit_is_the_distance_to_the_next_number_of_bfloat16():
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    above = (w.view(torch.int16) + 1).view(torch.bfloat16)         # away from 0
    assert torch.equal(merging.unit(w.float()), (above.double() - w.double()).abs())
    assert merging.unit(torch.tensor([0.0])).item() == 0


def test_an_entry_is_lost_within_half_a_unit_and_towards_zero_from_a_power_of_two_a_quarter():
    """All numbers of three binades, on either side of each limit; the rule takes u/2 everywhere."""
    w = torch.arange(0x3C80, 0x3E00, dtype=torch.int16).view(torch.bfloat16)       # 2⁻⁶ to 2⁻³
    power, u = torch.frexp(w.float()).mantissa == 0.5, merging.unit(w.float())
    assert power.sum() == 3 and len(w) == 3 * 128
    for sign in (1, -1):
        limit = torch.where(power & (sign < 0), u / 4, u / 2)
        for within, share in ((True, 0.99), (False, 1.01)):
            lost = (w.double() + sign * share * limit).float().bfloat16() == w
            assert (lost == within).all(), (sign, share)


@pytest.mark.parametrize("sigma", [1e-6, 1e-4, 1e-3])
def test_at_a_power_of_two_the_rules_share_is_at_most_a_third_too_high(sigma):
    w, u = torch.tensor([[2.0 ** -4]]), 2.0 ** -11
    _, rule, _ = merging.rounding(w, torch.full((1, 1), sigma))
    exact = sum(math.erf(limit / sigma / math.sqrt(2)) for limit in (u / 2, u / 4)) / 2
    assert 0.965 < rule.item() / exact < 1.035 * 4 / 3                  # the histogram's steps


@pytest.mark.parametrize("sigma", [1e-5, 1e-4, 1e-3, 1e-2])
def test_gain_loss_and_noise_are_those_of_roundings(sigma):
    """A million normal updates are rounded by torch; means are within four standard errors.

    The histogram's steps of 3.5 % are added to them.
    """
    n, generator = 4000, torch.Generator().manual_seed(1)
    w = 0.05 * torch.randn(250, 1, generator=generator).bfloat16().float()
    w = w.bfloat16().float()
    delta = sigma * torch.randn(250, n, generator=generator, dtype=torch.float64)
    moved = (w.double() + delta).float().bfloat16().double() - w
    gain, lost, noise = merging.rounding(w, torch.full((250, 1), sigma))
    for predicted, drawn in ((lost, (moved == 0).double()), (gain, moved * delta / sigma ** 2),
                             (noise, (moved - gain * delta) ** 2)):
        error = drawn.std() / math.sqrt(drawn.numel())
        assert abs(predicted.mean() - drawn.mean()) < 4 * error + 0.035 * predicted.mean()


def test_the_declared_prediction_is_judged_as_the_chapter_says():
    declared = yaml.safe_load((ROOT / "studies/merging/declared.yaml").read_text())
    cells, tolerance = merging.cells(), declared["tolerance"]
    for (rank, rate), share in zip(merging.CELLS, declared["first_step_share"].values(),
                                   strict=True):
        assert share == pytest.approx(cells[rank, rate, 1]["share"], rel=tolerance)
    assert list(declared["first_step_share"]) == [f"rank {rank}, rate {rate:g}"
                                                  for rank, rate in merging.CELLS]

    pairs = [("share_predicted", "share"), ("kl_predicted", "kl_merged")]
    said = re.search(r"within (\d+) % of what was measured .*? (\d+) of the 24 shares and (\d+) of "
                     r"the 24 KLs. Relative to the prediction instead it is (\d+) and (\d+),",
                     " ".join(CHAPTER.split()))
    assert said and len(cells) == 24
    assert [100 * tolerance, *(merging.held(*pair, tolerance) for pair in pairs),
            *(merging.held(*reversed(pair), tolerance) for pair in pairs)] == [
        int(x) for x in said.groups()]
    assert all(x["share_predicted"] > x["share"] for x in cells.values())
    worst = max(cells.values(), key=lambda x: x["kl_merged"] / x["kl_kernels"])
    assert f"{worst['kl_merged']:.1e} against {worst['kl_kernels']:.1e}" in CHAPTER
    assert worst["kl_merged"] < worst["kl_kernels"]
    assert f"up to {100 * max(x['share'] for x in cells.values()):.0f} %" in CHAPTER
    grids = [abs(x["kl_merged_bfloat16"] / x["kl_merged"] - 1) for x in cells.values()]
    up = sum(x["kl_merged_bfloat16"] > x["kl_merged"] for x in cells.values())
    said = (f"changed the KL by {100 * sum(grids) / 24:.0f} % on average, up in {up} of 24 cells "
            f"and down in {24 - up}")
    assert said in " ".join(CHAPTER.split())


def test_every_declared_cell_is_a_row_and_no_other():
    with (ROOT / "studies/merging/results.csv").open() as file:
        found = [(int(row["seed"]), int(row["rank"]), float(row["rate"]), int(row["step"]))
                 for row in csv.DictReader(file)]
    assert found == [(seed, *cell, step) for seed in merging.SEEDS for cell in merging.CELLS
                     for step in merging.STEPS]
