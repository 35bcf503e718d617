"""Lay a micro-batch's rows one after the other, so that nothing is computed of padding.

This file decides
* All rows are one row [1, N] of the N tokens that are there. Positions begin anew with each row,
  and a row attends to itself alone. A prompt that several rows share runs once for each of them.
* On CUDA, in 16 bits, one kernel attends in all rows (`varlen_attn`). Elsewhere each row has a call
  of its own: the same mathematics, and what the kernel is compared with.
* Nothing waits for the device: bounds of rows are computed on the host.
* Only a model that attends to all earlier tokens, by SDPA, is packed. Others are refused.
Only torch is needed.

    shape = Packing.of(tokens, attention, width, device)                # in the place of Shape.of
    log_prob = policy(tokens.to(device), attention.to(device), width, shape)              # [B, T]
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from three_policies.training.shapes import to_device


@dataclass(frozen=True)                # of a NamedTuple FSDP would look at each part in every layer
class Packing:
    """Where the tokens of B rows lie in one row of N, R of them in responses of T at most."""

    lengths: list[int]                 # [B]      tokens of each row, on the host; none is 0
    starts: Tensor                     # [B + 1]  where each row begins, and N; int32
    read: Tensor                       # [N]      places of the tokens in [B, P + T], flattened
    positions: Tensor                  # [N]      place of each token in its own row
    before: Tensor                     # [R]      place in N of the token before a response's
    responses: Tensor                  # [R]      places of the responses' tokens in [B, T]

    @staticmethod
    def of(tokens: Tensor, attention: Tensor, width: int, device: torch.device | str) -> "Packing":
        """Return where the tokens lie that `attention` [B, P + width] has; both are on the host.

        Each prompt has a token at least. All but `lengths` is sent to `device`.
        """
        there, ends = attention.bool(), attention.sum(-1).cumsum(0)
        of_response = there.clone()
        of_response[:, :tokens.shape[1] - width] = False
        return Packing(attention.sum(-1).tolist(), *to_device(
            device, F.pad(ends, (1, 0)).int(), there.flatten().nonzero()[:, 0],
            (attention.cumsum(-1) - 1)[there], of_response[there].nonzero()[:, 0] - 1,
            there[:, tokens.shape[1] - width:].flatten().nonzero()[:, 0]))

    def take(self, x: Tensor) -> Tensor:
        """Return what is beside the responses' tokens: [B, T, …] → [R, …]."""
        return x.flatten(0, 1).index_select(0, self.responses)

    def put(self, x: Tensor, width: int) -> Tensor:
        """Return it in its place, and 0 on padding: [R, M] → [B, T, M]."""
        rows = len(self.lengths)
        return x.new_zeros(rows * width, x.shape[1]).index_copy(0, self.responses, x).unflatten(
            0, (rows, width))


def attend_in_rows(query: Tensor, key: Tensor, value: Tensor, packing: Packing,
                   scale: float | None = None) -> Tensor:
    """Return softmax(scale·QKᵀ) V, each row to itself and no token to a later one.

    [1, H, N, d], and keys and values of H heads or a divisor of H → [1, N, H, d].
    """
    grouped = query.shape[1] != key.shape[1]
    if has_kernel(query, value):
        longest = max(packing.lengths)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        found: Any = varlen_attn(q, k, v, packing.starts, packing.starts, longest, longest,
                                 scale=scale, window_size=(-1, 0), enable_gqa=grouped)    # causal
        return found[None]
    rows = zip(*(x.split(packing.lengths, 2) for x in (query, key, value)))
    return torch.cat([F.scaled_dot_product_attention(*row, is_causal=True, scale=scale,
                                                     enable_gqa=grouped) for row in rows],
                     2).transpose(1, 2)


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel takes them: on CUDA, in 16 bits, with heads of such a width."""
    width = query.shape[-1]
    return (query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
            and width == value.shape[-1] and width % 8 == 0 and width <= 256)


def require_packable(model: Any) -> None:
    """Raise ValueError if a layer does more, or less, than attend to all earlier tokens by SDPA."""
    config, how = model.config.get_text_config(), model.config._attn_implementation
    kinds = getattr(config, "layer_types", None) or (
        ["sliding_attention"] if getattr(config, "sliding_window", None) else [])
    found = sorted({*kinds} - {"full_attention"}) + [f"{how} attention"] * ("sdpa" not in how)
    if found:
        raise ValueError("policy.packed=true needs layers that attend to all earlier tokens by "
                         f"SDPA, and {type(model).__name__} has {', '.join(found)}")
