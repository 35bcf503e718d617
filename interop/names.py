"""Rename metrics to those of other systems, and note how theirs differ.

Ours are verl 0.9's names wherever it has one. Each function returns the metrics with another
system's names added, or in place of ours where one name means two things. Metrics of theirs that
cannot be merged exactly, such as verl 0.6.0's percentiles, are left out.

    from three_policies.interop.names import skyrl
    metrics = skyrl(to_host(correct(old_log_prob, rollout_log_prob, mask, config).metrics))
"""

import math
from collections.abc import Mapping

from torch import Tensor

Metrics = dict[str, Tensor | float]
PREFIX = "rollout_corr/"

# Each table maps their names to ours.
VERL = {"rollout_is_oob_ratio": "rollout_is_masked_fraction"}
# verl 0.6.0 puts mismatch_ before the names of what it measures without weights.
OF_POLICIES = ("kl", "k3_kl", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl",
               "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min",
               "ppl_ratio")
SKYRL = {"token_mask_ratio": "rollout_rs_token_k1_masked_fraction"} | {
    f"{theirs}_{ratio}_ratio": f"rollout_rs_{ours}_{name}"
    for theirs, ours in (("outlier_seq", "seq_max_k1"), ("product_sequence_mask", "seq_sum_k1"),
                         ("geo_sequence_mask", "seq_mean_k1"))
    for ratio, name in (("under_low", "fraction_high"), ("over_high", "fraction_low"),
                        ("masked", "seq_masked_fraction"))}       # in −log ρ a low ρ is high


def verl(metrics: Mapping[str, Tensor | float]) -> Metrics:
    """Return the metrics as verl 0.9 logs them.

    Where a sequence has one weight, its rollout_is_max and rollout_is_min are the extremes of ρ,
    not of the weights. These differences remain: verl counts rows without response tokens as
    sequences, and clamps no log ρ before k3_kl, nor the least ρ of a sequence from above. Where
    log π is −∞, its perplexity is ∞, and NaN here. In bypass mode with ppo_clip no weight is
    applied, so what verl calls rollout_is_* has the names rollout_is_raw_*.
    """
    table = dict(VERL)
    applied = f"{PREFIX}rollout_is_max" in metrics
    if applied and metrics.get(f"{PREFIX}rollout_is_per_sequence", 0.0) > 0:
        table |= {f"rollout_is_{end}": f"rollout_is_raw_{end}" for end in ("max", "min")}
    return _named(metrics, table)


def verl_06(metrics: Mapping[str, Tensor | float]) -> Metrics:
    """Return the metrics as verl 0.6 logs them (0.6.0: mismatch/ and mismatch_ before each name).

    * Its rollout_is_* describe ρ before truncation.
    * Its rollout_rs_* describe ρ at the level of the criterion that bounds it, the first of
      several.
    * Its masked fractions leave the veto out.
    * Its rollout_is_std, rollout_is_eff_sample_size and those of rollout_rs describe ρ limited to
      the bounds, which hides degenerate weights. Here they describe ρ itself.
    * It clamps no log ρ before k3_kl.
    * 0.6.0 logs what its mask zeroes as rollout_is_masked_fraction. That is rejection here, and is
      called rollout_rs_CRITERION_masked_fraction.
    """
    raw, rho = f"{PREFIX}rollout_is_raw_", "_rho_mean"
    table = {name.replace(raw, "rollout_is_"): name.removeprefix(PREFIX)
             for name in metrics if name.startswith(raw)}
    bounded = [name.removesuffix(rho) for name in metrics if name.endswith(rho)]
    for criterion in bounded[:1]:
        table |= {name.replace(f"{criterion}_rho_", "rollout_rs_"): name.removeprefix(PREFIX)
                  for name in metrics if name.startswith(f"{criterion}_rho_")}
        table |= {f"rollout_rs_{name}": f"{criterion}_{name}".removeprefix(PREFIX)
                  for name in ("masked_fraction", "seq_masked_fraction")}
    return _named(metrics, table)


def mismatch(metrics: Mapping[str, Tensor | float]) -> Metrics:
    """Add verl 0.6.0's own names: mismatch/rollout_is_mean, …, mismatch/mismatch_kl, ….

    Their values are those of `verl_06`, with its differences. What verl's mode mask zeroes is
    rejection here, so mismatch/rollout_is_masked_fraction is that of the criterion which bounds ρ.
    """
    theirs: Metrics = {}
    for name, value in verl_06(metrics).items():
        name = name.removeprefix(PREFIX)
        if name in OF_POLICIES:
            theirs[f"mismatch/mismatch_{name}"] = value
        elif name.startswith("rollout_is_") and not name.startswith("rollout_is_raw_"):
            theirs[f"mismatch/{name}"] = value
        elif name in ("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"):
            theirs.setdefault(f"mismatch/{name.replace('_rs_', '_is_')}", value)
    return {**metrics, **theirs}


def skyrl(metrics: Mapping[str, Tensor | float]) -> Metrics:
    """Return the metrics as SkyRL logs them; its tis_… names say what has one weight.

    It has no weights of prefixes and of geometric means, so these get no tis_… name. They are told
    by the second moment of their ρ, which is neither 1 + chi2_token nor 1 + chi2_seq.
    SkyRL measures a criterion on what the ones before it left. Here each is measured on all tokens.
    Its is_ratio_min, _max and _std are over padding too, which counts as 0 there.
    """
    kind, of = "token", ""
    if metrics.get(f"{PREFIX}rollout_is_per_sequence", 0.0) > 0:
        kind, of = "seq", "seq_"
    mean, ess, chi2 = (float(metrics.get(PREFIX + name, 0.0)) for name in (
        f"rollout_is_raw_{of}mean", f"rollout_is_raw_{of}eff_sample_size", f"chi2_{kind}"))
    its_own = math.isclose(mean ** 2, ess * (1 + chi2), rel_tol=1e-4)        # E[ρ²] = mean²/ESS
    return _named(metrics, SKYRL | ({
        f"tis_{kind}_clip_high_ratio": "rollout_is_ratio_fraction_high"} if its_own else {}))


def _named(metrics: Mapping[str, Tensor | float], table: Mapping[str, str]) -> Metrics:
    theirs = {f"{PREFIX}{name}": metrics[PREFIX + ours] for name, ours in table.items()
              if PREFIX + ours in metrics}
    return {**metrics, **theirs}
