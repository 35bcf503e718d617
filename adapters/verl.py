"""A policy loss for verl: `policy_loss` in place of its own, in every worker. For verl 0.9.1.

This file decides who corrects. In decoupled mode verl's driver has done it before a worker sees the
batch: its weights come as rollout_is_weights, its rejection is in the response mask, and neither is
done again. In bypass mode nobody has: old_log_prob is π_rollout then, and the correction is made
here, as the actor's copy of the block says, which verl leaves at its defaults. So it takes

    actor_rollout_ref.model.external_lib=adapters.verl
    actor_rollout_ref.actor.policy_loss.loss_mode=three_policies
    '+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}'

and this repository on the PYTHONPATH of the workers. The block's loss_type says which loss: here
gspo, cispo and sapo as well. Means are over what rejection left ("kept"), as everywhere in verl.
"""

from verl.trainer.ppo.core_algos import register_policy_loss

from adapters.dialects import from_dialect
from correction import Correction
from losses import Counts, loss_means, policy_loss
from metrics import to_host


@register_policy_loss("three_policies")
def three_policies(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
                   config=None, rollout_is_weights=None):
    """verl's arguments, tensors [B, T] → (loss, metrics).  (eq:decoupled-ppo, eq:bypass)"""
    block = from_dialect(config.policy_loss.rollout_correction)
    bypass, clipped = block.bypass_mode, block.loss_type == "ppo_clip"
    clip_low, clip_high = (config.clip_ratio if end is None else end
                           for end in (config.clip_ratio_low, config.clip_ratio_high))
    counts = whole_counts(config.global_batch_info, loss_agg_mode)
    loss, metrics = policy_loss(
        log_prob, old_log_prob, old_log_prob if bypass else None, advantages, response_mask, block,
        correction=None if bypass else Correction(rollout_is_weights, response_mask),
        clip_low=clip_low, clip_high=clip_high, dual_clip=config.clip_ratio_c if clipped else None,
        tau_positive=config.tau_pos, tau_negative=config.tau_neg, mode=loss_agg_mode,
        denominator="kept", counts=counts,
        horizon=config.global_batch_info.get("loss_scale_factor"))
    metrics = loss_means(metrics) if counts is not None else metrics
    named = {"actor/ppo_kl": metrics["loss/approx_kl"], "actor/ratio": metrics["loss/ratio"],
             "actor/pg_clipfrac": metrics["loss/clip_fraction"]}
    named |= {name: x for name, x in metrics.items() if name.startswith("rollout_corr/")}
    return loss * config.global_batch_info.get("dp_size", 1), to_host(named)


def whole_counts(info, mode: str) -> Counts | None:
    """What verl knows of the mini-batch over all ranks, which average; None: these rows are all."""
    counts = Counts(info.get("batch_num_tokens"), info.get("global_batch_size"))
    needed = {"token-mean": counts.tokens, "token-sum": 0}.get(mode, counts.sequences)
    if needed is None and info.get("dp_size", 1) > 1:
        raise ValueError(f"{mode} on several ranks needs the counts of the whole mini-batch, "
                         f"which global_batch_info {dict(info)} lacks")
    return None if needed is None else counts
