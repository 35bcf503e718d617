"""TRL's GRPOTrainer with this correction: the weights alone, or the whole loss. For TRL 1.16.0.

This file decides what TRL's words mean here, and refuses by name what it does not carry:
    WeightedGRPOTrainer    TRL keeps its loss; our weights × mask take the place of its ratio of
                           importance sampling (its metrics sampling/* are not of them)
    PolicyLossGRPOTrainer  the loss is `policy_loss`, bypass and reinforce included. TRL's loss_type
                           says what divides it (all tokens, kept or not), and may name sapo, cispo
"""

from dataclasses import replace

import torch
from trl import GRPOTrainer

from correction import correct
from losses import Counts, policy_loss
from metrics import merge

AGGREGATION = {"dapo": "token-sum", "cispo": "token-sum", "bnpo": "token-mean",
               "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean",
               "dr_grpo": "seq-mean-token-sum-norm"}
IMAGES = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
          "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")


def _refuse(trainer, found: dict[str, bool]) -> None:
    if names := [name for name, here in found.items() if here]:
        raise ValueError(f"{type(trainer).__name__} does not carry {', '.join(names)}")


def _record(trainer, metrics) -> None:          # into TRL's log, which averages over time
    ours = torch.stack([x.detach().float() for x in metrics.values()])
    for name, value in zip(metrics, trainer.accelerator.gather(ours[None]).mean(0).tolist()):
        trainer._metrics["train" if trainer.model.training else "eval"][name].append(value)


class WeightedGRPOTrainer(GRPOTrainer):
    """TRL's loss × our weights, on what our mask keeps.  (eq:decoupled-ppo)"""

    def __init__(self, *args, correction, **kwargs):
        super().__init__(*args, **kwargs)
        self.correction, weighted = correction, self.vllm_importance_sampling_correction
        _refuse(self, {"bypass_mode": correction.bypass_mode, "vespo": self.loss_type == "vespo",
                       f"loss_type {correction.loss_type}": correction.loss_type != "ppo_clip",
                       "use_vllm=False": not self.use_vllm,
                       "vllm_importance_sampling_correction=False": not weighted})

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        old, sampled = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        sampled = torch.where(sampled.isnan(), old, sampled)        # no log-prob from vLLM: ρ = 1
        advantages = batch["advantages"].reshape(len(mask), -1).expand_as(mask)
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        result = correct(old, sampled, mask, self.correction, advantages, group)
        weights = 1.0 if result.weights is None else result.weights
        batch["importance_sampling_ratio"] = weights * result.mask.to(old.dtype)
        _record(self, merge([result], group))
        return batch


class PolicyLossGRPOTrainer(GRPOTrainer):
    """TRL's generation and updates around `policy_loss`.  (eq:decoupled-ppo, eq:bypass)"""

    def __init__(self, *args, correction, **kwargs):
        super().__init__(*args, **kwargs)
        own, asked = self.loss_type, correction.loss_type
        named = own in ("cispo", "sapo")
        _refuse(self, {
            f"loss_type {own}": own not in AGGREGATION,
            f"loss_type {asked} under {own}": named and asked not in ("ppo_clip", own),
            "importance_sampling_level": self.importance_sampling_level != "token",     # say gspo
            "beta": self.beta != 0, "top_entropy_quantile": self.top_entropy_quantile < 1,
            "an entropy bonus": self._entropy_bonus_enabled,
            "off_policy_mask_threshold": self.off_policy_mask_threshold is not None,
            "router_aux_loss_coef": self.aux_loss_enabled,
            "delta below 1 + epsilon_high": (self.args.delta or 9e9) < 1 + self.epsilon_high,
            "rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
            "rollout_rs second_moment": "second_moment" in correction.rollout_rs,
            "score_centering": correction.score_centering})
        self.correction = replace(correction, loss_type=own if named else asked)

    def _compute_loss(self, model, inputs):
        args, mask = self.args, inputs["completion_mask"] * inputs.get("tool_mask", 1)
        log_prob, *_ = self._get_per_token_logps_and_entropies(
            model, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1), mask.shape[1],
            **{name: inputs.get(name) for name in IMAGES})
        high, cispo = self.epsilon_high, self.loss_type == "cispo"      # whose r is at most high
        loss, metrics = policy_loss(
            log_prob, inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps"),
            inputs["advantages"], mask, self.correction, mode=AGGREGATION[self.loss_type],
            counts=Counts(mask.sum(), len(mask)), horizon=self.max_completion_length,
            clip_low=1 if cispo else self.epsilon_low, clip_high=high - 1 if cispo else high,
            dual_clip=args.delta, nan_is_missing=True,
            tau_positive=args.sapo_temperature_pos, tau_negative=args.sapo_temperature_neg)
        parts = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.loss_type in ("dapo", "cispo"):         # the tokens of the whole generation batch
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            parts = tokens * parts / (args.steps_per_generation if self.model.training else 1)
        _record(self, metrics | {"loss/policy": loss / parts})
        return loss / parts
