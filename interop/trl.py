"""Use this correction in TRL's GRPOTrainer: the weights alone, or the whole loss. For TRL 1.16.0.

This file decides what TRL's words mean here, and refuses by name what it does not support:
    WeightedGRPOTrainer    TRL keeps its loss; our weights × mask replace its importance-sampling
                           ratio (its metrics sampling/* do not describe them)
    PolicyLossGRPOTrainer  the loss is `policy_loss`, bypass and reinforce included. TRL's loss_type
                           says what divides it (all tokens, kept or not), and may be sapo or cispo

TRL logs the mean of its calls, where a micro-batch of three tokens, or of none, counts as much as
one of a thousand. PolicyLossGRPOTrainer adds up sums instead. It logs one mean over all tokens kept
since the last log, in every micro-batch and on every rank. loss/policy is the mean loss of an
optimizer step.

Where vLLM gave no log-prob, which TRL stores as NaN, ρ is 1. How often that was is logged as
rollout_corr/rollout_missing_fraction, a share of the sampled tokens; it should be 0.

    GRPOTrainer(…, callbacks=[DoctorCallback()])           # the doctor watches; dump="dumps" writes
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import TrainerCallback
from trl import GRPOTrainer

from three_policies.correction import Correction, correct
from three_policies.doctor.dumps import append, rows_of
from three_policies.doctor.normal import has_experts
from three_policies.doctor.watch import Watch, leading
from three_policies.losses import Counts, LossConfig, loss_means, policy_loss
from three_policies.metrics import merge, to_host
from three_policies.presets import RolloutCorrectionConfig
from three_policies.rejection import CRITERIA

AGGREGATION = {"dapo": "token-sum", "cispo": "token-sum", "bnpo": "token-mean",
               "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean",
               "dr_grpo": "seq-mean-token-sum-norm"}
MISSING = "rollout_corr/rollout_missing_fraction"
IMAGES = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes",
          "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")


def _refuse(trainer: Any, found: dict[str, bool]) -> None:
    if names := [name for name, here in found.items() if here]:
        raise ValueError(f"{type(trainer).__name__} does not carry {', '.join(names)}")


def pair(trainer: Any) -> dict[str, Any]:
    """Return what is known of both sides, for a dump; vLLM's dtype where it is in this process."""
    model, mixed = trainer.model, trainer.accelerator.mixed_precision
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    engine = getattr(getattr(engine, "llm_engine", None), "model_config", None)
    dtype, config = getattr(engine, "dtype", None), model.config
    return {"engine": dtype and str(dtype), "quantize": getattr(engine, "quantization", None),
            "trainer": str(model.dtype) if mixed in (None, "no") else mixed,
            "experts": has_experts(getattr(config, "text_config", config).to_dict())}


def _rows(batch: dict[str, Any], which: slice = slice(None), trainer: Any = None
          ) -> list[dict[str, Any]]:
    if missing := {"sampling_per_token_logps", "old_per_token_logps"} - set(batch):
        raise ValueError(f"this batch has no {' and no '.join(sorted(missing))}: a dump needs "
                         "use_vllm=True and vllm_importance_sampling_correction=True, or a "
                         "rollout_func with log-probs and num_iterations above 1")
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    of = {} if trainer is None else {"pair": pair(trainer)}
    return [row | of for row in rows_of(*(x[which] for x in (
        batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"],
        batch["completion_mask"], mask, batch["sampling_per_token_logps"],
        batch["old_per_token_logps"])))]


def dump(batch: dict[str, Any], path: str, trainer: Any = None) -> None:
    """Append what `_generate_and_score_completions` returned to a dump for the doctor.

    With the trainer the dump also says what precision both sides have, and whether there are
    experts.
    Call it there in a subclass of the trainer. Log-probs of both sides are there with use_vllm and
    vllm_importance_sampling_correction, or with a rollout_func and num_iterations above 1; else it
    raises ValueError. A token of which vLLM gave no log-prob has null in the dump, and the doctor
    counts it. Of rows that mask_truncated_completions masks no token is written.
    """
    append(path, _rows(batch, trainer=trainer))


class DoctorCallback(TrainerCallback):
    """Print the doctor's line on a GRPOTrainer's first batch, and whenever it changes.

    It examines the first process' batches, as TRL made them, and logs doctor/alarm, doctor/fault,
    doctor/unsure, doctor/e_rho and doctor/k3 with TRL's own metrics. dump: a directory for what was
    examined.
    """

    def __init__(self, dump: str | None = None) -> None:
        self.watch = Watch(dump)
        _hand_out_batches()

    def see(self, trainer: Any, batch: dict[str, Any]) -> None:
        self.watch.see(
            trainer.state.global_step + 1,
            lambda: _rows(batch, leading(batch["completion_mask"]), trainer),
            lambda name, value: trainer._metrics["train"][name].append(value))


def _hand_out_batches() -> None:
    """Let every GRPOTrainer hand its batches to the DoctorCallbacks that it has.

    transformers gives a callback no batch, and TRL makes it within one method.
    """
    of: Any = GRPOTrainer
    generate = of._generate_and_score_completions
    if "hands_out" in generate.__dict__:
        return

    @functools.wraps(generate)
    def handing_out(self: Any, inputs: Any) -> dict[str, Any]:
        batch = generate(self, inputs)
        if self.model.training and self.accelerator.is_main_process:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, DoctorCallback):
                    callback.see(self, batch)
        return batch
    handing_out.__dict__["hands_out"] = True
    of._generate_and_score_completions = handing_out


def _phase(trainer: Any) -> str:
    return "train" if trainer.model.training else "eval"            # as in TRL


def _missing(missing: Tensor, mask: Tensor) -> Tensor:
    """Return how many sampled tokens are missing, and how many there are: [2], float32."""
    sampled = mask.bool()
    return torch.stack([(missing & sampled).sum(), sampled.sum()]).float()


def _group() -> ProcessGroup | None:
    return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None


class WeightedGRPOTrainer(GRPOTrainer):         # pyright: ignore[reportGeneralTypeIssues]
    """Multiply TRL's loss by our weights, on what our mask keeps.  (eq:decoupled-ppo)"""

    def __init__(self, *args: Any, correction: RolloutCorrectionConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.correction, weighted = correction, self.vllm_importance_sampling_correction
        _refuse(self, {"bypass_mode": correction.bypass_mode, "vespo": self.loss_type == "vespo",
                       f"loss_type {correction.loss_type}": correction.loss_type != "ppo_clip",
                       "use_vllm=False": not self.use_vllm,
                       "vllm_importance_sampling_correction=False": not weighted})

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        old, sampled = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        missing = sampled.isnan()                                   # vLLM gave no log-prob
        sampled = torch.where(missing, old, sampled)                # ρ = 1
        advantages = batch["advantages"].reshape(len(mask), -1).expand_as(mask)
        result = correct(old, sampled, mask, self.correction, advantages, _group())
        weights = 1.0 if result.weights is None else result.weights
        batch["importance_sampling_ratio"] = weights * result.mask.to(old.dtype)
        gone, tokens = self.accelerator.reduce(_missing(missing, mask), "sum")
        metrics = merge([result], _group()) | {MISSING: gone / tokens.clamp(min=1)}
        for name, value in to_host(metrics).items():
            self._metrics[_phase(self)][name].append(value)
        return batch


class PolicyLossGRPOTrainer(GRPOTrainer):       # pyright: ignore[reportGeneralTypeIssues]
    """Use `policy_loss` with TRL's generation and updates.  (eq:decoupled-ppo, eq:bypass)"""

    def __init__(self, *args: Any, correction: RolloutCorrectionConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own, asked = self.loss_type, correction.loss_type
        named = own in ("cispo", "sapo")
        _refuse(self, {
            f"loss_type {own}": own not in AGGREGATION,
            f"loss_type {asked} under {own}": named and asked not in ("ppo_clip", own),
            "importance_sampling_level": self.importance_sampling_level != "token",     # it is gspo
            "beta": self.beta != 0, "top_entropy_quantile": self.top_entropy_quantile < 1,
            "an entropy bonus": self._entropy_bonus_enabled,
            "off_policy_mask_threshold": self.off_policy_mask_threshold is not None,
            "router_aux_loss_coef": self.aux_loss_enabled,
            "delta below 1 + epsilon_high": (self.args.delta or 9e9) < 1 + self.epsilon_high,
            "epsilon_high below 1 under cispo": own == "cispo" and self.epsilon_high < 1,
            "use_vllm=False without a rollout_func": correction != RolloutCorrectionConfig() and (
                not self.use_vllm and self.rollout_func is None),
            "rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
            **{f"rollout_rs {name}": CRITERIA[name].of == "batch"
               for name in correction.rollout_rs},
            "score_centering": correction.score_centering})
        self.correction = replace(correction, loss_type=own if named else asked)
        self._sums, self._statistics = {}, {}           # by phase, since its last log

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        args, mask = self.args, inputs["completion_mask"] * inputs.get("tool_mask", 1)
        log_prob, *_ = self._get_per_token_logps_and_entropies(
            model, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1), mask.shape[1],
            **{name: inputs.get(name) for name in IMAGES})
        old, sampled = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        advantages, correction = inputs["advantages"].reshape(len(mask), -1).expand_as(mask), None
        missing = torch.zeros_like(mask, dtype=torch.bool) if sampled is None else sampled.isnan()
        if sampled is not None:
            train = log_prob.detach() if old is None or self.correction.bypass_mode else old
            sampled = torch.where(missing, train, sampled)              # vLLM gave none: ρ = 1
            correction = correct(train, sampled, mask, self.correction, advantages)

        high, cispo = self.epsilon_high, self.loss_type == "cispo"      # where high bounds r itself
        how = LossConfig(
            clip_low=1 if cispo else self.epsilon_low, clip_high=high - 1 if cispo else high,
            dual_clip=args.delta, tau_positive=args.sapo_temperature_pos,
            tau_negative=args.sapo_temperature_neg, aggregation=AGGREGATION[self.loss_type],
            horizon=self.max_completion_length)
        loss, sums = policy_loss(
            log_prob, old, sampled, advantages, mask, self.correction, how, correction=correction,
            counts=Counts(mask.sum(), mask.new_tensor(len(mask))))

        accumulated = self.current_gradient_accumulation_steps if self.model.training else 1
        parts = accumulated
        if self.loss_type in ("dapo", "cispo"):         # the tokens of the whole generation batch
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            parts = tokens * parts / (args.steps_per_generation if self.model.training else 1)
        of_loss = {"loss/policy": accumulated * loss / parts}
        self._add(sums | of_loss | dict(zip(("missing", "sampled"), _missing(missing, mask))),
                  correction)
        return loss / parts

    def _add(self, sums: dict[str, Tensor], correction: Correction | None) -> None:
        """Add a micro-batch's sums and statistics to those since the last log."""
        phase, sums = _phase(self), sums | {"calls": sums["loss/kept_tokens"].new_ones(())}
        before = self._sums.get(phase, {})
        self._sums[phase] = {name: x.detach() + before.get(name, 0) for name, x in sums.items()}
        found, earlier = correction and correction.statistics, self._statistics.get(phase)
        if found is not None:
            if earlier is not None and earlier.names == found.names:        # the same criteria
                found = found.merge([earlier])
            self._statistics[phase] = found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log means over all kept tokens, not TRL's mean of calls."""
        phase, group = _phase(self), _group()
        sums, statistics = self._sums.pop(phase, {}), self._statistics.pop(phase, None)
        if sums:
            reduced = self.accelerator.reduce(torch.stack([*sums.values()]), "sum")
            totals = dict(zip(sums, reduced))
            totals["loss/policy"] = totals["loss/policy"] / totals.pop("calls")
            gone, sampled = totals.pop("missing"), totals.pop("sampled")
            metrics = loss_means(totals)
            if statistics is not None:
                whole = statistics if group is None else statistics.all_reduce(group)
                metrics |= whole.metrics() | {MISSING: gone / sampled.clamp(min=1)}
            self._metrics[phase] |= {name: [x] for name, x in to_host(metrics).items()}
        super().log(logs, start_time)
