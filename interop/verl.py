"""Use `policy_loss` in place of verl's own loss, in every worker. For verl 0.9.1.

This file decides where the correction is made. In decoupled mode verl's driver has made it before a
worker sees the batch: the weights come as rollout_is_weights, the rejection is in the response
mask, and neither is done again. In bypass mode old_log_prob is π_rollout, and the correction is
made here, as the actor's copy of the block says. verl's default trainer neither fills in that copy
nor chooses a loss for bypass mode. Without loss_mode it trains with PPO's clip around π_rollout,
whatever loss_type says, and never calls this file. So three settings are needed:

    actor_rollout_ref.model.external_lib=three_policies.interop.verl
    actor_rollout_ref.actor.policy_loss.loss_mode=three_policies
    '+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}'

Every node needs this package: `pip install --no-deps .` in verl's environment. Without the third
setting the copy is verl's default, which is refused in both modes, since such a worker cannot tell
the modes apart.
What needs the whole batch where a worker sees a part of it is refused by name. So are what needs
candidate tokens, and what verl's driver would not do in decoupled mode. The block's loss_type
chooses the loss, which may be gspo, cispo and sapo as well. Means are over what rejection left
("kept"), as everywhere in verl. actor/pg_clipfrac counts the tokens of the dual clip, too, for
which verl has a second metric.
"""

import warnings
from dataclasses import fields
from typing import Any

# pyright: reportMissingImports=false
import torch
from torch import Tensor
from verl.trainer.config.algorithm import RolloutCorrectionConfig as VerlBlock
from verl.trainer.ppo.core_algos import register_policy_loss

from three_policies.interop.dialects import from_dialect
from three_policies.doctor.dumps import append, rows_of
from three_policies.interop.names import PREFIX, verl
from three_policies.correction import Correction
from three_policies.presets import RolloutCorrectionConfig
from three_policies.losses import Counts, LossConfig, loss_means, policy_loss
from three_policies.metrics import to_host
from three_policies.rejection import CRITERIA


@register_policy_loss("three_policies")
def three_policies(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor,
                   response_mask: Tensor, loss_agg_mode: str = "token-mean", config: Any = None,
                   rollout_is_weights: Tensor | None = None) -> tuple[Tensor, dict[str, float]]:
    """Return (loss, metrics) for verl's arguments, [B, T].  (eq:decoupled-ppo, eq:bypass)"""
    block = carried(config.policy_loss.rollout_correction)
    bypass, clipped = block.bypass_mode, block.loss_type == "ppo_clip"
    if block.rollout_is and not bypass and rollout_is_weights is None:
        raise ValueError("rollout_is is set, but verl's driver made no weights: it needs "
                         "actor_rollout_ref.rollout.calculate_log_probs=true")

    clip_low, clip_high = (config.clip_ratio if end is None else end
                           for end in (config.clip_ratio_low, config.clip_ratio_high))
    counts = whole_counts(config.global_batch_info, loss_agg_mode)
    how = LossConfig(
        clip_low=clip_low, clip_high=clip_high, dual_clip=config.clip_ratio_c if clipped else None,
        tau_positive=config.tau_pos, tau_negative=config.tau_neg, aggregation=loss_agg_mode,
        denominator="kept",                                 # verl's H is by default the width
        horizon=config.global_batch_info.get("loss_scale_factor") or response_mask.shape[-1])
    loss, metrics = policy_loss(
        log_prob, old_log_prob, old_log_prob if bypass else None, advantages, response_mask, block,
        how, correction=None if bypass else Correction(rollout_is_weights, response_mask),
        counts=counts)

    metrics = loss_means(metrics) if counts is not None else metrics
    named = {"actor/ppo_kl": metrics["loss/approx_kl"], "actor/ratio": metrics["loss/ratio"],
             "actor/pg_clipfrac": metrics["loss/clip_fraction"]}
    named |= {name: x for name, x in verl(metrics).items() if name.startswith(PREFIX)}
    return loss * config.global_batch_info.get("dp_size", 1), to_host(named)


def rows(data: Any, most: int | None = None) -> list[dict[str, Any]]:
    """Return a batch of verl's driver, or its first `most` responses, as rows of a dump."""
    if hasattr(data, "batch"):
        batch, p = data.batch, data.batch["prompts"].shape[1]
        masks = [batch["attention_mask"][:most, :p], batch["attention_mask"][:most, p:]]
    else:                               # keys of TransferQueue, which has columns without padding
        import transfer_queue
        batch = transfer_queue.kv_batch_get(
            keys=data.keys[:most], partition_id=data.partition_id, select_fields=[
                "prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs",
                "entropy"])
        masks = [torch.ones_like(batch[name]).to_padded_tensor(0)
                 for name in ("prompts", "responses")]
        batch = {name: batch[name].to_padded_tensor(0) for name in batch.keys()}

    columns = {name: batch[name][:most] for name in batch.keys() if name in (
        "prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "entropy")}
    if columns["rollout_log_probs"].equal(columns["old_log_probs"]):
        warnings.warn("old_log_probs are a copy of rollout_log_probs, so the dump tells nothing: "
                      "dump with algorithm.rollout_correction.bypass_mode=false", stacklevel=3)
    return rows_of(columns["prompts"], masks[0], columns["responses"], masks[1],
                   columns["response_mask"], columns["rollout_log_probs"],
                   columns["old_log_probs"], columns.get("entropy"))


def dump(data: Any, path: str) -> None:
    """Append a batch of verl's driver to a dump for the doctor.

    data: what the trainer's `_compute_old_log_prob` returns, or, with trainer.use_v1=false, what
    `calculate_debug_metrics` gets. It needs actor_rollout_ref.rollout.calculate_log_probs=true.
    In bypass mode verl makes old_log_probs a copy of rollout_log_probs, which a warning says.
    verl_doctor.py calls it by one override.
    """
    append(path, rows(data))


def carried(block: Any) -> RolloutCorrectionConfig:
    """Return the actor's copy of the block as ours; raise ValueError on what cannot be done here.

    If the override is missing, verl's PolicyLossConfig has its own dataclass in the place of the
    block, every field at its default. With the override a mapping is there.
    """
    if isinstance(block, VerlBlock) and block == VerlBlock():
        raise ValueError(
            "actor_rollout_ref.actor.policy_loss.rollout_correction is verl's default, so this "
            "worker does not know bypass_mode and loss_type of algorithm.rollout_correction and "
            "would train with PPO's clip whatever they are: add '+actor_rollout_ref.actor."
            "policy_loss.rollout_correction=${algorithm.rollout_correction}'")

    ours, given = from_dialect(block), {key for key in block if block[key] is not None}
    unread = sorted(given - {f.name for f in fields(VerlBlock)} - {"_target_"})
    refused = {
        "rollout_is_batch_normalize in bypass mode: the mean weight is of the whole batch, and a "
        "worker sees a micro-batch; set it to false, or use bypass_mode=false, where verl's driver "
        "normalises": ours.bypass_mode and ours.rollout_is_batch_normalize,
        **{f"rollout_rs {name}: its limit is of the whole batch, and a worker sees a micro-batch; "
           "use criteria of tokens or sequences": CRITERIA[name].of == "batch"
           for name in ours.rollout_rs},
        "score_centering: it needs candidate tokens, which verl does not bring to a worker; set it "
        "to false": ours.score_centering,
        "preset, which the block's own defaults would overrule: write its keys out":
            "preset" in given,
        f"{', '.join(unread)} in decoupled mode, where verl 0.9.1's driver corrects and reads its "
        "own keys alone: write those out": unread and not block.get("bypass_mode")}

    for sentence, asked in refused.items():
        if asked:
            raise ValueError(f"three_policies.interop.verl does not carry {sentence}")
    return ours


def whole_counts(info: Any, mode: str) -> Counts | None:
    """Return verl's counts of the whole mini-batch, or None if these rows are all of it."""
    counts = Counts(info.get("batch_num_tokens"), info.get("global_batch_size"))
    needed = {"token-mean": counts.tokens, "token-sum": 0}.get(mode, counts.sequences)
    if needed is None and info.get("dp_size", 1) > 1:
        raise ValueError(f"{mode} on several ranks needs the counts of the whole mini-batch, "
                         f"which global_batch_info {dict(info)} lacks")
    return None if needed is None else counts
