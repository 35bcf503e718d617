"""doctor: `diagnose` says what is wrong in metrics, and is silent about what is not.

What a whole run says is tested in test_run_summary.py.
"""

import math

import pytest
import torch

from three_policies.correction import correct
from three_policies.doctor.health import DUMP, HEALTHY, NO_LESSON, diagnose
from three_policies.estimators import sampling_log_probs
from three_policies.losses import policy_loss
from three_policies.metrics import offpolicy_metrics, to_host
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.tests.support.certified import certifies


def test_diagnose_is_silent_when_nothing_is_wrong_and_names_metric_and_knob_otherwise():
    x = torch.full((2, 3), -1.0)
    assert diagnose(correct(x, x, x.bool(), Config.decoupled_token_is()).metrics) == []
    assert diagnose({}) == []
    for name, low, high, _, remedy in HEALTHY:
        for value in (low - 1.5, high + 1.5):               # neither severe
            sentence, = diagnose({f"rollout_corr/{name}": value})
            assert sentence.startswith(name) and remedy in sentence and sentence.endswith(".")
        highest = torch.tensor(high, dtype=torch.float64)
        assert diagnose({name: low}) == diagnose({name: highest}) == []
    assert "not finite" in diagnose({"rollout_corr/kl": math.nan})[0]
    assert len(diagnose({"kl": math.nan, "k3_kl": math.nan})) == 2          # each once
    assert "far apart" not in " ".join(diagnose({"k3_kl": math.nan}))       # nobody knows


@pytest.mark.parametrize("name, well, ill", [
    ("all_rejected", 0, 1), ("rollout_is_mean", 0.11, 0.09), ("rollout_is_mean", 1.99, 2.01),
    ("rollout_is_raw_eff_sample_size", 0.006, 0.004), ("rollout_is_std", 0.99, 1.01),
    ("rollout_is_catastrophic_token_fraction", 0.009, 0.011),
    ("rollout_is_veto_fraction", 0.09, 0.11), ("rollout_rs_seq_masked_fraction", 0.49, 0.51),
    ("k3_kl", 0.149, 0.151), ("chi2_token", 4.99, 5.01),
    ("chi2_token", -0.9, -1.1), ("ppl_ratio", 0.81, 0.79), ("ppl_ratio", 1.24, 1.26),
    ("rollout_is_masked_fraction", 0.49, 0.99), ("rollout_rs_masked_fraction", 0.89, 0.91),
    ("loss/bypass_clip_fraction", 0.004, 0.006), ("k3_kl", -1e-9, -1e-3),
])
def test_the_limits_of_health(name, well, ill):
    assert diagnose({name: well}) == [] and len(diagnose({name: ill})) == 1


def test_the_ess_of_sequence_weights_is_over_sequences():
    mask = torch.zeros(400, 1000)                       # one long response carries all the weight
    mask[0], mask[1:, 0] = 1, 1
    log_pi = torch.zeros(400, 1000)
    log_pi[1:, 0] = -20
    name, = (x for x in diagnose(correct(log_pi, torch.zeros(400, 1000), mask,
                                         Config.decoupled_seq_is()).metrics) if "200" in x)
    assert name.startswith("rollout_is_raw_seq_eff_sample_size is 0.0025")
    by_tokens = correct(log_pi, torch.zeros(400, 1000), mask, Config.decoupled_token_is()).metrics
    assert not any("200" in x for x in diagnose(by_tokens))


def sampled(seed, rows=64, length=50, noise=0.3, temperature=1.0, keep=None):
    """Return log π and log μ of tokens that μ drew.

    μ is π with noise on its logits, at another temperature, cut to its `keep` likeliest tokens.
    """
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, 12, generator=g, dtype=torch.float64)
    log_pi = logits.log_softmax(-1)
    noisy = logits + noise * torch.randn(logits.shape, generator=g, dtype=torch.float64)
    log_mu, _ = sampling_log_probs(noisy, temperature, top_k=keep or 0)
    drawn = torch.multinomial(log_mu.exp().flatten(0, 1), 1, generator=g).view(rows, length, 1)
    return [x.gather(-1, drawn)[..., 0] for x in (log_pi, log_mu)]


@pytest.mark.parametrize("row", NO_LESSON, ids=lambda row: " ".join(row[0]))
def test_a_step_that_teaches_nothing_is_reported_by_the_first_row_that_holds(row):
    values, meaning, remedy = row
    assert [f"{meaning}; {remedy}." in sentence for sentence in diagnose(values)] == [True]
    for name in values:                                       # each of its values is needed
        for other in ({**values, name: values[name] + 0.5},
                      {k: v for k, v in values.items() if k != name}):
            assert not any(f"{meaning};" in sentence for sentence in diagnose(other)), other


@pytest.mark.parametrize("mean, best, count, said", [
    (0.01, 0.2, 125, True), (0.02, 0.2, 125, False), (0.019, 0.2, 125, True),
    (0.01, 0.2, 124, False), (0.0, 0.0, 1000, False)])
def test_a_collapse_is_a_tenth_of_the_best_where_25_were_expected(mean, best, count, said):
    values = {"reward/mean": mean, "reward/best": best, "response/count": count}
    assert any("collapsed" in sentence for sentence in diagnose(values)) == said


@certifies("Monte Carlo: both within four standard errors, which chance exceeds in 1 of 16 000")
def test_an_honest_record_is_standard_normal():
    """eq:martingale: over 200 batches of 3 200 tokens z has mean 0 and variance 1.

    No batch is called improper.
    """
    found = [to_host(offpolicy_metrics(*sampled(seed), torch.ones(64, 50))) for seed in range(200)]
    z = torch.tensor([x["rollout_corr/is_ratio_z"] for x in found], dtype=torch.float64)
    print(f"mean {z.mean():.2f} ± {z.std() / 200 ** 0.5:.2f}, deviation {z.std():.2f}, "
          f"largest {z.abs().max():.1f}")
    assert abs(z.mean()) < 4 / 200 ** 0.5 and abs(z.std() - 1) < 4 / 400 ** 0.5
    assert z.abs().max() < 5
    assert all(x["rollout_corr/kl_z"] > 5 for x in found)          # KL(μ‖π) > 0, and it is seen
    assert not any("is_ratio_mean" in s or s.startswith("kl ") for x in found for s in diagnose(x))


@pytest.mark.parametrize("wrong, word", [
    (lambda: sampled(0, noise=0, keep=6), "is_ratio_mean is 0.8"),      # a cut that is not replayed
    (lambda: sampled(0, noise=0, temperature=0.7)[::-1], "kl is -0.")])
def test_an_improper_pair_is_named(wrong, word):
    """eq:martingale: a cut μ has E[ρ] < 1, another temperature E[log ρ] > 0; both are named."""
    log_pi, log_mu = wrong()
    sentences = diagnose(offpolicy_metrics(log_pi, log_mu, torch.ones(log_pi.shape)))
    assert any(sentence.startswith(word) for sentence in sentences)
    assert all(sentence.endswith(".") for sentence in sentences)


@pytest.mark.parametrize("z, said", [(4.5, False), (-4.5, False), (5.5, True), (-5.5, True)])
def test_a_mean_of_rho_is_judged_beyond_five_standard_errors(z, said):
    found = diagnose({"rollout_corr/is_ratio_mean": 1.1, "rollout_corr/is_ratio_z": z})
    assert any(x.startswith("is_ratio_mean is 1.1, ") for x in found) == said
    near = {"rollout_corr/is_ratio_mean": 1.001, "rollout_corr/is_ratio_z": 2 * z}
    assert not any(x.startswith("is_ratio_mean") for x in diagnose(near))          # it is rounding


@pytest.mark.parametrize("mean, words", [
    (0.9, "replay what top-p, top-k or min-p kept"), (1.1, "look for a wrong record of log μ")])
def test_a_mean_of_rho_below_1_is_a_cut_and_above_it_a_wrong_record(mean, words):
    """eq:martingale: lost mass lowers the mean; both sentences end with the doctor's command."""
    [sentence] = diagnose({"is_ratio_mean": mean, "is_ratio_z": 9})
    assert words in sentence and sentence.endswith(DUMP) and "never drawn" not in sentence
    sentence, _ = diagnose({"is_ratio_mean": mean, "is_ratio_z": 9, "k3_kl": 0.2})
    assert ("never drawn" in sentence) == (mean < 1)        # a heavy tail looks like a cut


@pytest.mark.parametrize("kl, z, said", [
    (-2e-4, -6, True), (-2e-4, -5, False), (-1e-4, -6, False), (-1e-4 - 1e-12, -5.01, True),
    (2e-4, -6, False), (-2e-4, 6, False)])
def test_a_negative_kl_is_judged_beyond_five_standard_errors_and_rounding(kl, z, said):
    assert any(x.startswith("kl is ") for x in diagnose({"kl": kl, "kl_z": z})) == said


@pytest.mark.parametrize("values", [
    {"kl": -0.1, "kl_z": -9}, {"is_ratio_mean": 3, "is_ratio_z": 9},
    {"reward/mean": 0.01, "reward/best": 30, "response/count": 100}])
def test_a_law_is_silent_without_one_of_its_metrics(values):
    assert len(diagnose(values)) == 1
    for name in values:
        assert diagnose({k: v for k, v in values.items() if k != name}) == []


def test_the_cap_and_the_tail_are_not_blamed_on_rho():
    """A mean weight far below 1 is normal over 2 000 tokens at k3 = 2e-3, and not blamed on ρ."""
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 2000, generator=g, dtype=torch.float64)
    log_rho, mask = 0.063 * noise - 0.063 ** 2 / 2, torch.ones(64, 2000)            # E[ρ] = 1
    metrics = correct(log_rho, torch.zeros_like(log_rho), mask, Config("sequence")).metrics
    found = to_host(metrics)
    assert 1.5e-3 < found["rollout_corr/k3_kl"] < 2.5e-3
    assert found["rollout_corr/rollout_is_mean"] < 0.5
    assert not any("ratio_mean" in s or "is_mean" in s for s in diagnose(metrics))
    [sentence] = diagnose({"rollout_is_mean": 0.05})
    assert "a cap takes the rest" in sentence and "temperature" not in sentence


def test_a_mismatch_that_nothing_corrects_is_named():
    x = torch.zeros(4, 50, dtype=torch.float64)
    train = x + torch.where(torch.arange(50) % 2 == 0, 0.1, -0.1)                      # k3 = 0.005
    configs = (Config.disabled(), Config.decoupled_token_is(),
               Config(rollout_rs={"token_k1": (0.95, 2.0)}))
    found = [diagnose(correct(train, x, torch.ones(4, 50), config).metrics) for config in configs]
    named = [any("nothing corrects it" in sentence for sentence in said) for said in found]
    assert named == [True, False, False]
    ones = torch.ones(4, 50)
    assert diagnose(offpolicy_metrics(train, x, ones)) == []    # who knows what is done about it
    _, metrics = policy_loss(train, None, x, ones, ones, Config.bypass_ppo_clip())
    assert not any("nothing corrects it" in s for s in diagnose(metrics))
    assert len(diagnose({"k3_kl": math.nan, "rollout_rs_masked_fraction": 0})) == 1


@pytest.mark.parametrize("chi2, word", [
    (5.5, "a large shift"), (9.99, "a large shift"),
    (10.0, "a severe shift"), (99.0, "a severe shift")])
def test_a_severe_shift_has_a_sentence_of_its_own(chi2, word):
    sentence, = diagnose({"chi2_token": chi2})
    assert word in sentence and ("sample anew" in sentence) == (chi2 >= 10)


@pytest.mark.parametrize("name, value", [
    ("is_ratio_max", math.inf), ("log_ppl_diff_min", -math.inf), ("is_ratio_max", math.nan),
    ("k3_kl", math.inf), ("k3_kl", math.nan)])
def test_what_is_not_finite_is_said_once_of_any_metric(name, value):
    [sentence] = diagnose({name: value})
    assert sentence.startswith(f"{name} is {value}")
