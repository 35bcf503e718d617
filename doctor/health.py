"""Judge a run's metrics: what looks wrong, and what to turn.

This file decides what is healthy. Its limits are HEALTHY (a range), SEVERE (far beyond it),
NO_LESSON (a step that teaches nothing) and UNCORRECTED. Where a law says what is possible, the law
is tested, in standard errors. Derivation, and how many runs each limit warned of:
math/7-diagnostics.md.

    print(*diagnose(correct(old_log_prob, rollout_log_prob, mask, config).metrics), sep="\n")
"""

import math
from collections.abc import Mapping
from typing import Any

from three_policies.metrics import to_host

FAR = 0.15              # k3 per token
# Each row: metric, lowest and highest healthy value, what a value outside means, what to change.
# A table of chapter 7 counts the runs of chapter 11 that each row warned of, and the false alarms.
# verl advises to raise the veto's bound if it rejects too much. It must be lowered instead.
HEALTHY = (
    ("all_rejected", 0, 0, "every token was rejected, so the step taught nothing",
     "widen rollout_rs, take a larger batch or new rollouts; or a bug makes the policies differ"),
    ("train/empty_updates", 0, 0, "of some mini-batches nothing was kept; they took no step",
     "widen rollout_rs, raise rollout.max_tokens under rollout.mask_truncated, or take fewer and "
     "larger mini-batches"),
    ("rollout_is_mean", 0.1, 2, "the mean weight is far from 1: low if a cap takes the rest or the "
     "batch missed a heavy tail, high if it met one",
     "take token instead of sequence weights, or lower rollout.staleness"),
    ("rollout_is_raw_eff_sample_size", 0.005, 1, "weighted, 200 samples are worth less than one",
     "take token instead of sequence weights, reject with seq_mean_k1, or lower rollout.staleness"),
    ("rollout_is_std", 0, 1, "the weights scatter widely, so the gradient is noisy",
     "lower rollout_is_threshold (token 1.5–5, sequence 2–10, geometric 1.0002–1.001)"),
    ("rollout_is_masked_fraction", 0, 0.5, "most tokens have the weight 0 and teach nothing",
     "widen the pair of rollout_is_threshold, or truncate with a single number"),
    ("rollout_is_catastrophic_token_fraction", 0, 0.01, "π_train finds many tokens near impossible",
     "compare both log-probs on one prompt: a template, dtype or temperature differs"),
    ("rollout_is_veto_fraction", 0, 0.1, "the veto rejects many sequences",
     "check the log-probs first; then lower the bound of seq_max_k1 (1e-4 → 1e-6)"),
    ("rollout_rs_seq_masked_fraction", 0, 0.5, "over half of the sequences lose tokens",
     "widen rollout_rs: 0.1 % (0.999–1.001) suits long responses and small mismatch only"),
    ("rollout_rs_masked_fraction", 0, 0.9, "fewer than one token in ten is left to learn from",
     "widen rollout_rs: of chapter 11's 60 nine-token runs with so few left, two ended above "
     "their start"),
    ("loss/bypass_clip_fraction", 0, 0.005, "bypass mode's clip acts on the mismatch, and pulls "
     "π_θ towards π_rollout: a brake if that is an old policy, ruin if it is a rounded one",
     "recompute π_old (bypass_mode false), take a loss without a clip (preset bypass_pg_is), or "
     "open it: loss.clip_low=1, loss.clip_high=1e9"),
    ("k3_kl", 0, FAR, "π_rollout and π_old are far apart",
     "lower rollout.staleness, raise rollout.dtype, or round less (rollout.quantize)"),
    ("chi2_token", -1, 5, "a large shift: at χ² = 5 five samples of six are lost",
     "lower rollout.staleness, or truncate with rollout_is_threshold"),
    ("ppl_ratio", 0.8, 1.25, "one policy finds the samples far likelier than the other",
     "check temperature, top-p and top-k on both sides"),
)


# Where a response has one weight, the ESS is over responses: over tokens a long one counts often.
# Means and shares stay those of tokens, which are what the loss sums.
BY_SEQUENCE = {"rollout_is_raw_eff_sample_size": "rollout_is_raw_seq_eff_sample_size"}
SEVERE = {"chi2_token": (10, "a severe shift: more than nine samples in ten are lost",
                         "sample anew with today's weights; no bound repairs such a batch")}
DUMP = " Dump a step (run.dump=1), and three-policies doctor names the cause."
UNCORRECTED = 0.002     # k3 per token without correction; chapter 11's six-bit runs have less


def _improper(values: Mapping[str, float]) -> list[str]:
    """Report values that are impossible for samples of μ, whatever the policies.  (eq:martingale)

    If π is a distribution over what μ sampled, the mean of ρ is 1 and that of k1 at least 0. z is
    the distance in standard errors; the second condition of each test keeps rounding out.
    """
    found: list[str] = []
    mean, z = (values.get(x, math.nan) for x in ("is_ratio_mean", "is_ratio_z"))
    unless = " (unless much of π_train's mass is on tokens that were never drawn)" * (
        mean < 1 and values.get("k3_kl", 0) > FAR)
    if abs(z) > 5 and abs(mean - 1) > 0.002:
        found.append(
            f"is_ratio_mean is {mean:.4g}, {abs(z):.1f} standard errors from 1: π_train is not a "
            f"distribution over what π_rollout sampled{unless}, and no weight repairs that; "
            + ("replay what top-p, top-k or min-p kept, or leave them out." if mean < 1 else
               "look for a wrong record of log μ: before temperature or cut, shifted by a token, "
               "of another prompt.") + DUMP)
    kl, z = (values.get(x, math.nan) for x in ("kl", "kl_z"))
    if z < -5 and kl < -1e-4:
        found.append(f"kl is {kl:.2g}, {-z:.1f} standard errors below 0: on average, samples of "
                     "π_rollout cannot be likelier under π_train; π_rollout's log-probs are not of "
                     "the distribution that was sampled from: check its temperature." + DUMP)
    return found


# Why a step can teach nothing, whatever the policies; only the first row that holds is reported.
# Each row: metrics with the values that they then have, what that means, what to change.
NO_LESSON = (
    ({"response/learned_fraction": 0, "response/truncated_fraction": 1}, "every response was cut, "
     "and rollout.mask_truncated leaves out those", "raise rollout.max_tokens"),
    ({"response/learned_fraction": 0}, "no response has a token to learn from",
     "look at the engine's output: are the responses empty?"),
    ({"response/truncated_fraction": 1}, "every response was cut at rollout.max_tokens, before it "
     "had ended", "raise rollout.max_tokens, or ask for less by task.instruction"),
    ({"reward/advantage_max": 0, "reward/mean": 0}, "no response was right, so none is better than "
     "another", "ask easier questions, raise rollout.samples or rollout.max_tokens, and look in "
     "eval.jsonl whether only the form of the responses is wrong"),
    ({"reward/advantage_max": 0, "reward/mean": 1}, "every response was right, so none is better "
     "than another", "ask harder questions"),
    ({"reward/advantage_max": 0}, "in each group all rewards are equal, so none is better than "
     "another", "raise rollout.samples or rollout.temperature, or take advantage.kind=reinforce"),
    ({"grad_norm": 0, "all_rejected": 0, "train/empty_updates": 0}, "rewards differ and tokens "
     "were kept, and yet nothing moves", "look at the weights (rollout_is_max) and at the clip"),
)


def _no_lesson(values: Mapping[str, float]) -> list[str]:
    for metrics, meaning, remedy in NO_LESSON:
        if all(values.get(name) == value for name, value in metrics.items()):
            name, value = next(iter(metrics.items()))
            return [f"{name} is {value}: {meaning}; {remedy}."]
    return []


def _collapsed(values: Mapping[str, float]) -> list[str]:
    """Report a mean reward below a tenth of the best so far, if 25 right responses were expected.

    By chance that happens less than once in 10⁸ steps, P(Poisson(25) ≤ 2), if the responses are
    independent. Those to one prompt are not: with few prompts it happens now and then.
    """
    mean, best, n = (values.get(x, math.nan)
                     for x in ("reward/mean", "reward/best", "response/count"))
    if not (10 * mean < best and n * best >= 25):
        return []
    return [f"reward/mean is {mean:.3g}, and was {best:.3g}: the policy has collapsed; go back to "
            "a checkpoint, with a smaller train.lr, fewer train.epochs or another correction."]


def _uncorrected(values: Mapping[str, float]) -> list[str]:
    """Report a mismatch on which neither weights nor rejection nor a ratio to π_rollout acts."""
    acts = {"rollout_is_mean", "loss/bypass_clip_fraction"} & set(values)
    k3 = values.get("k3_kl", 0.0)
    if acts or values.get("rollout_rs_masked_fraction", 1.0) > 0 or not k3 > UNCORRECTED:
        return []
    measured = "rollout_is_raw_mean" in values
    remedy = ("set correction.metrics_only=false" if measured else
              "take weights (correction.preset=decoupled_token_is)")
    return [f"k3_kl is {k3:.2g} and nothing corrects it (healthy: 0 to {UNCORRECTED:g}): the step "
            f"is that of another objective; {remedy}."]


def diagnose(metrics: Mapping[str, Any]) -> list[str]:
    """Return sentences on what looks wrong and which setting to change; [] if nothing does.

    `metrics`: as `correct` and `policy_loss` return them, tensors or floats, with or without
    "rollout_corr/". A missing metric is not judged; a value that is not finite is always reported.
    Pass loss/bypass_clip_fraction of the first mini-batch: in later ones learning moves it as well.
    """
    values = {name.removeprefix("rollout_corr/"): value for name, value in to_host(metrics).items()}
    if values.get("response/learned_fraction") == 0:         # the other metrics are of nothing
        return _no_lesson(values)
    found = [*_no_lesson(values), *_collapsed(values), *_improper(values), *_uncorrected(values)]
    one_each = values.get("rollout_is_per_sequence") == 1
    for name, low, high, meaning, remedy in HEALTHY:
        name = BY_SEQUENCE.get(name, name) if one_each else name
        value, (limit, *words) = values.get(name), SEVERE.get(name, (math.inf, meaning, remedy))
        if value is not None and value >= limit:
            meaning, remedy = words
        if value is not None and (value < low - 1e-6 or value > high):      # −1e-9 is rounding
            found.append(f"{name} is {value:.3g} (healthy: {low:g} to {high:g}): {meaning}; "
                         f"{remedy}.")
    known = {row[0] for row in HEALTHY}
    found += [f"{name} is {value}: a log-prob was not finite; look at the engine's output first, "
              "and whether the mask has tokens that were not sampled."
              for name, value in values.items() if isinstance(value, float) and (
                  math.isnan(value) or (math.isinf(value) and name not in known))]
    return found


# ------------------------------------------------------------------ from a dump to the cause
