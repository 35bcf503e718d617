"""An exhibit is a wrong form that shipped or was proposed, beside the right one.

It returns (wrong, right, exact), which tests/support/exhibits.py judges. Those of chapters 16 to 18
are in test_museum_versions_turns_routes.py. `pytest -s tests/method/test_museum*.py` prints the
catalogue with every error.
"""

import ast
import math
import re
from typing import Any

import pytest
import torch

from three_policies.correction import correct
from three_policies.estimators import effective_sample_size, rloo_advantages, sampling_log_probs
from three_policies.kl import kl_estimate
from three_policies.losses import LossConfig, aggregate_loss, count, kl_loss, policy_loss
from three_policies.metrics import Counted, Statistics
from three_policies.oracle import (Policy, close, estimator_moments, exact_gradient, expectation,
                                   f64, grad_J, kl, rewards, scores, token_kl)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio, exp_ratio
from three_policies.surrogates import ppo_clip_loss, reinforce_loss
from three_policies.tests.support.exhibits import EXHIBITS, exhibit, filed_by, judge, once, values
from three_policies.training.heads import TokenLogProbs

VERL = "https://github.com/verl-project/verl/blob/v0.9.1/"
PI = Policy(3, 3, seed=0)
MU, REF = PI.perturbed(1, 0.5), PI.perturbed(3, 0.7)
MASK, R = PI.mask, rewards(PI)
A, LP = R.expand(-1, 3), PI.log_probs()
MU_LP, REF_LP = MU.log_probs().detach(), REF.log_probs().detach()
LIVE = (LP - MU_LP).exp()                                           # ρ_t with its graph
WHOLE = LIVE.detach().prod(-1, keepdim=True)
SUM, UP = "seq-mean-token-sum", -grad_J(PI, R)
REVERSE, FORWARD = (exact_gradient(PI, token_kl(*pq, PI)) for pq in ((PI, REF), (REF, PI)))
SEQUENCE_IS = Config("sequence", math.inf, bypass_mode=True, loss_type="reinforce")


def mean(per_token, sampler=MU):
    """Return the expected gradient of Σ_t per_token[t] over sequences of the sampler."""
    return estimator_moments(PI, sampler, lambda i: (per_token[i] * MASK[i]).sum()).mean


@once
def ours(config, sampler=MU, batch=1, **options):
    """Return the expected gradient of policy_loss on sequences of the sampler; π_old = π_θ."""
    mu_lp, how = sampler.log_probs().detach(), LossConfig(aggregation=SUM, **options)
    return estimator_moments(PI, sampler, lambda i: policy_loss(
        LP[i], LP[i], mu_lp[i], A[i], MASK[i], config, how)[0], batch).mean


@once
def kl_mean(kind, sampler=PI, ratio=None):
    return estimator_moments(PI, sampler, lambda i: kl_loss(
        LP[i], REF_LP[i], MASK[i], kind, SUM, ratio=None if ratio is None else ratio[i])).mean


def attempt(f):
    """Return what f gives, or NaN when it raises: a crash is an error of any size."""
    try:
        return f()
    except (ArithmeticError, AssertionError, ValueError):
        return math.nan


# ------------------------------------------------------------------------------------------ weights

@exhibit("verl: https://github.com/verl-project/verl/pull/4105", "eq:detached")
def weight_with_its_graph():
    """The weight kept its graph, so the gradient also flowed through π_θ/μ: another objective."""
    return mean(LIVE.cumprod(-1)[:, -1:] * reinforce_loss(LP, A)), ours(SEQUENCE_IS), UP


@exhibit("verl-omni: https://github.com/verl-project/verl-omni/pull/93", "eq:double-count")
def weight_applied_twice():
    """Bypass mode's PPO ratio is π_θ/μ already, and was multiplied by π_θ/μ once more. (T = 1)"""
    pi = Policy(5, 1, seed=4)
    mu, r, lp = pi.perturbed(5, 0.6), rewards(pi), pi.log_probs()
    old = mu.log_probs().detach()
    twice = estimator_moments(pi, mu, lambda i: ((lp - old).exp().detach()[i] * ppo_clip_loss(
        lp[i], old[i], r[i], 1.0, 1e9)).sum()).mean
    config = Config("token", math.inf, bypass_mode=True)
    how = LossConfig(clip_low=1.0, clip_high=1e9)
    once = estimator_moments(pi, mu, lambda i: policy_loss(
        lp[i], old[i], old[i], r[i], pi.mask[i], config, how)[0]).mean
    return twice, once, -grad_J(pi, r)


@exhibit("the usual PPO: https://fengyao.notion.site/off-policy-rl", "eq:decoupled-ppo")
def old_policy_taken_for_the_sampler():
    """The trainer recomputes π_old and takes it for the sampler: there is no weight at all."""
    return mean(reinforce_loss(LP, A)), ours(Config("sequence", math.inf)), UP


@exhibit("unsloth-zoo, found in review: https://github.com/unslothai/unsloth-zoo/pull/870",
         "eq:levels")
def sequence_ratio_as_a_sum_of_exps():
    """Σ_t ρ_t stood for Π_t ρ_t: E_μ of the product is 1, E_μ of the sum is the mean length."""
    right = exp_ratio(aggregate_log_ratio(LP - MU_LP, MASK, "sequence"))[:, 0]
    return expectation(MU, (LIVE * MASK).sum(-1)), expectation(MU, right), 1.0


@exhibit(f"verl, PPOTrainer._compute_old_log_prob: {VERL}verl/trainer/ppo/v1/trainer_base.py",
         "eq:off-policy")
def reinforce_in_name_alone():
    """bypass_mode=True loss_type=reinforce without a loss_mode is PPO, and has no weight.

    verl sets old_log_prob to rollout_log_prob, and its default loss_mode is PPO's clip around
    π_rollout. The expected loss is 0.951 instead of −0.349; the gradient misses ∇J by 95 % of its
    length.
    """
    clip = ppo_clip_loss(LP, MU_LP, A, 0.2, 0.2, dual_clip=3.0)     # verl's clip_ratio, _c
    losses = torch.stack([policy_loss(
        LP[[i]], None, MU_LP[[i]], A[[i]], MASK[[i]], SEQUENCE_IS, LossConfig(aggregation=SUM))[0]
        for i in range(len(A))])
    wrong = torch.stack([expectation(MU, (clip * MASK).sum(-1)), *mean(clip)])
    right = torch.stack([expectation(MU, losses), *ours(SEQUENCE_IS)])
    exact = torch.stack([-expectation(PI, (A * LP * MASK).sum(-1)), *UP])     # E_μ[w L] = E_π[L]
    miss = (mean(clip) - UP).norm() / UP.norm()
    assert [round(x.item(), 3) for x in (wrong[0], right[0], miss)] == [0.951, -0.349, 0.955]
    return wrong, right, exact


@exhibit("verl's document calls truncated Seq-TIS unbiased: "
         f"{VERL}docs/algo/rollout_corr_math.md", "eq:tis")
def truncated_called_unbiased():
    """Truncation has the bias −E_μ[(ρ−C)₊ g], here at C = 1; only without a cap is it unbiased."""
    return ours(Config("sequence", 1.0)), ours(Config("sequence", math.inf)), UP


@exhibit("verl's document prints Geo-RS-Token-TIS with Π min(ρ_t, C): "
         f"{VERL}docs/algo/rollout_corr_math.md", "eq:levels")
def product_of_truncated_token_weights():
    """Token weights were multiplied over the response; each token has a weight of its own."""
    exact = LIVE.detach().clamp(max=1.2) * MASK
    return (exact.where(MASK, 1.0).prod(-1, keepdim=True) * MASK,
            correct(LP, MU_LP, MASK, Config.decoupled_geo_rs_token_tis(1.2)).weights, exact)


@exhibit("verl's preset bypass_ppo_clip over rounded rollouts: "
         f"{VERL}docs/algo/rollout_corr_math.md", "eq:bypass")
def clip_around_a_damaged_sampler():
    """A clip around a rounded μ reverses the sign of the gradient. (T = 1)

    π errs by 0.025, μ by 0.2. The clip drops the wrong token where A < 0 and the right one where
    A > 0. What is left blames the right token for what fails later.
    """
    pi, mu = Policy(3, 1), Policy(3, 1)      # tokens: wrong; all right; right, the rest not
    pi.logits = f64([[0.025, 0.4875, 0.4875]]).log().requires_grad_()
    mu.logits = f64([[0.2, 0.4, 0.4]]).log()
    r, lp, mu_lp = f64([[0.0], [1.0], [0.0]]), pi.log_probs(), mu.log_probs()
    a = r - expectation(mu, r)
    def step(config):
        return estimator_moments(pi, mu, lambda i: policy_loss(
            lp[i], lp[i], mu_lp[i], a[i], pi.mask[i], config)[0]).mean
    return step(Config.bypass_ppo_clip()), step(Config("token", math.inf)), -grad_J(pi, r)


# ---------------------------------------------------------------------------------------- rejection

@exhibit("verl 0.9.1: https://github.com/verl-project/verl/pull/6377", "eq:rejection")
def k1_bounds_on_minus_log_rho():
    """log 0.6 and log 1.4 were compared with −log ρ: ρ = 0.65 goes and ρ = 1.6 stays."""
    rho, lo, hi = f64([[0.65, 1.6, 1.0]]), 0.6, 1.4
    k1 = -rho.log()
    config = Config(rollout_rs={"token_k1": (lo, hi)})
    right = correct(rho.log(), 0 * rho, torch.ones(1, 3), config).mask
    return ((k1 >= math.log(lo)) & (k1 <= math.log(hi))).double(), right, (rho >= lo) & (rho <= hi)


@exhibit("verl: https://github.com/verl-project/verl/pull/3984, "
         "https://github.com/verl-project/verl/issues/5859",
         "eq:rejection")
def nothing_survives_and_the_mean_is_0_over_0():
    """A batch that was all rejected gave AssertionError, RuntimeError or 0/0; its loss is 0."""
    config = Config(rollout_rs={"token_k1": (1e6, None)})
    right = policy_loss(LP, LP, MU_LP, A, MASK, config, LossConfig(denominator="kept"))[0]
    kept = correct(LP, MU_LP, MASK, config).mask
    return (reinforce_loss(LP, A) * kept).sum() / kept.sum(), right, 0.0


@exhibit(f"verl: {VERL}verl/trainer/ppo/rollout_corr_helper.py", "eq:ess")
def effective_sample_size_of_no_weight():
    """IcePop set every weight to zero, so that 1/mean((w/mean w)²) divided by zero."""
    w = [0.0, 0.0]
    return (attempt(lambda: 1 / (sum((x / (sum(w) / 2)) ** 2 for x in w) / 2)),
            effective_sample_size(f64(w), torch.ones(2)), 0.0)


@exhibit("SkyRL: https://github.com/NovaSky-AI/SkyRL/pull/1264", "eq:rejection")
def masks_one_after_another():
    """The geometric mean was taken over what the token mask left: the order of masks decided."""
    rho, one = f64([[1.0, 1.0, 9.0]]), torch.ones(1, 3)
    first = ((rho >= 0.5) & (rho <= 2)).double()
    geometric = ((rho.log() * first).sum() / first.sum()).exp()     # 1: the outlier is gone already
    config = Config(rollout_rs={"token_k1": (0.5, 2.0), "seq_mean_k1": (0.9, 1.1)})
    right = correct(rho.log(), 0 * rho, one, config).mask
    return first * ((geometric >= 0.9) & (geometric <= 1.1)), right, 0 * rho


@exhibit("verl: https://github.com/verl-project/verl/pull/3915; "
         "slime: https://github.com/THUDM/slime/pull/657",
         "eq:aggregation")
def denominator_shrinks_with_rejection():
    """Dividing by what is kept makes the step longer, the more is rejected. (pairs of sequences)"""
    inside = ((WHOLE >= 0.7) & (WHOLE <= 1.6)).double()
    config = Config(rollout_rs={"seq_sum_k1": (0.7, 1.6)})
    exact = -expectation(MU, (scores(PI) * (inside * A)[..., None]).sum(1))
    return ours(config, batch=2, denominator="kept"), ours(config, batch=2), exact


@exhibit("verl: https://github.com/verl-project/verl/pull/6375", "eq:baseline")
def rejected_rows_in_the_baseline():
    """A rejected reward of 100 turned the advantage 1.0 into −49.5."""
    r, keep = f64([1.0, 100.0]), torch.tensor([True, False])
    return (r - r.mean())[keep], rloo_advantages(r, torch.zeros(2), keep)[keep], [1.0]


# -------------------------------------------------------------------------- aggregation and metrics

VALUES = f64([[1.0, 2.0, 3.0, 4.0], [9.0, 0.0, 0.0, 0.0]])
ROWS = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
SPREAD = f64([1, 2, 3, 4, 9]).std(correction=0).item()


@exhibit("verl: https://github.com/verl-project/verl/issues/5625", "eq:aggregation")
def mean_of_micro_batch_means():
    """Each micro-batch was divided by its own token count: the split decided a token's weight."""
    parts = [aggregate_loss(VALUES[i], ROWS[i], "token-mean", counts=count(ROWS))
             for i in ([0], [1])]
    return (VALUES.sum(-1) / ROWS.sum(-1)).mean(), sum(parts), 19 / 5


@exhibit(f"verl's bypass mode, AggregationType.MEAN: {VERL}verl/workers/utils/losses.py",
         "eq:merge")
def mean_of_the_parts_deviations():
    """Metrics were averaged over micro-batches, but a mean of deviations is not the deviation."""
    first, second = (Statistics.of([(Counted.of(ROWS[i]).moments(VALUES[i]), {"std": "std"})])
                     for i in ([0], [1]))
    std = torch.stack([*first.metrics().values(), *second.metrics().values()]).mean()
    return std, first.merge([second]).metrics()["rollout_corr/std"], SPREAD


@exhibit("SkyRL: https://github.com/NovaSky-AI/SkyRL/pull/849", "eq:merge")
def minimum_and_deviation_over_padding():
    """The zeros of the padding became the minimum, and counted in the standard deviation."""
    statistics = Statistics.of([(Counted.of(ROWS).moments(VALUES), {"min": "min", "std": "std"})])
    padded = torch.stack([VALUES.min(), VALUES.std(correction=0)])
    return padded, torch.stack([*statistics.metrics().values()]), [1.0, SPREAD]


@exhibit("verl 0.9.1's rollout_corr_helper.py; what else was taken of truncated weights: "
         "TRL's minimum, mean and maximum: https://github.com/huggingface/trl/issues/5231; "
         "verl's share above the cap, always 0: https://github.com/verl-project/verl/pull/6806",
         "eq:ess")
def sample_size_of_the_truncated_weights():
    """ESS was computed from min(ρ, 2), which looks healthy; the degeneracy is in ρ."""
    rho, one = f64([[0.5], [0.8], [1.0], [12.0]]), torch.ones(4, 1)
    metrics = correct(rho.log(), 0 * rho, one, Config.decoupled_token_is(2.0)).metrics
    raw = metrics["rollout_corr/rollout_is_raw_eff_sample_size"]
    exact = 14.3 ** 2 / (4 * (0.25 + 0.64 + 1 + 144))
    return effective_sample_size(rho.clamp(max=2.0), one), raw, exact


@exhibit("verl: https://github.com/verl-project/verl/pull/4070", "eq:bypass")
def mismatch_measured_against_itself():
    """Bypass mode copies μ to π_old, and the copy was compared with μ: the mismatch is always 0."""
    one = torch.ones_like(MU_LP)
    wrong = correct(MU_LP, MU_LP, one, Config()).metrics["rollout_corr/kl"]
    right = policy_loss(LP, MU_LP, MU_LP, A, MASK, Config(bypass_mode=True))[1]["rollout_corr/kl"]
    return wrong, right, (MU_LP - LP)[MASK].mean()


@exhibit("verl: https://github.com/verl-project/verl/pull/6349", "eq:ratio")
def nan_times_zero():
    """A mask that multiplies removes neither NaN nor the exp of a large number: ∞ × 0 is NaN."""
    junk = torch.where(MASK, LP.detach(), math.nan)
    right = policy_loss(junk, junk, torch.where(MASK, MU_LP, -math.inf), A, MASK, Config())[0]
    return ((-A * (junk - junk).exp()) * MASK).sum() / MASK.sum(), right, -A[MASK].mean()


# ------------------------------------------------------------------------ the sampling distribution

LOGITS = f64([2.0, 1.0, 0.0, -1.0])


@exhibit("TRL: https://github.com/huggingface/trl/issues/4159; "
         "verl: https://github.com/verl-project/verl/pull/4755",
         "eq:sampling")
def log_probs_at_another_temperature():
    """Tokens were sampled at τ = 0.6 and scored at τ = 1: equal models differ in log-probs."""
    sampled, scored = (LOGITS / 0.6).log_softmax(-1), LOGITS.log_softmax(-1)
    return scored - sampled, sampling_log_probs(LOGITS, 0.6)[0] - sampled, 0 * LOGITS


@exhibit("TRL: https://github.com/huggingface/trl/issues/6789", "eq:sampling")
def surviving_mass_left_out():
    """Tokens were sampled with top-p and scored without: every ratio is off by the kept mass."""
    kept = LOGITS.log_softmax(-1)[:2]                               # top-p 0.8 keeps two of four
    sampled = kept - kept.logsumexp(-1)
    right = sampling_log_probs(LOGITS, top_p=0.8)[0][:2]
    return (kept - sampled).exp(), (right - sampled).exp(), [1.0, 1.0]


# ----------------------------------------------------------------------------------------------- KL

@exhibit("GRPO's KL term; "
         "verl before https://github.com/verl-project/verl/pull/2953",
         "eq:kl-gradient")
def k3_as_a_loss():
    """k3 as a loss has the value of KL(π‖ref), but the gradient of KL(ref‖π)."""
    assert close(kl_mean("k3"), FORWARD)
    return kl_mean("k3"), kl_mean("k3+"), REVERSE


@exhibit("OpenRLHF: https://github.com/OpenRLHF/OpenRLHF/pull/1309", "eq:kl-gradient")
def k1_as_a_loss():
    """k1 as a loss has an unbiased value, but a gradient of mean zero: noise and no penalty."""
    assert close(kl_mean("k1"), 0 * REVERSE)
    return kl_mean("k1"), kl_mean("k1+"), REVERSE


@exhibit("slime: https://github.com/THUDM/slime/pull/1004, "
         "its author: https://github.com/THUDM/slime/pull/1039",
         "eq:kl-ratio")
def ratio_times_k2_not_detached():
    """The ratio in ratio·k2 must be detached; with its graph the coefficient is ℓ + ℓ²/2.

    The ratio in ratio·k3 needs its graph.
    """
    exact = exact_gradient(PI, token_kl(PI, REF, MU))
    assert close(kl_mean("k3", MU, LIVE), exact)
    return kl_mean("k2", MU, LIVE), kl_mean("k2", MU, LIVE.detach()), exact


@exhibit("off-policy KL without a ratio; "
         "OpenRLHF: https://github.com/OpenRLHF/OpenRLHF/pull/1309",
         "eq:kl-ratio")
def k2_off_policy_without_a_ratio():
    """k2 has the right gradient on-policy, and a biased one as soon as μ is the sampler."""
    exact = exact_gradient(PI, token_kl(PI, REF, MU))
    return kl_mean("k2", MU), kl_mean("k2", MU, LIVE.detach()), exact


@exhibit(f"verl's low_var_kl, clamp(kl, −10, 10): {VERL}verl/trainer/ppo/core_algos.py",
         "eq:kl-estimators")
def k3_clamped_at_ten():
    """Large values of k3 are rare, but carry its mean: E_π[min(k3, 10)] is no KL."""
    pi = Policy(3, 3, seed=0, scale=2.0)
    ref = pi.perturbed(5, 4.0)
    k3 = kl_estimate(pi.log_probs(), ref.log_probs(), "k3") * pi.mask
    return expectation(pi, k3.clamp(-10, 10).sum(-1)), expectation(pi, k3.sum(-1)), kl(pi, ref)


@exhibit("k3 in the reward; see https://arxiv.org/abs/2512.21852", "eq:kl-gradient")
def k3_in_the_reward():
    """Σk3 as a cost in the reward misses the gradient of KL(π‖ref); Σk1 has it exactly."""
    k3, k1 = ((kl_estimate(LP, REF_LP, kind).detach() * MASK).sum(-1, keepdim=True)
              for kind in ("k3", "k1"))
    return mean(LP * k3, PI), mean(LP * k1, PI), exact_gradient(PI, kl(PI, REF))


def slopes(logits):
    """Return ∂ log π(0)/∂z of each row, [..., V]."""
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(sampling_log_probs(logits)[0][..., 0].sum(), logits)[0]


@exhibit("log_softmax of float32 logits: "
         "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.log_softmax.html",
         "eq:sampling")
def certain_token_without_a_gradient():
    """Beyond a margin of 16.64 float32 rounds π to 1, so that the slope 1 − π of log π is 0.

    The margin is log 2²⁴. The other tokens keep theirs; the numbers are in units of e^(−margin).
    """
    margin = torch.tensor([16.7, 20.0])
    logits, unit = torch.stack([margin, 0 * margin], -1), (-margin.double()).exp()
    return (slopes(logits)[:, 0] / unit, -slopes(logits.double())[:, 1] / unit,
            1 / (1 + unit))


def test_the_margin_at_which_float32_loses_the_slope():
    """eq:sampling: 24 log 2 = 16.64 for a softmax; for the trainer's head 13.8 to 15.1.

    The head adds log Σ e^z to no maximum: its last bit is that of the logit, here of 4 to 25.
    """
    margin = torch.arange(10.0, 30.0, 0.01)
    logits = torch.stack([margin, 0 * margin], -1)
    assert margin[slopes(logits)[:, 0] > 0].max().item() == pytest.approx(24 * math.log(2), abs=0.1)
    for lower in (-10.0, 0.0, 10.0):
        hidden = (logits + lower).requires_grad_()
        of_first = TokenLogProbs.apply(hidden, torch.eye(2), None,
                                       torch.zeros(len(margin), 1, dtype=torch.long), 1.0, None)
        kept, = torch.autograd.grad(of_first.sum(), hidden)
        assert 13.5 < margin[kept[:, 0] > 0].max() < 15.4


@pytest.mark.parametrize("name", filed_by(__name__))
def test_exhibit(name):
    judge(name)


def test_the_museum_is_large_enough():
    assert len(EXHIBITS) >= 15 and all(function.__doc__ for function, _, _ in EXHIBITS.values())


def share(wrong, exact):
    """Return the largest difference over the largest right number."""
    off = [abs(x - y) for x, y in zip(wrong, exact, strict=True)]
    if any(map(math.isnan, off)):
        return math.nan
    largest = max(map(abs, exact))
    return max(off) / largest if largest else math.inf


def test_an_exhibit_says_the_share_of_the_largest_right_number():
    """It is infinite where the right number is 0, and NaN for a crash."""
    from three_policies.book import museum
    found = {shown.name: shown.error for shown in museum.exhibits()}
    assert list(found) == list(EXHIBITS)
    for name in EXHIBITS:
        wrong, _, exact = (x.flatten().tolist() for x in values(name))
        assert found[name] == pytest.approx(share(wrong, exact), abs=2e-9, nan_ok=True), name
    assert math.isinf(found["masks_one_after_another"]) and math.isnan(found["nan_times_zero"])
    small = found["old_policy_taken_for_the_sampler"]
    assert small == pytest.approx(0.841891, abs=1e-6), "its largest right number is below 0.1"


def test_an_exhibit_has_a_wrong_code_a_right_one_and_an_address():
    from three_policies.book import museum
    for shown in museum.exhibits():
        assert shown.wrong.strip() and shown.right.strip(), shown.name
        assert shown.wrong != shown.right, shown.name
        assert re.search(r"https://[\w.-]+/\S", shown.where), f"{shown.name}: {shown.where}"


def test_the_code_of_an_exhibit_computes_its_numbers():
    """It needs nothing else than what its file has for all exhibits."""
    from three_policies.book import museum
    for shown in museum.exhibits():
        function = EXHIBITS[shown.name][0]
        for code, value in zip((shown.wrong, shown.right), values(shown.name)):
            parsed: Any = ast.parse(f"{shown.shared}\n{code}")
            *lines, last = parsed.body
            names = dict(function.__globals__)
            exec(compile(ast.Module(lines, []), shown.name, "exec"), names)
            found = eval(compile(ast.Expression(last.value), shown.name, "eval"), names)
            torch.testing.assert_close(
                torch.as_tensor(found, dtype=torch.float64).detach(), value,
                equal_nan=True, msg=f"{shown.name} does not do this: {code}")
