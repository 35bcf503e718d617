"""Center scores: subtract from each token's weighted score its mean under π_rollout.

Off-policy a baseline is free only if w ∇log π_θ has mean 0 under μ = π_rollout. Truncating or
rejecting tokens breaks this. Subtracting the mean restores it, and needs the other tokens that μ
might have drawn:

    rollout.py, engines/vllm.py   return ids, log μ of each token's candidates    Sample.candidates
    `candidate_tables`             pads them to the batch's shape                  [B, T, K]
    policy.py                      adds log π_θ of these ids in the token's place  [B, T, K]
    `centering_loss`               returns the mean, as a loss to be added         [B, T]

A token's weight must follow from that token alone. So RolloutCorrectionConfig allows only REINFORCE
with token weights and token criteria. Derivation: math/14-methods-and-prices.md.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from three_policies.correction import importance_weights
from three_policies.presets import RolloutCorrectionConfig
from three_policies.ratios import widen
from three_policies.rejection import CRITERIA, rejection_mask


def candidate_tables(tables: Sequence[tuple[Tensor, Tensor]], mask: Tensor
                     ) -> tuple[Tensor, Tensor]:
    """Return ids and log μ of each token's candidates, padded with 0 and −∞: [B, T, K] twice.

    `tables` has ids and log μ [|y|, K'] for each row of `mask`, bool [B, T], the likeliest first,
    with one K' for all rows. K is the most that any token has.
    """
    given = [torch.cat(x) for x in zip(*tables)]                              # [tokens, K'] twice
    held = (given[1] > -math.inf).sum(-1)
    most = int(held.max()) if len(held) else 0
    ids, log_mu = (x.new_full((*mask.shape, most), fill) for x, fill in zip(given, (0, -math.inf)))
    ids[mask], log_mu[mask] = (x[:, :most] for x in given)
    return ids, log_mu


def centering_loss(log_prob: Tensor, rollout_log_prob: Tensor, advantages: Tensor,
                   response_mask: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """Return A Σ_v sg(μ(v) w(v)) log π_θ(v), to be added to −w A log π_θ(y).  (eq:score-centering)

    This subtracts from w ∇log π_θ(y) its own mean under μ. A constant A then moves nothing in
    expectation; where ρ is truncated or rejected no baseline achieves that. w(v) is the weight and
    the mask that `config` gives a token v.

    `log_prob`, `rollout_log_prob`: [B, T, K], of K candidates v of each token; log μ is −∞ where
    there are fewer. The mean is exact if the candidates hold all of μ. Otherwise the remaining mass
    of μ and of π_θ is treated as one extra token, which criteria of probabilities always keep: with
    token_tv* and C = ∞ that is exact if each of the tokens it stands for is within δ. With the
    K ≥ 1/δ − 1 likeliest candidates, μ has at most δ on any other: only a π_θ above δ drifts.
    Source: 2609.20807.
    """
    log_prob, rollout_log_prob = widen(log_prob), widen(rollout_log_prob.detach())
    known = (rollout_log_prob > -math.inf) & response_mask.bool()[..., None]           # [B, T, K]
    p, mu = (torch.where(known, x, -math.inf).exp() for x in (log_prob, rollout_log_prob))
    rest, mu_rest = (1 - x.sum(-1, keepdim=True) for x in (p, mu))
    eps = torch.finfo(mu.dtype).eps                         # below a few ε a rest is rounding
    mu_rest = torch.where(mu_rest > 100 * eps, mu_rest, 0.0)
    log_p = torch.cat([torch.where(known, log_prob, 0.0), rest.clamp(min=8 * eps).log()], -1)
    mu = torch.cat([mu, mu_rest], -1)
    asked = mu.flatten(1) > 0                                             # [B, T·(K + 1)]
    log_mu = torch.where(asked, mu.flatten(1), 1.0).log()
    log_rho = torch.where(asked, log_p.detach().flatten(1) - log_mu, 0.0)
    advantages = advantages.detach()[..., None].expand_as(mu)
    kept = rejection_mask(log_rho, asked, config.rollout_rs, advantages.flatten(1), log_mu)
    # The extra token stands for many: Σπ − Σμ is no single token's π − μ, and must not reject it.
    of_ratios = {name: bound for name, bound in config.rollout_rs.items()
                 if "rollout_log_prob" not in CRITERIA[name].needs}
    rest = rejection_mask(log_rho, asked, of_ratios).view_as(mu)[..., -1:]
    weights = torch.cat([kept.view_as(mu)[..., :-1], rest], -1)
    if config.rollout_is is not None:
        of_ratio = importance_weights(log_rho, asked, "token", config.rollout_is_threshold)
        weights = torch.where(weights, of_ratio.view_as(mu), 0.0)
    factor = advantages * mu * weights
    return (factor * torch.where(factor == 0, 0.0, log_p)).sum(-1)      # 0 · −∞ would be NaN
