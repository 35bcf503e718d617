"""Weights go to an engine as it stores them: on the grid that rollout.quantize names."""

import pytest
import torch
from hypothesis import given, strategies

from three_policies.checks import UserError
from three_policies.training.rounding import FLOAT8_MAX, ROUNDINGS, quantize_weights, rounding
from three_policies.tests.support.tolerances import gamma
from three_policies.training.settings import load_config

EVERY = [*ROUNDINGS, 2, 5, 16]


def weights(seed: int, *shape: int) -> torch.Tensor:
    """Return normal weights whose channels differ in size, one of them 0."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=generator) * torch.rand(
        *shape[:-1], 1, generator=generator) * 9
    w[..., 2, :] = 0
    return w


@given(strategies.sampled_from(EVERY), strategies.integers(0, 2**31))
def test_a_rounded_weight_is_on_its_grid(how, seed):
    """It stays where it is when rounded again, the grid is symmetric, and the dtype is kept."""
    w, function = weights(seed, 6, 200), rounding(how)
    q = function(w)
    assert q.shape == w.shape and bool(q.isfinite().all()) and not q[2].any()
    assert torch.allclose(function(q), q, rtol=gamma(6), atol=0)
    assert torch.equal(function(-w), -q)
    assert function(w.bfloat16()).dtype == torch.bfloat16
    assert function(w.half()).dtype == torch.float16


def largest(w: torch.Tensor, how: str | int) -> torch.Tensor:
    """Return max|w| of each weight's channel, group or matrix, group by group."""
    if how == "float8-e4m3-tensor":
        return w.abs().max().expand_as(w)
    size = int(str(how).rpartition("-")[2]) if "group" in str(how) else w.shape[-1]
    return torch.cat([part.abs().amax(-1, keepdim=True).expand_as(part)
                      for part in w.split(size, -1)], -1)


@given(strategies.sampled_from(EVERY), strategies.integers(0, 2**31))
def test_the_error_is_within_half_a_step(how, seed):
    w = weights(seed, 6, 200)                      # 200 is no multiple of 32 or of 128
    most, error = largest(w, how), (rounding(how)(w) - w).abs()
    if "float8" in str(how):
        bound = torch.maximum(w.abs() / 16, most / FLOAT8_MAX / 2 ** 10)
    else:
        bits = {"int8": 8}.get(how, 4) if isinstance(how, str) else how
        bound = most / (2 ** (bits - 1) - 1) / 2
    assert (error <= bound * (1 + 1e-4) + most * gamma(4)).all()


@pytest.mark.parametrize("size", [32, 128])
def test_groups_lie_along_the_input(size):
    """A group is rounded as a channel of its own, so one outlier coarsens its neighbours alone."""
    w = weights(1, 6, 2 * size)
    grouped, channel = rounding(f"int4-group-{size}"), rounding("int4")
    parts = torch.cat([channel(part) for part in w.split(size, -1)], -1)
    assert torch.equal(grouped(w), parts)
    w[0, 0] = 1000
    assert torch.equal(grouped(w)[0, size:], parts[0, size:])
    assert not torch.equal(channel(w)[0, size:], parts[0, size:])
    three = weights(2, 3, 6, 2 * size)
    assert torch.equal(grouped(three), torch.stack([grouped(x) for x in three]))


def test_float8_is_torchs_own_cast():
    w = weights(3, 6, 200)
    w[0, 0] = FLOAT8_MAX                           # the scale of the matrix is then 1
    w = w.clamp(-FLOAT8_MAX, FLOAT8_MAX)
    assert torch.equal(rounding("float8-e4m3-tensor")(w), w.to(torch.float8_e4m3fn).float())
    channel = rounding("float8-e4m3")(w)
    scale = w.abs().amax(-1, keepdim=True) / FLOAT8_MAX
    scale[2] = 1
    cast = (w / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float()
    assert torch.equal(channel, cast * scale)
    assert rounding("float8-e4m3")(torch.tensor([[1e-40, -1e-42]])).isfinite().all()
    experts = weights(4, 3, 6, 40)                 # each matrix has a scale of its own
    whole = rounding("float8-e4m3-tensor")
    assert torch.equal(whole(experts), torch.stack([whole(x) for x in experts]))


def test_bits_per_channel_are_what_they_were():
    """As rollout.quantize rounded before it had another name, bit by bit."""
    w = weights(5, 6, 200)
    for bits in range(2, 17):
        step = w.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        step = torch.where(step > 0, step, 1.0)
        assert torch.equal(rounding(bits)(w), (w / step).round() * step)
    assert torch.equal(rounding("int8")(w), rounding(8)(w))


def test_finer_grids_are_nearer():
    w = weights(6, 60, 256)
    errors = [(rounding(how)(w) - w).square().mean().item() for how in (
        "int8", "int4-group-32", "int4-group-128", "int4")]
    assert errors == sorted(errors)
    assert 4 * errors[0] < (rounding("float8-e4m3")(w) - w).square().mean() < errors[1]


def test_the_setting_takes_names_and_numbers():
    for how, found in (("int4-group-32", "int4-group-32"), ("6", 6), ("'6'", 6), ("null", None)):
        assert load_config([f"rollout.quantize={how}"]).rollout.quantize == found
    for wrong in ("int3", "fp8", "0", "1", "17", "2.5", "٤"):
        with pytest.raises(UserError, match=r"rollout\.quantize.*(must be null, a number|must be)"):
            load_config([f"rollout.quantize={wrong}"])
    norm = torch.randn(3)
    assert dict(quantize_weights([("norm", norm)], "int4"))["norm"] is norm


def test_quantize_bits_is_another_name(tmp_path):
    """So is rollout.adapter for rollout.lora, which older files have."""
    assert load_config([]).rollout.quantize == 6
    assert load_config(["rollout.quantize_bits=null"]).rollout.quantize is None
    assert load_config(["rollout.quantize=float8-e4m3"]).rollout.quantize == "float8-e4m3"
    file = tmp_path / "old.yaml"
    file.write_text("rollout: {quantize_bits: 5, adapter: apart}\n")
    old = load_config([str(file)]).rollout
    assert (old.quantize, old.lora) == (5, "apart")
    file.write_text("rollout: {quantize_bits: 5, quantize: int4}\n")
    with pytest.raises(UserError, match="quantize_bits is another name of rollout.quantize: write"):
        load_config([str(file)])
    assert load_config(["rollout={quantize_bits: 3}"]).rollout.quantize == 3
    with pytest.raises(UserError, match="quantize_bits is another name of rollout.quantize: write"):
        load_config(["rollout={quantize_bits: 3, quantize: 4}"])
    with pytest.raises(UserError, match="rollout.adaptr is not a setting; did you mean rollout.lo"):
        load_config(["rollout.adaptr=apart"])


def test_a_lora_apart_is_not_rounded():
    with pytest.raises(UserError, match="rollout.quantize=int4 rounds the weights that are sent"):
        load_config(["rollout.quantize=int4", "rollout.lora=apart", "policy.lora_rank=2"])
