"""π_old, π_θ and π_ref: a Hugging Face model that returns the log-probs of its responses.

This file decides
* All log-probs are at the sampling temperature, of what min-p, top-k and top-p kept, in float32;
  logits of prompts are never computed, and those of responses for one slice of the vocabulary at a
  time.
* Prompts are padded on the left, responses on the right, so that every response begins in one
  column. A prompt that several rows share is run once.
* Weights are float32 and sharded over the ranks by FSDP2; the computation is in the dtype asked.
* Nobody waits for the device: what decides a shape is found on the host.
* Nothing is drawn at random: dropout is 0 in training too.
Left out: tensor and pipeline parallelism, LoRA, image inputs.

    policy = load_policy("path/to/model", 1.0, "bfloat16", torch.device("cuda"))
    log_prob = policy(tokens, attention, width)                                           # [B, T]
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from plumbing.models import empty_model, read_model

CHUNK = 2 ** 24                    # logits at a time, in float32: 64 MB


def padded(rows: list[list], side: str, least: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of several lengths, with 0 on the "left" or "right"; and 1 where something was given.

    → [B, width] twice; the width is that of the longest, and `least` at least.
    """
    width = max(least, *map(len, rows))

    def fill(row: list) -> list:
        gap = [0] * (width - len(row))
        return [*gap, *row] if side == "left" else [*row, *gap]

    return (torch.tensor([fill(row) for row in rows]),
            torch.tensor([fill([1] * len(row)) for row in rows]))


class Shape(NamedTuple):
    """What shapes a forward pass, as the host knows it: to ask the device is to wait for it."""

    p: int                         # longest prompt
    t: int                         # longest response, at least 1
    first: Tensor                  # [prompts]  a row with each of the different prompts
    which: Tensor                  # [B]        of these, the one that each row has
    padded: bool                   # whether prompts differ in length

    @staticmethod
    def of(tokens: Tensor, attention: Tensor, width: int, device) -> "Shape":
        """Of tokens, attention [B, P + width] on the host; first and which are sent to `device`."""
        start = tokens.shape[1] - width
        lengths = attention[:, :start].sum(-1)                                          # [B]
        prompts, which = (2 * tokens + attention)[:, :start].unique(dim=0, return_inverse=True)
        first = which.new_empty(len(prompts)).scatter_(0, which, torch.arange(len(which)))
        t = int(attention[:, start:].sum(-1).max()) if width else 0
        return Shape(int(lengths.max()), max(1, t), *sent(device, first, which),
                     bool(lengths.min() < lengths.max()))


def sent(device, *tensors: Tensor) -> list[Tensor]:
    """On their way to the device; the host does not wait for their arrival."""
    return [x.to(device, non_blocking=True) for x in tensors]


def run_prompts(decoder, tokens: Tensor, attention: Tensor, shape: Shape):
    """Each prompt once, however many rows of tokens, attention [B, P] have it; padded left.

    Returns the decoder's output for the different prompts; its cache is spread over the B rows.
    """
    attention = attention[shape.first]
    output = decoder(input_ids=tokens[shape.first], use_cache=True,
                     attention_mask=attention if shape.padded else None,
                     position_ids=(attention.cumsum(-1) - 1).clamp(min=0))
    output.past_key_values.batch_select_indices(shape.which)
    return output


def mask_without_a_look(*args, attention_mask=None, allow_is_causal_skip=True, **settings):
    """transformers' mask for SDPA, which else looks on the device whether it can be left out."""
    return sdpa_mask(*args, attention_mask=attention_mask, **settings,
                     allow_is_causal_skip=allow_is_causal_skip and attention_mask is None)


transformers.AttentionMaskInterface.register("sdpa_unseen", mask_without_a_look)


class Policy(nn.Module):
    """A Hugging Face causal LM that returns log-probs of responses at the sampling temperature."""

    def __init__(self, model, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, tokens: Tensor, attention: Tensor, width: int, shape: Shape | None = None,
                kept: Tensor | None = None, candidates: Tensor | None = None):
        """tokens, attention [B, P + T]: prompts padded left, responses, T = width, padded right.
        kept [B, T, K]: the ids over which each token's π is renormalised, itself among them.

        Returns log π(y_t | x, y_<t), float32, [B, T], 0 beyond the longest response of these rows;
        with candidates [B, T, K], ids of other tokens, also theirs in the place of y_t: [B, T, K].
        """
        shape = shape or Shape.of(tokens.cpu(), attention.cpu(), width, tokens.device)
        start, (p, t) = tokens.shape[1] - width, shape[:2]
        tokens, attention = (x[:, start - p:start + t] for x in (tokens, attention))    # [B, p + t]
        hidden = self.hidden_states(tokens, attention, shape)[:, :t].flatten(0, 1)      # [B·t, D]
        targets = tokens[:, p:, None]
        if candidates is not None:
            targets = torch.cat([targets, candidates[:, :t]], -1)
        targets = targets.flatten(0, 1)                                                 # [B·t, M]
        kept = None if kept is None else kept[:, :t].flatten(0, 1)                      # [B·t, K]
        log_prob = self.log_probs(hidden, targets, kept).unflatten(0, (-1, t))
        own = F.pad(log_prob[..., 0], (0, width - t))                                   # [B, T]
        if candidates is None:
            return own
        return own, F.pad(log_prob[..., 1:], (0, 0, 0, width - t))                      # [B, T, K]

    def hidden_states(self, tokens: Tensor, attention: Tensor, shape: Shape) -> Tensor:
        """From the prompt's last one to that before the last token's: [B, p + t] → [B, ≥ t, D]."""
        decoder, places = self.model.get_decoder(), (attention.cumsum(-1) - 1).clamp(min=0)
        p, end = shape.p, max(shape.p + 1, tokens.shape[1] - 1)
        if self.model.is_gradient_checkpointing:                       # it has no use for a cache
            return decoder(input_ids=tokens, attention_mask=attention, position_ids=places,
                           use_cache=False).last_hidden_state[:, p - 1:]
        # A group's samples have one prompt: it is run once, and its keys and values serve them all.
        # All ranks run both, whatever their lengths.
        before = run_prompts(decoder, tokens[:, :p], attention[:, :p], shape)
        after = decoder(input_ids=tokens[:, p:end], attention_mask=attention[:, :end],
                        position_ids=places[:, p:end], use_cache=True,
                        past_key_values=before.past_key_values)
        last = before.last_hidden_state[shape.which, -1:]                               # [B, 1, D]
        return torch.cat([last, after.last_hidden_state], 1)

    def log_probs(self, hidden: Tensor, targets: Tensor, kept: Tensor | None = None) -> Tensor:
        """log π of each target: [B·t, D], [B·t, M], [B·t, K] → [B·t, M], float32 at least."""
        head = self.model.get_output_embeddings()
        return TokenLogProbs.apply(hidden, head.weight, getattr(head, "bias", None), targets,
                                   self.temperature, self.softcap, kept)


class TokenLogProbs(torch.autograd.Function):
    """log π(y) = z_y − log Σ_v e^{z_v} with z = W·hidden/τ: ∂ log π(y)/∂z_v = 1[v = y] − π(v).

    z exists for one slice of the vocabulary at a time, and the backward pass computes it again, so
    that memory does not grow with B·t·V. From the forward pass it takes log Σ_v e^{z_v} alone:
    [B·t]. Of M targets y each: [B·t, M]. In float32 at least. With `kept` [B·t, K], ids of which
    some may repeat, v is one of them: z = −∞ elsewhere, as in `sampling_log_probs`, whatever π
    itself would have kept.  (eq:sampling)
    """

    @staticmethod
    def slices(hidden, weight, bias, targets, temperature, softcap, kept=None):
        """Of the vocabulary: W's rows, z [B·t, slice], where in it the targets are, if they are.

        Every z is in the memory of the one before.
        """
        size = max(1, CHUNK // max(1, len(hidden)))
        space = hidden.new_empty(len(hidden) * min(size, len(weight)))
        wide = space.to(torch.promote_types(space.dtype, torch.float32))       # or itself
        for first in range(0, len(weight), size):
            rows = slice(first, first + size)
            z, product = (x[:len(hidden) * len(weight[rows])].view(len(hidden), -1)
                          for x in (wide, space))
            torch.mm(hidden, weight[rows].T, out=product)
            if wide is not space:
                z.copy_(product)
            if bias is not None:
                z.add_(bias[rows])
            if softcap:
                z.div_(softcap).tanh_().mul_(softcap)
            if temperature != 1:
                z.div_(temperature)
            if kept is not None:               # columns 0 and −1 take what is of other slices
                place = (kept - first).clamp(-1, z.shape[1]) + 1                      # [B·t, K]
                cut = z.new_ones(len(z), z.shape[1] + 2, dtype=torch.bool)
                z.masked_fill_(cut.scatter_(-1, place.long(), False)[:, 1:-1], -math.inf)
            place = targets - first
            inside = (0 <= place) & (place < z.shape[1])
            yield rows, z, place.where(inside, 0), inside

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, softcap, kept=None):
        chosen, log_sum = (hidden.new_full(shape, -math.inf)                    # z is wider
                           for shape in (targets.shape, targets.shape[:1]))
        given = weight, bias, targets, temperature, softcap, kept
        for _, z, place, inside in TokenLogProbs.slices(hidden, *given):
            log_sum = torch.logaddexp(log_sum, z.logsumexp(-1))
            chosen = torch.where(inside, z.gather(-1, place), chosen)
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum, kept)
        ctx.settings = temperature, softcap
        return chosen - log_sum[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, bias, targets, log_sum, kept = ctx.saved_tensors
        (temperature, softcap), total = ctx.settings, gradient.sum(-1, keepdim=True)
        of_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype)
        of_weight, of_bias = (None if x is None else torch.empty_like(x) for x in (weight, bias))
        given = weight, bias, targets, temperature, softcap, kept
        for rows, z, place, inside in TokenLogProbs.slices(hidden, *given):
            if softcap:                                                # of tanh; 0 where z = −∞
                slope = (1 - (z * (temperature / softcap)).square()).clamp(min=0)
            z.sub_(log_sum[:, None]).exp_().mul_(-total)
            z.scatter_add_(-1, place, gradient * inside)
            z = z if temperature == 1 else z.div_(temperature)
            of_z = (z.mul_(slope) if softcap else z).to(weight.dtype)                 # [B·t, slice]
            of_hidden += of_z @ weight[rows]
            torch.mm(of_z.T, hidden, out=of_weight[rows])
            if bias is not None:
                torch.sum(of_z, 0, out=of_bias[rows])
        return of_hidden.to(hidden.dtype), of_weight, of_bias, *[None] * 4


def load_policy(path: str, temperature: float, dtype: str, device: torch.device, *,
                gradient_checkpointing: bool = False, frozen: bool = False) -> Policy:
    """The model in float32, checked, sharded over the ranks (FSDP2), computing in `dtype`.

    Rank 0 reads it and sends every rank its shards: the others hold no whole model at any time.
    """
    # cuDNN's attention gives NaN in the backward pass for masked rows (PyTorch issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    reads = dist.get_rank() == 0
    model = read_model(path) if reads else empty_model(path)
    if model.config._attn_implementation == "sdpa":
        transformers.AttentionInterface.register("sdpa_unseen", ALL_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation("sdpa_unseen")
    policy = Policy(model, temperature).train(not frozen).requires_grad_(not frozen)
    if reads:
        check(policy)
    whole = policy.state_dict() if reads and dist.get_world_size() > 1 else {}
    if gradient_checkpointing and not frozen:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(getattr(torch, dtype), torch.float32)
    for module in list(model.modules()):
        if type(module).__name__ in (model._no_split_modules or ()):     # the decoder's layers
            fully_shard(module, mesh=mesh, mp_policy=precision)
    policy = fully_shard(policy, mesh=mesh, mp_policy=precision)
    if dist.get_world_size() > 1:
        policy = policy if reads else policy.to_empty(device=device)
        set_model_state_dict(policy, whole, options=StateDictOptions(full_state_dict=True,
                                                                     broadcast_from_rank0=True))
        for buffer in policy.buffers():            # such as rotary frequencies: in no state dict
            dist.broadcast(buffer, 0)
    return policy


@torch.no_grad()
def check(policy: Policy) -> None:
    """Refuse a model whose own logits give other log-probs, or that draws in training."""
    model = policy.model
    tokens = torch.arange(4).expand(2, -1) % model.config.get_text_config().vocab_size
    whole = (model(input_ids=tokens).logits.float() / policy.temperature).log_softmax(-1)
    whole = whole[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    ours, training = policy(tokens, torch.ones_like(tokens), 3), policy.training
    otherwise = policy.train(not training)(tokens, torch.ones_like(tokens), 3)
    policy.train(training)
    if not torch.allclose(ours, otherwise, atol=1e-4):
        raise ValueError(f"{type(model).__name__} draws at random in training, so π_old and π_θ "
                         "would differ at equal weights: set its dropout to 0 in config.json")
    if not torch.allclose(ours, whole, atol=1e-3):
        raise ValueError(f"{type(model).__name__} does more to its logits than policy.py knows of, "
                         "so its log-probs would be wrong")


def full_weights(policy: Policy):
    """(name, whole tensor) of every parameter, one at a time; every rank has to walk through it."""
    policy.reshard()               # a forward pass without a backward leaves the root gathered
    for name, parameter in policy.model.named_parameters():
        yield name, parameter.detach().full_tensor()
