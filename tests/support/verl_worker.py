"""This program runs verl's ActorRolloutRefWorker in one CPU process, FSDP2 over gloo.

    echo "overrides of one run" | python -m three_policies.tests.support.verl_worker MODEL BATCHES

test_verl.py starts it. For every line it prints a digest of the actor's weights before and after
two updates on each of BATCHES batches of made-up rollouts, and the names of the metrics.
verl_cpu.py supplies what verl asks of an accelerator.
"""

import hashlib
import json
import os
import sys

import torch


def configuration(model, overrides):
    import hydra
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.model.use_remove_padding=False",
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.actor.use_torch_compile=False",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
            "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            # verl's default, bfloat16, forms π_θ/π_old in bfloat16 too; policy_loss widens the
            # log-probs first.
            "++actor_rollout_ref.actor.fsdp_config.mixed_precision="
            "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
            *overrides])


def rollouts(module, generator):
    """Return 16 responses as a trainer would hand them over; π_rollout is π_old with noise."""
    from verl import DataProto
    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)
    prompts, responses = draw(4, 26, 16, 4), draw(4, 26, 16, 8)
    mask = (torch.arange(8) < draw(1, 9, 16, 1)).long()
    ids, attention = (torch.cat([prompts, responses], 1),
                      torch.cat([torch.ones_like(prompts), mask], 1))
    with torch.no_grad():
        logits = module(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, 3:-1]
    old = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1) * mask
    noise = 0.3 * torch.randn(16, 8, generator=generator) * mask
    advantages = torch.randn(16, 1, generator=generator) * mask
    return DataProto.from_dict({
        "prompts": prompts, "responses": responses, "input_ids": ids, "attention_mask": attention,
        "position_ids": torch.arange(12).expand(16, 12).contiguous(), "response_mask": mask,
        "old_log_probs": old, "rollout_log_probs": old + noise, "advantages": advantages})


def update(worker, config, batch):
    """Do what verl's trainer does with a batch, from the correction to the worker."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding
    correction, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    if correction.bypass_mode:
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    else:
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
    batch.meta_info["temperature"] = 1.0
    data = left_right_2_no_padding(batch.to_tensordict())
    rows = actor.ppo_mini_batch_size
    tu.assign_non_tensor(data, calculate_entropy=False, global_batch_size=rows,
                         mini_batch_size=rows, epochs=actor.ppo_epochs, seed=0,
                         dataloader_kwargs={"shuffle": False}, compute_loss=True)
    return tu.get(worker.update_actor(data), "metrics")


def digest(module):
    whole = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p
             for p in module.parameters()]
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in whole)).hexdigest()


def run(model, batches, overrides):
    from omegaconf import OmegaConf
    from verl.workers.engine_workers import ActorRolloutRefWorker
    config = configuration(model, overrides)
    OmegaConf.resolve(config)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    worker.init_model()
    module, generator = worker.actor.engine.module, torch.Generator().manual_seed(0)
    start = digest(module)
    for _ in range(batches):
        metrics = update(worker, config, rollouts(module, generator))
    return start, digest(module), sorted(metrics)


def main(model, batches):
    from three_policies.tests.support import verl_cpu  # noqa: F401 - registers a CPU with verl
    # A store in memory takes no port.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for line in sys.stdin:
        print(json.dumps(run(model, int(batches), line.split())), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # Ray would have set these; nothing is opened there.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": "0"}
    main(*sys.argv[1:])
