"""A float sum may differ on another processor by a bound that is derived here, not chosen.

A processor decides in which order a sum is added up: by the width of its vectors, by the number of
threads, by the blocks of a matrix product. So do ranks and micro-batches. Where a test can, it
compares in float64, to 1e-12 or 1e-9. Where float32 is part of what is tested, its tolerance comes
from here.

The model (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2002, section 2.2):
each operation returns (a ∘ b)(1 + δ) with |δ| ≤ u, the unit roundoff: 2⁻²⁴ for float32, 2⁻⁸ for
bfloat16. A number that comes out of k such operations carries a factor Π(1 + δ_i)^{±1} = 1 + θ with
|θ| ≤ γ_k = k u / (1 − k u) (Lemma 3.1).

A sum of n terms, in any order, is a tree with n − 1 additions, and each term passes through n − 1
of them at most. If the terms have been rounded r times themselves (once for a product, twice for an
exponential, which good libraries return to one unit in the last place, 2u), the computed sum is
Σ x_i (1 + θ_i) with |θ_i| ≤ γ_{n−1+r}, so

    |computed − exact| ≤ γ_{n−1+r} Σ|x_i|                              (section 4.2, equation 4.4)

This holds for every order and every number of threads; fused multiply-add only rounds less often.
If the order is pairwise, a term passes through ⌈log₂ n⌉ additions only, and γ_{⌈log₂ n⌉+r} takes
the place of γ_{n−1+r} (equation 4.6). torch promises no such order, so no test may assume it of
`torch.sum`. Where n is so large that the bound for any order says nothing, a test must go to
float64: `gamma` refuses.

`in_float64` is the other way: it runs the trainer itself, in a process of its own, in float64.
"""

import math

import torch


# √(8 · 2⁻⁵³) is the computed standard deviation √(Σx²/n − mean²) of equal numbers of size 1. Each
# of the two terms has been rounded four times, in float64, before they cancel.
NO_SPREAD = 3e-8


def gamma(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """Return γ_k = k u / (1 − k u).

    It is the largest relative error of a number that was rounded k times.
    """
    error = roundings * torch.finfo(dtype).eps / 2                      # eps is the gap above 1: 2u
    if error > 0.01:
        raise ValueError(f"{roundings} roundings in {dtype} bound nothing: compare in float64")
    return error / (1 - error)


def of_sum(size, terms: int, before: int = 0, dtype: torch.dtype = torch.float32,
           pairwise: bool = False):
    """Return the bound on |computed − exact| of a sum of `terms` numbers.

    size: Σ|x_i|, what their absolute values add up to, a number or a tensor of one for each sum.
    before: the roundings of each term before it is added. Two computed sums are apart by at most
    the sum of their two bounds.
    """
    depth = math.ceil(math.log2(terms)) if pairwise else terms - 1
    return gamma(depth + before, dtype) * size


def norm(self, x):
    """Compute Qwen2RMSNorm.forward in the type that it is given.

    Qwen2's own rounds to float32, whatever the model's type is.
    """
    return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def in_float64() -> None:
    """Let this process compute in float64 from end to end.

    This covers weights, gradients, moments, the engine, the model's norms. It is for whole updates
    and runs, in which ranks, threads and micro-batches change every sum. A bound on the rounding of
    the gradients would not bound that of the weights, since AdamW divides a gradient by its size.
    The norms are part of it: where a norm rounds to float32, a difference of 1e-16 becomes one of
    6e-8 now and then.
    """
    from transformers.models.qwen2 import modeling_qwen2

    from three_policies import policy, rollout, trainer
    from three_policies.training import shards
    precision, read, empty, pad = (policy.MixedPrecisionPolicy, policy.read_model,
                                   policy.empty_model, trainer.pad)

    def padded(*given):
        batch = pad(*given)
        return batch._replace(rollout_log_prob=batch.rollout_log_prob.double())

    modeling_qwen2.Qwen2RMSNorm.forward = norm  # pyright: ignore[reportAttributeAccessIssue]
    policy.MixedPrecisionPolicy = lambda *_: precision(torch.float64, torch.float64)
    policy.read_model = lambda path: read(path).double()
    policy.empty_model = lambda path: empty(path).double()
    policy.check = lambda *_: None                  # it compares with float32
    rollout.DTYPES["float32"], trainer.pad, shards.NAMES[torch.float64] = (
        torch.float64, padded, "F64")
