"""interop/verl.py agrees with verl's own losses, and runs in verl's own worker, in verl 0.9.1."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("verl_required")
VERL = 2e-8      # verl adds 1e-8 to each number of tokens that it divides by; the rest is float64
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
                "seq-mean-token-sum-norm")
TOKEN, SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
BYPASS, REINFORCE = {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}
K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.03}
RATIO = {"rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": "0.7_1.4,0.4_2.5"}
CASES = {                                           # verl's loss, the block of driver and worker
    "nothing": ("vanilla", {"rollout_is": None}),
    "token weights": ("vanilla", TOKEN),
    "sequence weights, rejection": ("vanilla", SEQUENCE | RATIO),
    "icepop, normalised": ("vanilla", TOKEN | {"rollout_is_threshold": "0.5_5.0",
                                               "rollout_is_batch_normalize": True}),
    "rejection alone": ("vanilla", {"rollout_is": None} | K3),
    "gspo": ("gspo", SEQUENCE | K3 | {"loss_type": "gspo"}),
    "cispo": ("cispo", TOKEN | {"loss_type": "cispo"}),
    "bypass": ("bypass_mode", BYPASS),
    "bypass, rejection": ("bypass_mode", BYPASS | RATIO),
    "bypass reinforce": ("bypass_mode", REINFORCE | TOKEN),
    "bypass reinforce, rejection": ("bypass_mode", REINFORCE | SEQUENCE | K3),
}


def actor_config(loss_mode, block, whole, **options):
    from verl.workers.config import ActorConfig, PolicyLossConfig
    # Hydra's rollout_correction is a dict.
    loss = PolicyLossConfig(loss_mode=loss_mode, rollout_correction=dict(block))
    return ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, policy_loss=loss,
                       global_batch_info=whole, clip_ratio_low=0.1, clip_ratio_high=0.15, **options)


def batch(seed):
    """Return log_prob, old_log_prob, rollout_log_prob, advantages, mask; one sequence is empty."""
    generator = torch.Generator().manual_seed(seed)
    base, *noise = torch.randn(4, 8, 12, generator=generator, dtype=torch.float64)
    log_prob, old, rollout = (base - 3 + 0.2 * x for x in noise)
    lengths = torch.randint(1, 13, (8, 1), generator=generator) * (torch.arange(8) != seed)[:, None]
    advantages = torch.randn(8, 1, generator=generator,
                             dtype=torch.float64).expand(8, 12).contiguous()
    return log_prob.requires_grad_(), old, rollout, advantages, torch.arange(12) < lengths


def driver(block, old, rollout, mask):
    """Do what verl's driver does with a batch before a worker sees it."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    if block.get("bypass_mode"):
        return rollout, mask, None
    options = {name: block.get(name)
               for name in ("rollout_is", "rollout_rs", "rollout_rs_threshold")}
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        old, rollout, mask.float(), **options,
        rollout_is_threshold=block.get("rollout_is_threshold", 2.0),
        rollout_is_batch_normalize=block.get("rollout_is_batch_normalize", False))
    return old, kept.bool(), None if weights is None else weights.batch["rollout_is_weights"]


def compare(case, mode, seed, whole, **options):
    """Return (loss, gradient, metrics) of verl and of the recipe on one batch."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    import three_policies.interop.verl  # noqa: F401 - registers the loss
    loss_mode, block = CASES[case]
    log_prob, old, rollout, advantages, mask = batch(seed)
    old, kept, weights = driver(block, old, rollout, mask)
    results = []
    for name in (loss_mode, "three_policies"):
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=kept,
            loss_agg_mode=mode, config=actor_config(name, block, dict(whole), **options),
            rollout_is_weights=weights)
        results.append((loss.item(), torch.autograd.grad(loss, log_prob)[0], metrics))
    return results


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*verl 0.9 bounds 1/ρ")
def test_the_loss_is_verls(case, mode):
    """eq:decoupled-ppo, eq:bypass: both losses agree to verl's own 1e-8 on five batches.

    They agree with and without counts from outside.
    """
    outside = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 16,
               "loss_scale_factor": 20}
    for seed in range(5):
        for whole in ({}, outside):
            (theirs, expected, metrics), (mine, found, ours) = compare(case, mode, seed, whole)
            scale = max(1.0, abs(theirs))                           # token-sum is in the tens
            assert abs(theirs - mine) <= VERL * scale and theirs != 0
            assert torch.allclose(found, expected, rtol=VERL, atol=VERL)
            assert math.isclose(metrics["actor/ppo_kl"], ours["actor/ppo_kl"],
                                rel_tol=1e-9, abs_tol=1e-9)
            assert ("rollout_corr/kl" in ours) == (CASES[case][0] == "bypass_mode")


@pytest.mark.parametrize("seed", range(5))
def test_sapo_is_verls(seed):
    """eq:sapo: SAPO is verl's with its own temperatures, in verl's one aggregation."""
    CASES["sapo"] = "sapo", TOKEN | {"loss_type": "sapo"}
    (theirs, expected, _), (mine, found, _) = compare(
        "sapo", "seq-mean-token-mean", seed, {}, tau_pos=0.8, tau_neg=2.0)
    assert abs(theirs - mine) <= VERL and torch.allclose(found, expected, rtol=VERL, atol=VERL)


def test_dual_clip_is_verls():
    """eq:dual-clip: clip_ratio_c bounds the loss of A < 0 with PPO's clip, and no other loss."""
    for case, c, seed in (("nothing", 1.2, 0), ("nothing", 3.0, 0),
                          *(("gspo", 1.001, seed) for seed in range(5))):
        (theirs, expected, _), (mine, found, _) = compare(
            case, "token-mean", seed, {}, clip_ratio_c=c)
        assert abs(theirs - mine) <= VERL and torch.allclose(found, expected, rtol=VERL, atol=VERL)
    tight, loose = (compare(case, "token-mean", 0, {}, clip_ratio_c=c)[1][0] for case, c in
                    (("nothing", 1.01), ("nothing", 3.0)))
    assert tight < loose


def test_one_clip_ratio_for_both_ends():
    """eq:ppo-clip: clip_ratio is taken where clip_ratio_low and _high are null."""
    from three_policies.interop import verl as recipe
    log_prob, old, _, advantages, mask = batch(0)
    given = actor_config("three_policies", {}, {}, clip_ratio=0.05)
    object.__setattr__(given, "clip_ratio_low", None)
    object.__setattr__(given, "clip_ratio_high", None)
    from three_policies.losses import LossConfig, policy_loss
    from three_policies.presets import RolloutCorrectionConfig
    loss, _ = recipe.three_policies(old, log_prob, advantages, mask, config=given)
    expected = policy_loss(log_prob, old, None, advantages, mask, RolloutCorrectionConfig(),
                           LossConfig(clip_low=0.05, clip_high=0.05, dual_clip=3.0))[0]
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("mode, given", [
    ("token-mean", {}), ("token-mean", {"global_batch_size": 16}),
    ("seq-mean-token-mean", {"batch_num_tokens": 90})])
def test_several_ranks_need_the_counts(mode, given):
    """eq:aggregation: verl averages gradients over ranks, so a local mean would be wrong."""
    from three_policies.interop import verl as recipe
    with pytest.raises(ValueError, match=f"^{mode} on several ranks needs the counts"):
        log_prob, old, _, advantages, mask = batch(0)
        recipe.three_policies(
            old, log_prob, advantages, mask, mode,
            config=actor_config("three_policies", {}, {"dp_size": 2} | given))


@pytest.mark.parametrize("whole", [{}, {"batch_num_tokens": 90, "global_batch_size": 16}])
def test_ratio_and_clip_fraction_are_means_over_this_workers_tokens(whole):
    """eq:ppo-clip: also if the loss is divided by the tokens of the whole mini-batch."""
    from three_policies.interop import verl as recipe
    log_prob, old, _, advantages, mask = batch(0)
    _, found = recipe.three_policies(
        old, log_prob, advantages, mask, config=actor_config("three_policies", {}, whole))
    r, A = (log_prob - old).detach().exp()[mask], advantages[mask]
    clipped = torch.where(A > 0, r > 1.15, r < 0.9).double().mean().item()
    assert found["actor/ratio"] == pytest.approx(r.mean().item(), rel=1e-12)
    assert found["actor/pg_clipfrac"] == pytest.approx(clipped, rel=1e-12) and 0 < clipped < 1


def test_everything_rejected_is_a_zero_loss():
    """eq:aggregation: the loss is 0 where verl's is 0/0."""
    from three_policies.interop import verl as recipe
    log_prob, old, _, advantages, mask = batch(0)
    block = BYPASS | {"rollout_rs": "token_k3", "rollout_rs_threshold": 1e-12}
    loss, metrics = recipe.three_policies(old + 1, log_prob, advantages, mask,
                                                 config=actor_config("three_policies", block, {}))
    assert loss == 0 and torch.autograd.grad(loss, log_prob)[0].eq(0).all()
    assert metrics["rollout_corr/all_rejected"] == 1


def test_verls_dataclass_is_a_dialect():
    """eq:correction: _target_ among its fields says nothing of the correction."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig as Theirs

    from three_policies.interop.dialects import from_dialect
    from three_policies.interop.verl import carried
    from three_policies.presets import PRESETS
    assert "_target_" in Theirs()
    assert from_dialect(Theirs.decoupled_token_is()) == PRESETS["decoupled_token_is"]()
    assert from_dialect(Theirs.bypass_pg_is()) == PRESETS["bypass_pg_is"]()
    assert carried(Theirs.bypass_pg_is()) == PRESETS["bypass_pg_is"](), "no default: not refused"


# ------------------------------------------------------------------------------ what is not carried

BLOCK, LOSS = "algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss"
# These are the settings that interop/verl.py documents.
SETTINGS = ("actor_rollout_ref.model.external_lib=three_policies.interop.verl",
            f"{LOSS}.loss_mode=three_policies", f"+{LOSS}.rollout_correction=${{{BLOCK}}}")
OWN = {name: {"rollout_is": None, **REINFORCE,
              "rollout_rs": {name: (0.5, 2.0) if name.endswith("k1") else 0.3}}
       for name in ("token_k1", "seq_max_k1", "seq_mean_k3", "opsm", "token_tv",
                    "token_tv_outward", "second_moment")}
OWN |= {"batch_normalize": REINFORCE | TOKEN | {"rollout_is_batch_normalize": True},
        "score_centering": REINFORCE | {"preset": "bypass_pg_is", "rollout_is": "token",
                                        "score_centering": True}}
REFUSED = {"second_moment": "rollout_rs second_moment: .* use criteria of tokens or sequences",
           "batch_normalize":
               "rollout_is_batch_normalize in bypass mode: .* or use bypass_mode=false",
           "score_centering": "score_centering: .* set it to false"}


@pytest.mark.parametrize("name", OWN)
def test_a_micro_batch_is_corrected_alone_or_refused(name):
    """eq:correction: two halves of a mini-batch have the gradient of the whole, or are refused."""
    from three_policies.interop import verl as recipe
    from three_policies.interop.dialects import from_dialect
    log_prob, _, rollout, advantages, mask = batch(0)
    whole = {"batch_num_tokens": int(mask.sum()), "global_batch_size": 8}
    config = actor_config("three_policies", OWN[name], whole)

    def gradient(*parts):
        loss = sum(recipe.three_policies(rollout[i], log_prob[i], advantages[i], mask[i],
                                                "token-sum", config=config)[0] for i in parts)
        return torch.autograd.grad(loss, log_prob)[0]

    ours = from_dialect(OWN[name])
    assert (name in REFUSED) == (ours.of_whole_batches or ours.score_centering)
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"interop.verl does not carry {REFUSED[name]}"):
            gradient(slice(8))
    else:
        together, apart = gradient(slice(8)), gradient(slice(3), slice(3, 8))
        assert torch.allclose(together, apart, rtol=1e-12, atol=1e-12) and together.norm() > 0


def test_metrics_of_bypass_mode_have_verls_meaning():
    """Where a sequence has one weight, verl's extremes are those of ρ before truncation."""
    from three_policies.interop import verl as recipe
    log_prob, _, rollout, advantages, mask = batch(0)
    block = REINFORCE | {"rollout_is": "sequence", "rollout_is_threshold": 1.01}
    _, found = recipe.three_policies(
        rollout, log_prob, advantages, mask, "token-mean",
        config=actor_config("three_policies", block, {}))
    assert found["rollout_corr/rollout_is_max"] == found["rollout_corr/rollout_is_raw_max"] > 1.01


def as_the_worker_has_it(*settings):
    """Return verl's ActorConfig, made of overrides as ActorRolloutRefWorker.init_model makes it."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass
    from three_policies.tests.support.verl_worker import configuration
    config = configuration("nowhere", settings)
    OmegaConf.resolve(config)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize("block", [
    (), ("rollout_is=token",), ("rollout_is=sequence",), ("bypass_mode=true",),
    ("bypass_mode=true", "loss_type=reinforce"), ("loss_type=gspo",)])
def test_the_third_override_must_be_there(block):
    """eq:bypass: without it REINFORCE, or gspo, would be PPO's clip in silence.

    With it every block works.
    """
    from three_policies.interop import verl as recipe
    log_prob, old, _, advantages, mask = batch(0)
    block = [f"{BLOCK}.{setting}" for setting in block]
    loss, _ = recipe.three_policies(old, log_prob, advantages, mask,
                                           config=as_the_worker_has_it(*SETTINGS, *block),
                                           rollout_is_weights=torch.ones_like(old))
    assert loss != 0
    with pytest.raises(ValueError, match=r"would train with PPO's clip .* add "
                                         r"'\+actor_rollout_ref\.actor\."
                                         r"policy_loss\.rollout_correction="
                                         r"\$\{algorithm\.rollout_correction\}'$"):
        recipe.three_policies(old, log_prob, advantages, mask,
                                     config=as_the_worker_has_it(*SETTINGS[:2], *block))


@pytest.mark.parametrize("block, said", [
    (("+{}.preset=decoupled_seq_is",), "preset, which .* defaults would overrule: write its keys"),
    (("{}.bypass_mode=true", "+{}.preset=bypass_pg_is"), "preset, which .* would overrule"),
    (("{}.rollout_is=sequence", "+{}.bypass_old_logprob_for_rollout=true",
      "+{}.use_policy_gradient=true"),
     "bypass_old_logprob_for_rollout, use_policy_gradient in decoupled mode"),
    (("+{}.rollout_token_veto_threshold=1e-4",), "rollout_token_veto_threshold in decoupled mode")])
def test_what_verls_driver_would_not_do_is_refused(block, said):
    """eq:correction: it corrects in decoupled mode, by its own keys, and skips others in silence.

    Nor can the recipe do what a key asks that the block's defaults contradict.
    """
    from three_policies.interop import verl as recipe
    config = as_the_worker_has_it(*SETTINGS, *(setting.format(BLOCK) for setting in block))
    with pytest.raises(ValueError, match=f"three_policies.interop.verl does not carry {said}"):
        recipe.carried(config.policy_loss.rollout_correction)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_that_verls_driver_did_not_make_are_missed(level):
    """verl trains uncorrected without calculate_log_probs, whatever rollout_is asks for."""
    from three_policies.interop import verl as recipe
    log_prob, old, _, advantages, mask = batch(0)
    config = as_the_worker_has_it(*SETTINGS, f"{BLOCK}.rollout_is={level}")
    with pytest.raises(ValueError, match="driver made no weights: it needs .*calculate_log_probs"):
        recipe.three_policies(old, log_prob, advantages, mask, config=config)


def test_verl_itself_leaves_the_loss_to_the_user():
    """eq:off-policy: verl's own code has an exhibit of the museum.

    It is REINFORCE in name, PPO's clip in fact.
    """
    import verl
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from three_policies.losses import aggregate_loss
    from three_policies.surrogates import ppo_clip_loss
    trainer = (Path(verl.__file__).parent
               / "trainer" / "ppo" / "v1" / "trainer_base.py").read_text()
    assert "def _compute_old_log_prob" in trainer and "bypass_mode" in trainer
    assert "apply_bypass_mode" not in trainer and "loss_mode" not in trainer
    config = as_the_worker_has_it(
        f"{BLOCK}.bypass_mode=true", f"{BLOCK}.loss_type=reinforce", f"{BLOCK}.rollout_is=token")
    assert (config.policy_loss.loss_mode == "vanilla"
            and config.policy_loss.rollout_correction.loss_type == "ppo_clip")
    log_prob, _, rollout, advantages, mask = batch(0)
    loss, metrics = get_policy_loss_fn("vanilla")(
        rollout, log_prob, advantages, mask, config=config)
    clip = ppo_clip_loss(log_prob, rollout, advantages, dual_clip=3.0)
    assert torch.allclose(loss, aggregate_loss(clip, mask, "token-mean"), rtol=VERL, atol=0)
    assert not any(name.startswith("rollout_corr/") for name in metrics)


# ----------------------------------------------------------------------------- in verl's own worker

RUNS = {"token": ("vanilla", ["rollout_is=token"]),
        "sequence, rejection": ("vanilla", ["rollout_is=sequence", "rollout_rs=seq_mean_k3",
                                            "rollout_rs_threshold=0.05"]),
        "bypass ppo": ("bypass_mode", ["bypass_mode=true"]),
        "bypass reinforce": ("bypass_mode", ["bypass_mode=true", "loss_type=reinforce",
                                             "rollout_is=sequence"])}


@pytest.fixture(scope="module")
def ended(tiny_model):
    """Return {run: [verl's, ours]}: (digest before, after 40 updates, names of metrics) of each."""
    lines = []
    for loss_mode, block in RUNS.values():
        theirs = [f"{LOSS}.loss_mode={loss_mode}", SETTINGS[2]]
        lines += [" ".join([*settings, *(f"{BLOCK}.{x}" for x in block)])
                  for settings in (theirs, SETTINGS)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "three_policies.tests.support.verl_worker", tiny_model, "20"],
        cwd=root, text=True, input="\n".join(lines), capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[\"")]
    assert done.returncode == 0 and len(results) == len(lines), done.stderr[-3000:]
    return dict(zip(RUNS, zip(results[::2], results[1::2])))


@pytest.mark.parametrize("run", RUNS)
def test_verls_worker_ends_with_verls_weights(ended, run):
    """eq:decoupled-ppo, eq:bypass: the worker's weights are verl's, bit for bit.

    This holds after 40 updates in ActorRolloutRefWorker (FSDP2, gloo). Both digests are of one run
    on one machine. They depend on its processor, and none is recorded.
    """
    theirs, ours = ended[run]
    assert theirs[:2] == ours[:2] and theirs[0] != theirs[1]
    # The metrics tell whose loss it was.
    assert "actor/ratio" in ours[2] and "actor/ratio" not in theirs[2]
    assert len({digest for pair in ended.values() for _, digest, _ in pair}) == len(RUNS)
