"""`correct(..., compiled=True)`: the same pass over the tokens, as one kernel of torch.compile."""

import math
import os
import shutil

import pytest
import torch
from correction import RolloutCorrectionConfig as Config
from correction import correct, to_host

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                                reason="torch.compile needs a C++ compiler, and there is no g++ (nor CXX)")


def batch(rows, length):
    """Random log-probs in float64 with NaN on padding; the shortest response is empty."""
    g = torch.Generator().manual_seed(rows)
    rollout, noise, signs = torch.randn(3, rows, length, dtype=torch.float64, generator=g)
    mask = torch.arange(length) < torch.randint(0, length + 1, (rows, 1), generator=g)
    mask[0] = False
    return torch.where(mask, rollout + noise / 2, math.nan), rollout, mask, signs


@pytest.mark.parametrize("mask_dtype, config", [
    (torch.float32, Config("token", 1.5, True, {"token_k1": (0.5, 2.0), "token_k3": 0.3, "seq_max_k2": 0.9,
                                                "seq_sum_k1": (0.1, 9.0)})),
    (torch.bool, Config("geometric", (0.9, 1.1), rollout_rs={"opsm": 0.05, "token_k1": (0.5, 0.9)})),
    (torch.int64, Config("token", (1.1, 3.0), rollout_rs={"seq_mean_k3": 0.13, "seq_max_k1": (1e-4, None)}))])
def test_one_kernel_gives_the_same_but_for_rounding(mask_dtype, config):
    for shape in ((37, 50), (21, 64)):                  # the second one is compiled for any shape
        train, rollout, mask, signs = batch(*shape)
        given = train, rollout, mask.to(mask_dtype), config, signs
        one = correct(*given, compiled=True)
        blocks = correct(*given)
        assert torch.equal(given[2], mask.to(mask_dtype))           # the caller's is left alone
        torch.testing.assert_close(one.weights, blocks.weights, rtol=1e-12, atol=1e-14)
        assert torch.equal(one.mask, blocks.mask) and one.mask.dtype == mask_dtype
        assert 0 < one.mask.sum() < mask.sum()
        expected = to_host(blocks.metrics)
        assert to_host(one.metrics) == pytest.approx(expected, rel=1e-9, abs=1e-9)
