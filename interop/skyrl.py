"""Use `policy_loss` in place of SkyRL's own loss, in every worker. For SkyRL 0.4.0.

This file decides what SkyRL's words mean here, with trainer.algorithm.policy_loss_type set to
three_policies. SkyRL's ratio is π_old/π_rollout, as ours. Advantages come scaled, so the loss is a
sum. The correction is the block off_policy_correction, the loss is SkyRL's `regular`. What SkyRL
computes otherwise, or needs more than a micro-batch, is refused by name. Metrics have SkyRL's
names where it has one; clip_ratio is of what rejection left. For any other correction or loss_type:

    register_policy_loss("mine")(functools.partial(
        three_policies, correction=RolloutCorrectionConfig.bypass_pg_is()))
"""

from dataclasses import asdict
from typing import Any

# pyright: reportMissingImports=false
from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss
from torch import Tensor

from three_policies.interop.dialects import from_dialect
from three_policies.interop.names import PREFIX, skyrl
from three_policies.presets import RolloutCorrectionConfig
from three_policies.losses import LossConfig, policy_loss
from three_policies.metrics import to_host
from three_policies.rejection import CRITERIA


@register_policy_loss("three_policies")
def three_policies(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any,
                   loss_mask: Tensor | None = None, rollout_logprobs: Tensor | None = None,
                   correction: RolloutCorrectionConfig | None = None,
                   ) -> tuple[Tensor, dict[str, float]]:
    """Return (loss, metrics) for SkyRL's arguments, [B, T].  (eq:decoupled-ppo, eq:bypass)"""
    block = from_dialect(asdict(config.off_policy_correction))
    ours, asked = correction or block, {block.rollout_is, *block.rollout_rs}
    refused = {
        "off_policy_correction beside a correction: give one of them":
            correction is not None and asked != {None},
        "token_mask_is_threshold_low/high beside a sequence's ratio (tis_ratio_type sequence, "
        "sequence_mask_metric), which SkyRL takes of the tokens that were left, we of all":
            "token_k1" in asked and bool(asked & {"sequence", "seq_sum_k1", "seq_mean_k1"}),
        "rollout_is_batch_normalize: the mean weight is of the whole batch, not of a micro-batch":
            ours.rollout_is_batch_normalize,
        **{f"rollout_rs.{name}: its limit is of the whole batch, not of a micro-batch":
           CRITERIA[name].of == "batch" for name in ours.rollout_rs}}
    for sentence, here in refused.items():
        if here:
            raise ValueError(f"three_policies.interop.skyrl does not carry {sentence}")

    clips = ((config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high)
             if ours.loss_type == "cispo" else (config.eps_clip_low, config.eps_clip_high))
    how = LossConfig(*clips, tau_positive=config.sapo.tau_pos, tau_negative=config.sapo.tau_neg,
                     aggregation="token-sum")
    mask = log_probs.new_ones(log_probs.shape) if loss_mask is None else loss_mask
    loss, metrics = policy_loss(log_probs, old_log_probs, rollout_logprobs, advantages, mask, ours,
                                how)

    figures = to_host(metrics)
    named = {name.removeprefix(PREFIX): float(x) for name, x in skyrl(figures).items()
             if name.startswith(PREFIX)}
    return loss, named | {"clip_ratio": figures["loss/clip_fraction"]}
