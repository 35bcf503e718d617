"""adapters/verl.py against verl's own losses, and in verl's own worker, in verl 0.9.1."""

import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("verl_required")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TOKEN, SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
BYPASS, REINFORCE = {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}
K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.03}
RATIO = {"rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": "0.7_1.4,0.4_2.5"}
CASES = {                                           # verl's loss, the block of driver and worker
    "nothing": ("vanilla", {"rollout_is": None}),
    "token weights": ("vanilla", TOKEN),
    "sequence weights, rejection": ("vanilla", SEQUENCE | RATIO),
    "icepop, normalised": ("vanilla", TOKEN | {"rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True}),
    "rejection alone": ("vanilla", {"rollout_is": None} | K3),
    "gspo": ("gspo", SEQUENCE | K3 | {"loss_type": "gspo"}),
    "cispo": ("cispo", TOKEN | {"loss_type": "cispo"}),
    "bypass": ("bypass_mode", BYPASS),
    "bypass, rejection": ("bypass_mode", BYPASS | RATIO),
    "bypass reinforce": ("bypass_mode", REINFORCE | TOKEN),
    "bypass reinforce, rejection": ("bypass_mode", REINFORCE | SEQUENCE | K3),
}


def actor_config(loss_mode, block, whole, **options):
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import ActorConfig, PolicyLossConfig
    loss = PolicyLossConfig(loss_mode=loss_mode, rollout_correction=RolloutCorrectionConfig(**block))
    return ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, policy_loss=loss,
                       global_batch_info=whole, clip_ratio_low=0.1, clip_ratio_high=0.15, **options)


def batch(seed):
    """log_prob, old_log_prob, rollout_log_prob, advantages, mask: one sequence is empty."""
    generator = torch.Generator().manual_seed(seed)
    base, *noise = torch.randn(4, 8, 12, generator=generator)
    log_prob, old, rollout = (base - 3 + 0.2 * x for x in noise)
    lengths = torch.randint(1, 13, (8, 1), generator=generator) * (torch.arange(8) != seed)[:, None]
    advantages = torch.randn(8, 1, generator=generator).expand(8, 12).contiguous()
    return log_prob.requires_grad_(), old, rollout, advantages, torch.arange(12) < lengths


def driver(block, old, rollout, mask):
    """What verl's driver does with a batch before a worker sees it."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    if block.get("bypass_mode"):
        return rollout, mask, None
    options = {name: block.get(name) for name in ("rollout_is", "rollout_rs", "rollout_rs_threshold")}
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        old, rollout, mask.float(), **options, rollout_is_threshold=block.get("rollout_is_threshold", 2.0),
        rollout_is_batch_normalize=block.get("rollout_is_batch_normalize", False))
    return old, kept.bool(), None if weights is None else weights.batch["rollout_is_weights"]


def compare(case, mode, seed, whole, **options):
    """(loss, gradient, metrics) of verl and of the adapter on one batch."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    import adapters.verl  # noqa: F401 - registers the loss
    loss_mode, block = CASES[case]
    log_prob, old, rollout, advantages, mask = batch(seed)
    old, kept, weights = driver(block, old, rollout, mask)
    results = []
    for name in (loss_mode, "three_policies"):
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=kept, loss_agg_mode=mode,
            config=actor_config(name, block, dict(whole), **options), rollout_is_weights=weights)
        results.append((loss.item(), torch.autograd.grad(loss, log_prob)[0], metrics))
    return results


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*verl 0.9 bounds 1/ρ")
def test_the_loss_is_verls(case, mode):
    """eq:decoupled-ppo, eq:bypass: to 1.4e-6 on five batches, with and without counts from outside."""
    outside = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 16, "loss_scale_factor": 20}
    for seed in range(5):
        for whole in ({}, outside):
            (theirs, expected, metrics), (mine, found, ours) = compare(case, mode, seed, whole)
            scale = max(1.0, abs(theirs))                           # token-sum is in the tens
            assert abs(theirs - mine) <= 1.4e-6 * scale and theirs != 0
            assert torch.allclose(found, expected, rtol=1e-5, atol=1.4e-6)
            assert math.isclose(metrics["actor/ppo_kl"], ours["actor/ppo_kl"], rel_tol=1e-5, abs_tol=1e-7)
            assert ("rollout_corr/kl" in ours) == (CASES[case][0] == "bypass_mode")
