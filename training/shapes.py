"""Compute the shapes of a forward pass on the host, to avoid a device sync.

Rows are padded with 0, prompts on the left and responses on the right. A prompt that several rows
share runs once. Only torch is needed.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PINS = {"cuda"}                    # where copies go from pinned memory; other makers may have none


def pad_rows(rows: Sequence[Sequence[Any]], side: str, least: int = 0) -> tuple[Tensor, Tensor]:
    """Pad rows of several lengths with 0 on the "left" or "right".

    Returns the rows and a mask that is 1 on what was given, [B, width] each. The width is that of
    the longest row, and at least `least`.
    """
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.arange(max(least, int(lengths.max())))
    if side == "left":
        places = places.flip(0)
    mask = places < lengths[:, None]
    # The 0 in front gives a type to what may be empty.
    given = torch.tensor([0, *itertools.chain.from_iterable(rows)])[1:]
    return given.new_zeros(mask.shape).masked_scatter(mask, given), mask.long()


class Shape(NamedTuple):
    """What decides the shape of a forward pass, as the host knows it."""

    p: int                         # longest prompt
    t: int                         # longest response, at least 1
    first: Tensor                  # [prompts]  for each distinct prompt, a row that has it
    which: Tensor                  # [B]        for each row, the index of its prompt
    padded: bool                   # whether prompts differ in length

    @staticmethod
    def of(tokens: Tensor, attention: Tensor, width: int, device: torch.device | str) -> "Shape":
        """Return the shape of tokens, attention [B, P + width], which are on the host.

        `attention` is 1 on all that the model reads, a tool's tokens included: the holes of a
        response mask are not holes of this one. `first` and `which` are sent to `device`.
        """
        start = tokens.shape[1] - width
        lengths = attention[:, :start].sum(-1)                                          # [B]
        prompts, which = (2 * tokens + attention)[:, :start].unique(dim=0, return_inverse=True)
        first = which.new_empty(len(prompts)).scatter_(0, which, torch.arange(len(which)))
        t = int(attention[:, start:].sum(-1).max()) if width else 0
        first, which = to_device(device, first, which)
        return Shape(int(lengths.max()), max(1, t), first, which,
                     bool(lengths.min() < lengths.max()))

    def take(self, x: Tensor) -> Tensor:
        """Return what is beside the responses' tokens, padding included: [B, T, …] → [B·t, …]."""
        return x[:, :self.t].flatten(0, 1)

    def put(self, x: Tensor, width: int) -> Tensor:
        """Return it in its place, and 0 beyond the longest response: [B·t, M] → [B, T, M]."""
        return F.pad(x.unflatten(0, (-1, self.t)), (0, 0, 0, width - self.t))


def to_device(device: torch.device | str, *tensors: Tensor) -> list[Tensor]:
    """Copy tensors to the device; the host does not wait for their arrival.

    On CUDA the host would wait for a copy of more than 64 KB from memory that is not pinned. Memory
    that several elements share, as after `expand`, cannot be pinned: `contiguous` divides it.
    """
    if torch.device(device).type in PINS:
        tensors = tuple(x.contiguous().pin_memory() for x in tensors)
    return [x.to(device, non_blocking=True) for x in tensors]


def run_prompts(decoder: nn.Module, tokens: Tensor, attention: Tensor, shape: Shape) -> Any:
    """Run each distinct prompt once, however many rows have it; prompts are padded left.

    `tokens`, `attention`: [B, P]. Returns the decoder's output for the distinct prompts, with its
    cache spread over the B rows. Its backward pass is one of its own (`Apart`).
    """
    attention = attention[shape.first]
    output = decoder(input_ids=tokens[shape.first], use_cache=True,
                     attention_mask=attention if shape.padded else None,
                     position_ids=(attention.cumsum(-1) - 1).clamp(min=0))
    # The last hidden state, and each layer's keys and values. Under a LoRA the first layers may
    # have no gradient.
    holders: list[Any] = [output, *(x.__dict__ for x in output.past_key_values.layers)]
    places = [(holder, name) for holder in holders for name, x in holder.items()
              if isinstance(x, Tensor) and x.requires_grad]
    if places:
        weight = next(x for x in decoder.parameters() if x.requires_grad)
        apart: Any = Apart.apply(weight, [holder[name] for holder, name in places])
        for (holder, name), x in zip(places, apart):
            holder[name] = x
    cache = output.past_key_values         # `reorder_cache` does by index_select what `spread` does
    (cache.reorder_cache if tokens.is_cpu else cache.batch_select_indices)(shape.which)
    return output


def spread(x: Tensor, which: Tensor) -> Tensor:
    """Return x[which], with a gradient that is the same in every run.

    Several threads of a CPU add up the gradient of x[which] in any order; that of index_select is
    added up in one. On CUDA it is the other way round.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    """
    return x.index_select(0, which) if x.is_cpu else x[which]


def refuse_parts(_: Tensor) -> None:
    """Raise RuntimeError on autograd.grad: the gradients of `Apart` reach only `.grad`.

    This is a hook on the gradient of what the policy computes of a batch.
    """
    if not torch.autograd._is_checkpoint_valid():              # as torch.utils.checkpoint asks
        raise RuntimeError("the prompts' part of the gradient goes to .grad, so call "
                           "loss.backward() instead of torch.autograd.grad")


class Apart(torch.autograd.Function):
    """Back-propagate prompts after responses, so that two copies of all gradients never coexist.

    A policy runs twice, over prompts and over responses. In one graph autograd would hold the
    responses' gradient of every weight until the prompts' is there: a second copy of all gradients,
    and under FSDP a gathered one on every rank.

    `forward` returns the outputs without their graph. `backward` adds the prompts' gradient to
    .grad. torch.autograd.grad would return the responses' alone, which `refuse_parts` refuses.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.outputs = outputs              # in a list, where autograd does not look for tensors
        return tuple(x.detach() for x in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        torch.autograd.backward(ctx.outputs, gradients)
        return None, None
