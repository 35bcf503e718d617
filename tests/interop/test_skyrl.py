"""interop/skyrl.py agrees with SkyRL's own losses, and a Ray worker finds it, in SkyRL 0.4.0.

SkyRL forms each ratio in float32, whatever it is given: it rounds log ρ by |log ρ| units at most,
and the exponential by two. The rest is float64 on both sides. So a term w r A differs by no more
than 4 + |log w| + |log r| roundings.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from three_policies.tests.support.tolerances import gamma

pytestmark = pytest.mark.usefixtures("skyrl_required")
TOKEN = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3}
SEQUENCE = {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.7}
GEOMETRIC = {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1}
PRODUCT = {"sequence_mask_metric": "product"}
OUTLIER = {"outlier_token_is_threshold_low": 0.55, "outlier_token_is_threshold_high": 1.7}
MASK = {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.4}
ONE = {"nothing": {}, "token": TOKEN, "sequence": SEQUENCE, "geometric": GEOMETRIC,
       "product": PRODUCT, "outlier": OUTLIER, "token mask": MASK,
       "only a lower end": {"outlier_token_is_threshold_low": 0.6}}
BLOCKS = ONE | {"token, outlier, token mask": TOKEN | OUTLIER | MASK,
                "token, outlier, geometric": TOKEN | OUTLIER | GEOMETRIC,
                "sequence, outlier, product": SEQUENCE | OUTLIER | PRODUCT}


def batch(seed, full=False):
    """Return log_probs, old_log_probs, advantages, rollout_logprobs and loss_mask, each [B, T].

    One sequence is empty unless all tokens are to count.
    """
    generator = torch.Generator().manual_seed(seed)
    base, *noise = torch.randn(4, 8, 12, generator=generator, dtype=torch.float64)
    log_prob, old, rollout = (base - 3 + 0.2 * x for x in noise)
    lengths = torch.randint(1, 13, (8, 1), generator=generator) * (torch.arange(8) != seed)[:, None]
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64).expand(8, 12)
    mask = torch.arange(12) < (torch.tensor(12) if full else lengths)
    return log_prob.requires_grad_(), old, advantages, rollout, mask.expand(8, 12).double()


def algorithm(block, **sections):
    from skyrl.train.config import AlgorithmConfig, OffPolicyCorrectionConfig
    return AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(**block),
                           eps_clip_low=0.1, eps_clip_high=0.15, **sections)


def loss(name, config, log_prob, old, advantages, rollout, mask, **options):
    """Call a loss by its name, as SkyRL's worker does; return loss, gradient and metrics."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    import three_policies.interop.skyrl  # noqa: F401 - registers the loss
    value, metrics = PolicyLossRegistry.get(name)(
        log_prob, old, advantages, config=config, loss_mask=mask, rollout_logprobs=rollout,
        **options)
    return value, torch.autograd.grad(value, log_prob)[0], metrics


def relative(log_prob, old, _, rollout, mask):
    """Return how far a term may be apart, by the roundings that the first lines count."""
    log_w = ((old - rollout) * mask).sum(-1).abs().max()
    log_r = max(((log_prob - x) * mask).abs().max() for x in (old, rollout))
    return gamma(4 + math.ceil((log_w + log_r).item()))


def assert_same(theirs, mine, given):
    log_prob, _, advantages, *_, mask = given
    # No w r is above 4 in these batches, and no term of any loss above w r |A| max(1, |log π|).
    size = 4 * ((advantages * log_prob).abs().clamp(min=advantages.abs()) * mask).sum().item()
    assert abs(theirs[0] - mine[0]) <= relative(*given) * size
    torch.testing.assert_close(mine[1], theirs[1], rtol=relative(*given), atol=0)


@pytest.mark.parametrize("case", BLOCKS)
def test_the_loss_is_skyrls(case):
    """eq:decoupled-ppo: SkyRL's `regular`, with its own block, in loss and gradient."""
    changed, config = 0, algorithm(BLOCKS[case])
    for seed in range(5):
        given = batch(seed)
        theirs = loss("regular", config, *given)
        assert_same(theirs, loss("three_policies", config, *given), given)
        changed += theirs[0] not in (0, loss("regular", algorithm({}), *given)[0])
    assert changed == 0 if case == "nothing" else changed >= 2


@pytest.mark.parametrize("case", ONE)
def test_the_metrics_are_skyrls(case):
    """eq:correction: all that SkyRL logs, where no padding enters its least ratio and spread.

    Its clip_ratio is taken before rejection.
    """
    given, config = batch(0, full=True), algorithm(ONE[case])
    theirs, mine = (loss(name, config, *given)[2] for name in ("regular", "three_policies"))
    assert len(theirs) >= (1 if case == "nothing" else 6)
    for name, value in theirs.items():
        if name != "clip_ratio" or case in ("nothing", "token", "sequence"):
            assert mine[name] == pytest.approx(value, rel=2 * relative(*given)), name


OTHERS = {
    "gspo": ("gspo", {"loss_type": "gspo"}),
    "sapo": ("sapo", {"loss_type": "sapo"}),
    "cispo": ("cispo", {"loss_type": "cispo"}),
    "cispo around the rollout": ("cispo", {"loss_type": "cispo", "bypass_mode": True}),
    "icepop": ("rollout_is", {"loss_type": "reinforce", "bypass_mode": True, "rollout_is": "token",
                              "rollout_is_threshold": (0.9, 1.15)})}


@pytest.mark.parametrize("case", OTHERS)
def test_another_loss_is_skyrls(case):
    """eq:gspo, eq:sapo, eq:cispo, eq:bypass: a correction of ours, with SkyRL's own numbers.

    SkyRL's correction is of π_old, ours in bypass mode of π_θ, so there they have none.
    """
    from skyrl.train.config import CISPOConfig, SAPOConfig

    from three_policies.interop.dialects import from_dialect
    name, changes = OTHERS[case]
    anchor = "rollout" if "bypass_mode" in changes else "old"
    sections = {"cispo": CISPOConfig(0.2, 0.3, anchor), "sapo": SAPOConfig(0.8, 2.0)}
    for block in [{}] if "bypass_mode" in changes else [{}, TOKEN, SEQUENCE | OUTLIER]:
        correction = replace(from_dialect({"tis_ratio_type": None} | block), **changes)
        for seed in range(5):
            given = batch(seed)
            assert_same(loss(name, algorithm(block, **sections), *given),
                        loss("three_policies", algorithm({}, **sections), *given,
                             correction=correction), given)


REDUCTIONS = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean",
              "seq_mean_token_sum_norm": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_add_up_to_the_reduction(reduction):
    """eq:aggregation: scaled advantages make a sum of the mean that loss_reduction asks for."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import (
        apply_loss_reduction_to_advantages_minibatch as scaled)

    from three_policies.interop.dialects import from_dialect
    from three_policies.losses import LossConfig, policy_loss
    block = TOKEN | GEOMETRIC
    log_prob, old, advantages, rollout, mask = batch(9)             # no sequence is empty
    whole, _ = policy_loss(
        log_prob, old, rollout, advantages, mask, from_dialect(block),
        LossConfig(0.1, 0.15, aggregation=REDUCTIONS[reduction], horizon=20))
    parts = (log_prob, old, scaled(advantages, mask, reduction, 3, 20), rollout, mask)
    total = sum(loss("three_policies", algorithm(block), *(x[rows] for x in parts))[0]
                for rows in (slice(0, 3), slice(3, 8)))
    assert whole != 0 and abs(total - whole) <= 1e-12


def test_without_a_mask_every_token_counts():
    given, config = batch(0, full=True), algorithm(TOKEN)
    assert torch.equal(loss("three_policies", config, *given)[0],
                       loss("three_policies", config, *given[:-1], None)[0])


REFUSED = {
    "token_mask_is_threshold_low/high beside a sequence's ratio": [
        MASK | SEQUENCE, MASK | GEOMETRIC, MASK | PRODUCT],
    "token_mask_is_threshold_low and token_mask_is_threshold_high go together": [
        {"token_mask_is_threshold_low": 0.8}],
    "tis_ratio_type cannot be 'word'; allowed: token, sequence": [{"tis_ratio_type": "word"}]}


def test_what_skyrl_computes_otherwise_is_refused():
    given = batch(0)
    for sentence, blocks in REFUSED.items():
        for block in blocks:
            with pytest.raises(ValueError, match=sentence):
                loss("three_policies", algorithm(block), *given)


def test_what_a_micro_batch_cannot_give_is_refused():
    """SkyRL's own losses leave the correction out in silence where rollout log-probs are missing.

    It asks the engine for them if a weight or a sequence's mask is on, but not for a mask of tokens
    or outliers alone.
    """
    from three_policies.presets import RolloutCorrectionConfig as Config
    given = batch(0)
    with pytest.raises(ValueError, match="rollout_log_prob is missing"):
        loss("three_policies", algorithm(OUTLIER), *given[:3], None, given[-1])
    centered = {"bypass_mode": True, "loss_type": "reinforce", "score_centering": True}
    for sentence, block, ours in (
            ("off_policy_correction beside a correction", TOKEN, Config("sequence")),
            ("off_policy_correction beside a correction", OUTLIER, Config("sequence")),
            ("rollout_is_batch_normalize: the mean weight", {}, Config("token", 2.0, True)),
            ("rollout_rs.second_moment: its limit", {},
             Config(rollout_rs={"second_moment": 0.1})),
            ("score_centering needs candidates", {}, Config(**centered))):
        with pytest.raises(ValueError, match=sentence):
            loss("three_policies", algorithm(block), *given, correction=ours)


def test_a_ray_worker_finds_the_loss():
    """A loss registered in the driver is pickled by SkyRL, and computes the same in a worker."""
    from three_policies.interop import skyrl as recipe
    import ray
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, register_policy_loss

    from three_policies.presets import RolloutCorrectionConfig as Config
    given = batch(0)
    mine = partial(recipe.three_policies, correction=Config.bypass_pg_is())
    register_policy_loss("mine")(mine)

    def compute(name, config, log_prob, old, advantages, rollout, mask):
        from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
        return PolicyLossRegistry.get(name)(log_prob, old, advantages, config, mask, rollout)[0]
    ray.init(num_cpus=1, include_dashboard=False)
    try:
        PolicyLossRegistry.sync_with_actor()
        for name, config in (("three_policies", algorithm(TOKEN)), ("mine", algorithm({}))):
            far = ray.get(ray.remote(compute).remote(name, config, *(x.detach() for x in given)))
            assert torch.equal(far, loss(name, config, *given)[0])
    finally:
        ray.shutdown()
        PolicyLossRegistry.unregister("mine")
