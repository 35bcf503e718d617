"""`correct` as it reads when nothing is fused: the reference that the fast one is compared with.

Every quantity is a [B, T] tensor of its own, and every metric a reduction over it.
"""

import math

import torch
from correction import SKYRL_MASKS, Correction, importance_weights
from estimators import (SAFETY_BOUND, Statistics, aggregate_log_ratio, exp_ratio, kl_estimate,
                        masked_log_ratio)
from torch import Tensor


def plain_correct(train, rollout, response_mask, config, advantages=None) -> Correction:
    """What `correct` returns, one tensor and one metric after another."""
    valid = response_mask.bool()
    log_ratio = masked_log_ratio(train, rollout, valid)
    statistics, weights = Statistics(), None
    if config.rollout_is is not None:
        weights = importance_weights(log_ratio, valid, config.rollout_is,
                                     config.rollout_is_threshold)
        _weight_statistics(statistics, log_ratio, weights, valid, config)
        if config.rollout_is_batch_normalize:
            weights = batch_normalize(weights, valid, config.rollout_is, statistics)
    keep = rejection_mask(log_ratio, valid, config.rollout_rs, advantages, statistics)
    _offpolicy_statistics(statistics, train, rollout, log_ratio, valid)
    mask = torch.where(keep, response_mask, torch.zeros_like(response_mask))
    return Correction(weights, mask, statistics)


def batch_normalize(weights, response_mask, level, statistics: Statistics) -> Tensor:
    """w / mean(w): over tokens for token weights, over sequences for others."""
    valid = response_mask.bool()
    mean = Statistics()
    if level == "token":
        mean.add(weights, valid, mean="mean")
    else:
        mean.add(weights.amax(-1), valid.any(-1), mean="mean")      # one weight on a whole sequence
    statistics.tables += mean.tables
    statistics.outputs.append({"mean": "rollout_is_batch_norm_factor"})
    factor = mean.metrics()["mean"].to(weights.dtype)
    return weights / torch.where(factor > 1e-8, factor, 1.0)


def rejection_mask(log_ratio, response_mask, criteria, advantages, statistics) -> Tensor:
    """What every criterion keeps, each on the original mask: [B, T], bool."""
    valid = response_mask.bool()
    log_ratio = torch.where(valid, log_ratio, 0.0)
    keep = valid
    for name, bound in criteria.items():
        if name == "opsm":
            drift = aggregate_log_ratio(-log_ratio, valid, "geometric")
            reject = (drift > bound) & (advantages < 0) & valid
        else:
            below, above = _criterion(statistics, name, bound, log_ratio, valid)
            reject = (below | above) & valid
        statistics.add(reject.float(), valid, mean=f"rollout_rs_{name}_masked_fraction")
        statistics.add(reject.any(-1).float(), valid.any(-1),
                       mean=f"rollout_rs_{name}_seq_masked_fraction")
        keep = keep & ~reject
    veto = criteria["seq_max_k1"][0] if "seq_max_k1" in criteria else None
    catastrophic = _outside(log_ratio, veto, None)[0] & valid
    statistics.add(catastrophic.float(), valid, mean="rollout_is_catastrophic_token_fraction")
    statistics.add(catastrophic.any(-1).float(), valid.any(-1), mean="rollout_is_veto_fraction")
    rejected = valid & ~keep
    statistics.add(rejected.float(), valid, mean="rollout_rs_masked_fraction", min="all_rejected")
    statistics.add(rejected.any(-1).float(), valid.any(-1), mean="rollout_rs_seq_masked_fraction")
    return keep


def _outside(log_value: Tensor, lo: float | None, hi: float | None) -> tuple[Tensor, Tensor]:
    """Where a logarithm is below log lo, and where above log hi; an open end is never crossed."""
    return (log_value < (math.log(lo) if lo else -math.inf),
            log_value > (math.inf if hi is None else math.log(hi)))


def _offpolicy_statistics(statistics, train, rollout, log_ratio, valid):
    """verl's rollout_corr/* diagnostics; means over valid tokens or over non-empty sequences."""
    zero, rows, length = torch.zeros_like(log_ratio), valid.any(-1), valid.sum(-1).clamp(min=1)
    add = statistics.add
    add(-log_ratio, valid, mean="kl")                               # KL(π_rollout‖π_train), by k1
    add(kl_estimate(zero, log_ratio, "k3"), valid, mean="k3_kl")
    add(torch.expm1(2 * log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)), valid, mean="chi2_token")
    add(exp_ratio(log_ratio), valid, mean="is_ratio_mean", sample_std="is_ratio_std",
        max="is_ratio_max", min="is_ratio_min")
    total = log_ratio.sum(-1)                                                         # [B]
    add(torch.expm1(2 * total.clamp(-SAFETY_BOUND, SAFETY_BOUND)), rows, mean="chi2_seq")
    for name, log_prob in (("training", train), ("rollout", rollout)):
        log_ppl = -torch.where(valid, log_prob.to(log_ratio.dtype), 0.0).sum(-1) / length
        add(log_ppl, rows, mean=f"{name}_log_ppl")
        add(exp_ratio(log_ppl, 4 * SAFETY_BOUND), rows, mean=f"{name}_ppl")      # never squared
    difference = -total / length                                # log ppl_train − log ppl_rollout
    add(difference, rows, mean="log_ppl_diff", max="log_ppl_diff_max", min="log_ppl_diff_min")
    add(difference.abs(), rows, mean="log_ppl_abs_diff")
    add(exp_ratio(difference, 4 * SAFETY_BOUND), rows, mean="ppl_ratio")


def _weight_statistics(statistics, log_ratio, weights, valid, config):
    """rollout_is_*: of the applied weights; rollout_is_raw_*: of ρ before truncation or zeroing.

    Two of verl's habits are kept under verl's names: above token level rollout_is_max and _min are
    those of ρ, and the fractions beyond the bounds always are.
    """
    level, bound = config.rollout_is, config.rollout_is_threshold
    lo, hi = bound if isinstance(bound, tuple) else (1 / bound, bound)
    log_rho = aggregate_log_ratio(log_ratio, valid, level)
    raw = torch.where(valid, exp_ratio(log_rho), 0.0)
    _ratio_statistics(statistics, "rollout_is_raw", level, log_rho, raw, valid, lo, hi)
    _ratio_statistics(statistics, "rollout_is", level, log_rho, weights, valid, lo, hi)
    if isinstance(bound, tuple):
        zeroed = (weights == 0) & valid
        statistics.add(zeroed.float(), valid,
                       mean=("rollout_is_masked_fraction", "rollout_is_oob_ratio"))
        statistics.add(zeroed.any(-1).float(), valid.any(-1), mean="rollout_is_seq_masked_fraction")


def _ratio_statistics(statistics, prefix, level, log_rho, weights, valid, lo, hi):
    rows, add = valid.any(-1), statistics.add
    below, above = _outside(log_rho, lo, hi)
    add(weights, valid, mean=f"{prefix}_mean", std=f"{prefix}_std", ess=f"{prefix}_eff_sample_size")
    rho = exp_ratio(log_rho)
    add(weights if level == "token" else rho, valid, max=f"{prefix}_max", min=f"{prefix}_min")
    per_row = level == "sequence" or (level == "geometric" and prefix == "rollout_rs")
    capped = {"token": "tis_token_clip_high_ratio",
              "sequence": "tis_seq_clip_high_ratio"}.get(level)     # SkyRL's name for it
    for outside, end in ((above, "high"), (below, "low")):
        names = [f"{prefix}_ratio_fraction_{end}"]
        if prefix == "rollout_is" and end == "high" and capped:
            names.append(capped)
        outside = (outside & valid).any(-1) if per_row else outside
        add(outside.float(), rows if per_row else valid, mean=tuple(names))
    row = weights.sum(-1) / valid.sum(-1).clamp(min=1)                                # [B]
    add(row, rows, mean=f"{prefix}_seq_mean", sample_std=f"{prefix}_seq_std",
        max=f"{prefix}_seq_max", min=f"{prefix}_seq_min", ess=f"{prefix}_seq_eff_sample_size")
    add((row - 1).abs(), rows, max=f"{prefix}_seq_max_deviation")
    raw_row = torch.where(valid, rho, 0.0).sum(-1) / valid.sum(-1).clamp(min=1)
    far = (raw_row > (math.inf if hi is None else hi)), (raw_row < (0.0 if lo is None else lo))
    add(far[0].float(), rows, mean=f"{prefix}_seq_fraction_high")
    add(far[1].float(), rows, mean=f"{prefix}_seq_fraction_low")


def _criterion(statistics, name, bound, log_ratio, valid) -> tuple[Tensor, Tensor]:
    """Where one criterion's statistic is too small, and where too large: [B, T] each, bool."""
    where, kind = name.rsplit("_", 1)
    level = {"seq_sum": "sequence", "seq_mean": "geometric"}.get(where, "token")
    limited = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    per_token = kl_estimate(torch.zeros_like(limited), limited, kind)       # −x, x²/2, e^x − 1 − x
    statistic = aggregate_log_ratio(per_token, valid, level)
    least, most = -math.inf, bound
    if kind == "k1":
        lo, hi = bound                                              # on ρ; on −log ρ the ends swap
        least = -math.inf if hi is None else -math.log(hi)
        most = math.inf if lo is None else -math.log(lo)
    below, above = statistic < least, statistic > most
    if where == "seq_max":
        below, above = ((x & valid).any(-1, keepdim=True).expand_as(valid) for x in (below, above))
        worst = torch.where(valid, statistic, -math.inf).amax(-1, keepdim=True)
        statistic = torch.where(valid, worst, 0.0)
    elif kind == "k1" and not any("rollout_rs_mean" in out.values() for out in statistics.outputs):
        # verl 0.6's rollout_rs_*, statistics of ρ itself: those of the first such criterion.
        log_rho = aggregate_log_ratio(log_ratio, valid, level)
        rho = torch.where(valid, exp_ratio(log_rho), 0.0)
        _ratio_statistics(statistics, "rollout_rs", level, log_rho, rho, valid, lo, hi)
    _criterion_statistics(statistics, name, statistic, below, above, least, most, valid)
    return below, above


def _criterion_statistics(statistics, name, statistic, below, above, least, most, valid):
    """rollout_rs_{criterion}_*, in nats. For k1, verl's "high" is a high −log ρ: a low ρ."""
    prefix, add, rows = f"rollout_rs_{name}", statistics.add, valid.any(-1)
    row = statistic.sum(-1) / valid.sum(-1).clamp(min=1)        # one value on a sequence: itself
    add(statistic, valid, mean=f"{prefix}_mean", max=f"{prefix}_max", min=f"{prefix}_min")
    add(statistic.clamp(least, most), valid, std=f"{prefix}_std")   # verl's: within the bounds
    add(row, rows, mean=f"{prefix}_seq_mean", sample_std=f"{prefix}_seq_std",
        max=f"{prefix}_seq_max", min=f"{prefix}_seq_min")
    add(row.abs(), rows, max=f"{prefix}_seq_max_deviation")
    for outside, end, far in ((above, "high", row > most), (below, "low", row < least)):
        by_row = (outside & valid).any(-1)
        per_token = name.startswith("token")
        add((outside if per_token else by_row).float(), valid if per_token else rows,
            mean=f"{prefix}_fraction_{end}")
        add((far if per_token else by_row).float(), rows, mean=f"{prefix}_seq_fraction_{end}")
        if name in SKYRL_MASKS:
            ratio_end = "under_low" if end == "high" else "over_high"
            add(by_row.float(), rows, mean=f"{SKYRL_MASKS[name]}_{ratio_end}_ratio")
    rejected = (below | above) & valid
    if name in SKYRL_MASKS:
        add(rejected.any(-1).float(), rows, mean=f"{SKYRL_MASKS[name]}_masked_ratio")
    if name == "token_k1":
        add(rejected.float(), valid, mean="token_mask_ratio")
