"""The weights that an engine is given are rounded and stale, and the same after a restart."""

import pytest
import torch
from hypothesis import given, strategies

from three_policies.rollout import Sample, WeightSync, quantize_weights
from three_policies.tests.support.tolerances import gamma


@given(strategies.integers(2, 8), strategies.integers(0, 2**31))
def test_rounding_keeps_its_promises(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 40, generator=generator) * torch.rand(6, 1, generator=generator) * 9
    w[2] = 0
    norm = torch.randn(40, generator=generator)
    rounded = dict(quantize_weights([("w", w), ("norm", norm)], bits))
    assert torch.equal(rounded["norm"], norm)
    q = rounded["w"]
    step = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((q - w).abs() <= step / 2 * (1 + 1e-4) + 1e-12).all()
    assert all(len(row.unique()) <= 2**bits - 1 for row in q)
    assert torch.equal(dict(quantize_weights([("w", -w)], bits))["w"], -q)
    assert torch.allclose(dict(quantize_weights([("w", q)], bits))["w"], q, rtol=gamma(6), atol=0)
    assert dict(quantize_weights([("w", w.bfloat16())], bits))["w"].dtype == torch.bfloat16


def test_no_bits_means_no_rounding_and_impossible_bits_are_refused():
    w = torch.randn(3, 3)
    assert dict(quantize_weights([("w", w)], None))["w"] is w
    for bits in (0, 1, 17, 2.5):
        with pytest.raises(ValueError, match=f"quantize={bits} must be null, a"):
            quantize_weights([], bits)
        with pytest.raises(ValueError, match="rollout.quantize="):
            WeightSync(None, quantize=bits)
    with pytest.raises(ValueError, match="staleness=-1"):
        WeightSync(None, staleness=-1)


class Recorder:
    """A Recorder is an engine that remembers its one weight's value after each update."""

    def __init__(self):
        self.held = []

    def update_weights(self, named_tensors):
        [(name, tensor)] = named_tensors
        assert name == "w"
        self.held.append(tensor[0, 0].item())


def push(sync, weight, values):
    for value in values:
        weight.fill_(value)  # in place, as an optimiser does
        sync.push([("w", weight)])


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_after_push_n_the_engine_holds_push_n_minus_staleness(staleness):
    weight, straight, resumed = torch.zeros(2, 2), Recorder(), Recorder()
    push(WeightSync(straight, staleness), weight, range(8))
    assert straight.held == [max(0, n - staleness) for n in range(8)]
    for interrupted in range(8):  # stop after push `interrupted`, save, resume, push it again
        sync = WeightSync(Recorder(), staleness)
        push(sync, weight, range(interrupted + 1))
        state = sync.state_dict()
        engine = Recorder()
        resumed = WeightSync(engine, staleness)
        resumed.load_state_dict(state)
        push(resumed, weight, range(interrupted, 8))
        assert engine.held == straight.held[interrupted:]


def test_late_weights_are_rounded_too():
    engine = Recorder()
    sync = WeightSync(engine, staleness=1, quantize=2)
    for value in (1.0, 2.0):
        sync.push([("w", torch.tensor([[0.4 * value, value], [0.6 * value, value]]))])
    assert engine.held == [0.0, 0.0]  # 0.4 of the largest weight is nearer to 0 than to 1


def test_a_sample_is_immutable():
    with pytest.raises(AttributeError):
        Sample([1], [0.0], True).tokens = []  # pyright: ignore[reportAttributeAccessIssue]


def test_late_matrices_wait_in_the_engines_dtype_and_vectors_as_they_are():
    sync = WeightSync(None, 1, None, "bfloat16")
    for shape, dtype in (((2, 3), torch.bfloat16), ((3,), torch.float32)):
        assert sync.copy_to_host(("w", torch.ones(shape)))[1].dtype == dtype
