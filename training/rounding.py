"""Round weights to the grids on which engines store them, and give them back in their own dtype.

Engines keep integers or eight-bit floats beside a scale, and multiply by integer × scale. Here the
product takes the weight's place, so that any engine computes with what a quantised one stores;
activations are not rounded. Scales are float32 and not rounded either.

    rounded = quantize_weights(model.named_parameters(), "int4-group-32")
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT8_MAX = 448.0                       # the largest number of float8 e4m3: 1.75 · 2⁸


def to_integers(weight: Tensor, bits: int, group: int | None = None) -> Tensor:
    """Round to step · round(w/step), where step = max|w| / (2^(bits-1) - 1).

    weight [..., out, in]. There is one step for each output channel or, with `group`, for each
    `group` neighbours along the input; the last group of a row may be smaller. The grid is
    symmetric, with at most 2^bits - 1 levels and an error of at most step/2, besides the rounding
    to the weight's dtype.
    """
    w = weight.detach().float()
    inputs = w.shape[-1]
    if group:
        w = F.pad(w, (0, -inputs % group)).unflatten(-1, (-1, group))   # [..., out, groups, group]
    step = w.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    step = torch.where(step > 0, step, 1.0)
    w = (w / step).round() * step
    if group:
        w = w.flatten(-2)[..., :inputs]
    return w.to(weight.dtype)


def to_float8(weight: Tensor, per_tensor: bool = False) -> Tensor:
    """Round to float8 e4m3, scaled so that the largest |w| becomes 448.

    weight [..., out, in], with a scale for each output channel or for each matrix. A number has
    three bits after the first, so its relative error is at most 2⁻⁴, except near 0: below 2⁻⁶ of
    the scaled numbers their spacing is 2⁻⁹.
    """
    w = weight.detach().float()
    scale = w.abs().amax((-2, -1) if per_tensor else -1, keepdim=True) / FLOAT8_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = (w / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX)      # beyond it the cast would give NaN
    return (scaled.to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


# How rollout.quantize names them. A whole number, such as 6, is that many bits per channel.
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": partial(to_integers, bits=8),
    "int4": partial(to_integers, bits=4),
    "int4-group-32": partial(to_integers, bits=4, group=32),
    "int4-group-128": partial(to_integers, bits=4, group=128),
    "float8-e4m3": to_float8,
    "float8-e4m3-tensor": partial(to_float8, per_tensor=True)}


def rounding(how: str | int) -> Callable[[Tensor], Tensor]:
    """Return the function that rounds a matrix as `how` says, or raise ValueError."""
    if how in ROUNDINGS:
        return ROUNDINGS[str(how)]
    if isinstance(how, int) and how in range(2, 17):
        return partial(to_integers, bits=how)
    raise ValueError(f"rollout.quantize={how} must be null, a number of bits from 2 to 16, or one "
                     f"of {', '.join(ROUNDINGS)}")


def quantize_weights(named_tensors: Iterable[tuple[str, Tensor]], how: str | int | None
                     ) -> Iterator[tuple[str, Tensor]]:
    """Round each matrix as `how` says, embeddings like the others.

    Vectors (norms, biases) are not rounded, and nothing is if `how` is None.
    """
    if how is None:
        return iter(named_tensors)
    round_matrix = rounding(how)
    return ((name, round_matrix(t) if t.dim() > 1 else t) for name, t in named_tensors)
