"""Compute log-probs from hidden states without all logits, which would not fit in memory.

The vocabulary is taken slice by slice, forward and backward. Only torch is needed.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2 ** 24                    # logits at a time, in float32: 64 MB
ON_GPU = 4                         # times as many there, for fewer launches; not measured


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b into `out`, which may be wider: float32 from factors of 16 bits.

    The product of two such factors is exact in float32, so only the sums are rounded. For that
    torch has `out_dtype`, on CUDA alone (as of 2.13); elsewhere the factors are widened first, b by
    so few columns at a time that they stay in the processor's cache.
    """
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        a = a.to(out.dtype)
        for columns, into in zip(b.split(2048, 1), out.split(2048, 1)):
            torch.mm(a, columns.to(out.dtype), out=into)


def widen_head(head: Any) -> None:
    """Let a head of 16 bits give logits in float32, as those of policy.py are."""
    def forward(hidden: Tensor) -> Tensor:  # [..., D] → [..., V]
        logits = hidden.new_empty(*hidden.shape[:-1], len(head.weight), dtype=torch.float32)
        multiply(hidden.flatten(0, -2), head.weight.T, logits.flatten(0, -2))
        return logits if head.bias is None else logits + head.bias

    head.forward = forward


class TokenLogProbs(torch.autograd.Function):
    """Compute log π(y) = z_y − log Σ_v e^{z_v} with z = W·hidden/τ.  (eq:sampling)

    The gradient is ∂ log π(y)/∂z_v = 1[v = y] − π(v). z exists for one slice of the vocabulary at a
    time, and the backward pass computes it again, so memory does not grow with B·t·V. One result of
    the forward pass is kept for it: log Σ_v e^{z_v}, [B·t].

    hidden [B·t, D] and M targets y for each row, [B·t, M], give [B·t, M], in float32 or wider.
    `kept_ids` [B·t, K], which may contain repeated ids, are the only v that count. Elsewhere
    z = −∞, as in `sampling_log_probs`, whatever π itself would have kept.
    """

    @staticmethod
    def slices(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
               temperature: float, softcap: float | None, kept_ids: Tensor | None = None
               ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield (rows of W, z [B·t, slice], places, inside) for each slice of the vocabulary.

        `places` [B·t, M] are the targets' columns in the slice, and `inside` [B·t, M] says whether
        they are in it. All slices reuse one buffer.
        """
        size = max(1, CHUNK * (1 if hidden.is_cpu else ON_GPU) // max(1, len(hidden)))
        size -= size % 64 if size > 64 else 0      # unaligned rows of z get a GPU's slow kernels
        space = hidden.new_empty(len(hidden) * min(size, len(weight)),
                                 dtype=torch.promote_types(hidden.dtype, torch.float32))
        for first in range(0, len(weight), size):
            rows = slice(first, first + size)
            z = space[:len(hidden) * len(weight[rows])].view(len(hidden), len(weight[rows]))
            multiply(hidden, weight[rows].T, z)
            if bias is not None:
                z.add_(bias[rows])
            if softcap:
                z.div_(softcap).tanh_().mul_(softcap)
            if temperature != 1:
                z.div_(temperature)
            if kept_ids is not None:               # columns 0 and −1 take ids of other slices
                place = (kept_ids - first).clamp(-1, z.shape[1]) + 1                      # [B·t, K]
                cut = z.new_ones(len(z), z.shape[1] + 2, dtype=torch.bool)
                z.masked_fill_(cut.scatter_(-1, place.long(), False)[:, 1:-1], -math.inf)
            place = targets - first
            inside = (0 <= place) & (place < z.shape[1])
            yield rows, z, place.where(inside, 0), inside

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
                temperature: float, softcap: float | None,
                kept_ids: Tensor | None = None) -> Tensor:
        chosen, log_sum = (hidden.new_full(shape, -math.inf)                    # becomes z's dtype
                           for shape in (targets.shape, targets.shape[:1]))
        given = weight, bias, targets, temperature, softcap, kept_ids
        for _, z, place, inside in TokenLogProbs.slices(hidden, *given):
            log_sum = torch.logaddexp(log_sum, z.logsumexp(-1))
            chosen = torch.where(inside, z.gather(-1, place), chosen)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, kept_ids)
        ctx.settings = temperature, softcap
        return chosen - log_sum[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sum, kept_ids = ctx.saved_tensors
        (temperature, softcap), total = ctx.settings, gradient.sum(-1, keepdim=True)
        of_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype)
        of_weight = torch.empty_like(weight)
        of_bias = None if bias is None else torch.empty_like(bias)
        given = weight, bias, targets, temperature, softcap, kept_ids
        for rows, z, place, inside in TokenLogProbs.slices(hidden, *given):
            if softcap:                                                # of tanh: 0 where z = −∞
                slope = (1 - (z * (temperature / softcap)).square()).clamp(min=0)
            z.sub_(log_sum[:, None]).exp_().mul_(-total)
            z.scatter_add_(-1, place, gradient * inside)
            z = z if temperature == 1 else z.div_(temperature)
            of_z = (z.mul_(slope) if softcap else z).to(weight.dtype)                 # [B·t, slice]
            of_hidden += of_z @ weight[rows]
            torch.mm(of_z.T, hidden, out=of_weight[rows])
            if of_bias is not None:
                torch.sum(of_z, 0, out=of_bias[rows])
        return of_hidden.to(hidden.dtype), of_weight, of_bias, *[None] * 4
