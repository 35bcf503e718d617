"""Load π_old, π_θ and π_ref as Hugging Face models that return log-probs of responses.

This file decides
* Log-probs are float32, at the sampling temperature, over what min-p, top-k and top-p kept. Logits
  are float32 too where hidden states are bfloat16: a logit of 20 would be rounded by up to 0.06.
  Those of prompts are never computed, those of responses one slice of the vocabulary at a time.
* Prompts are padded on the left, responses on the right, so every response begins in one column. A
  prompt that several rows share runs once. Or rows are packed: training/packing.py.
* Weights are float32 and sharded over the ranks by FSDP2; the computation is in the dtype asked
  for. A rank alone on a CPU, in float32, has nothing to shard, move or cast: it has no FSDP.
* Nothing waits for the device: what decides a shape is computed on the host.
* Nothing is random: dropout is 0 in training too.
* A LoRA is peft's own. The model without it is π_ref. The engine gets it merged or
  apart.
Left out are tensor and pipeline parallelism and image inputs. Models with a recurrent state
instead of a cache of keys and values are refused.

    dist.init_process_group("nccl")                                     # of one rank or more
    policy = load_policy("path/to/model", 1.0, "bfloat16", torch.device("cuda"))
    log_prob = policy(tokens, attention, width)                                           # [B, T]
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy,
                                    OffloadPolicy, fully_shard)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from three_policies.training.heads import TokenLogProbs
from three_policies.training.models import empty_model, read_model, use_attention
from three_policies.training.packing import Packing, require_packable
from three_policies.training.shapes import Shape, refuse_parts, run_prompts, spread


class Policy(nn.Module):
    """A policy is a causal LM that returns log-probs of responses at the sampling temperature."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature, config = model, temperature, model.config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        # Granite divides its logits by a constant, Cohere multiplies them: another temperature.
        self.divisor = temperature * (getattr(config, "logits_scaling", None) or 1) / (
            getattr(config, "logit_scale", None) or 1)

    def forward(self, tokens: Tensor, attention: Tensor, width: int,
                shape: Shape | Packing | None = None, kept_ids: Tensor | None = None,
                candidates: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return log π(y_t | x, y_<t), float32, [B, T]; 0 beyond the rows' longest response.

        tokens, attention [B, P + T]: prompts padded left, then responses, T = width, padded right.
        A `Packing` computes nothing of padding, where the result is 0.
        kept_ids [B, T, K]: the ids over which each token's π is renormalised, itself among them.
        With candidates [B, T, K], ids of the tokens that μ may have drawn there, y_t among them or
        not, the log-probs of these in the place of y_t are returned as well: [B, T, K].
        """
        shape = shape or Shape.of(tokens.cpu(), attention.cpu(), width, tokens.device)
        start = tokens.shape[1] - width
        if isinstance(shape, Packing):
            hidden = self.packed_hidden_states(tokens, shape)                           # [n, D]
        else:
            cut = slice(start - shape.p, start + shape.t)
            hidden = self.hidden_states(tokens[:, cut], attention[:, cut], shape)
            hidden = shape.take(hidden)                                                 # [n, D]
        targets = tokens[:, start:, None]
        if candidates is not None:
            targets = torch.cat([targets, candidates], -1)                              # [B, T, M]
        kept_ids = None if kept_ids is None else shape.take(kept_ids)                   # [n, K]
        log_prob = self.log_probs(hidden, shape.take(targets), kept_ids)                # [n, M]
        own = shape.put(log_prob[:, :1], width)[..., 0]                                 # [B, T]
        return own if candidates is None else (own, shape.put(log_prob[:, 1:], width))

    def packed_hidden_states(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Return the hidden state before each token of a response: [B, P + T] → [R, D]."""
        given = tokens.flatten().index_select(0, packing.read)[None]                    # [1, N]
        # What has four dimensions is a mask that transformers would not build again; `attend` lets
        # it be. Without one transformers would look, on the device, for rows in the positions.
        states = self.model.get_decoder()(
            input_ids=given, position_ids=packing.positions[None], use_cache=False,
            attention_mask=given.new_empty(1, 1, 0, 0), packing=packing).last_hidden_state
        return states[0].index_select(0, packing.before)

    def hidden_states(self, tokens: Tensor, attention: Tensor, shape: Shape) -> Tensor:
        """Return the hidden state before each token of the response: [B, p + t] → [B, ≥ t, D]."""
        decoder, places = self.model.get_decoder(), (attention.cumsum(-1) - 1).clamp(min=0)
        p, end = shape.p, max(shape.p + 1, tokens.shape[1] - 1)
        if self.model.is_gradient_checkpointing:                       # it cannot use a cache
            return decoder(input_ids=tokens, attention_mask=attention, position_ids=places,
                           use_cache=False).last_hidden_state[:, p - 1:]
        # Samples of a group share a prompt: it runs once, and its keys and values serve them all.
        # Every rank makes both calls, whatever its lengths.
        before = run_prompts(decoder, tokens[:, :p], attention[:, :p], shape)
        after = decoder(input_ids=tokens[:, p:end], attention_mask=attention[:, :end],
                        position_ids=places[:, p:end], use_cache=True,
                        past_key_values=before.past_key_values)
        last = spread(before.last_hidden_state[:, -1:], shape.which)                    # [B, 1, D]
        hidden = torch.cat([last, after.last_hidden_state], 1)
        if hidden.requires_grad:                # the prompts' part goes to .grad, see `Apart`
            hidden.register_hook(refuse_parts)
        return hidden

    def without_lora(self, *given: Any) -> Any:
        """Return what `forward` returns, of the model without its LoRA: π_ref of a LoRA run."""
        learned = [x for x in self.parameters() if x.requires_grad]
        self.model.disable_adapters()
        for weight in learned:          # peft froze them, and FSDP asks once: in its first pass
            weight.requires_grad_()
        try:
            return self(*given)
        finally:
            self.model.enable_adapters()

    def log_probs(self, hidden: Tensor, targets: Tensor, kept_ids: Tensor | None = None) -> Tensor:
        """Return log π of each target, in float32 at least.  (eq:sampling)

        [B·t, D], [B·t, M], [B·t, K] → [B·t, M].
        """
        head: Any = self.model.get_output_embeddings()
        return TokenLogProbs.apply(hidden, head.weight, getattr(head, "bias", None), targets,
                                   self.divisor, self.softcap, kept_ids)


def load_policy(path: str, temperature: float, dtype: str, device: torch.device, *,
                gradient_checkpointing: bool = False, frozen: bool = False,
                cpu_offload: bool = False, packed: bool = False,
                lora: Callable[[Any], object] | None = None) -> Policy:
    """Load a model in float32, check it, and shard it over the ranks (FSDP2); compute in `dtype`.

    lora: freezes the model and adds what learns in its place.
    packed: the model will be given a `Packing`, so it is checked with one.
    Rank 0 reads the model and sends every rank its shards; the other ranks never hold it whole.
    """
    # cuDNN's attention gives NaN in the backward pass for masked rows (PyTorch issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    reads = dist.get_rank() == 0
    model = read_model(path) if reads else empty_model(path)
    use_attention(model)
    policy = Policy(model, temperature).train(not frozen).requires_grad_(not frozen)
    if lora is not None:
        lora(model)
    if reads:
        check(policy, packed)
    whole = policy.state_dict() if reads and dist.get_world_size() > 1 else {}
    if gradient_checkpointing:             # π_ref too: the other path would round otherwise
        model.gradient_checkpointing_enable({"use_reentrant": False})

    # Else there is nothing to shard, cast or move, and FSDP would copy weights and gradients.
    if dist.get_world_size() > 1 or dtype != "float32" or device.type != "cpu" or cpu_offload:
        shard(policy, dtype, device, cpu_offload)
    if dist.get_world_size() > 1:
        if not reads:
            policy.to_empty(device="cpu" if cpu_offload else device)
        move_buffers(policy, "cpu" if cpu_offload else device)     # torch wants all in one place
        set_model_state_dict(policy, whole, options=StateDictOptions(full_state_dict=True,
                                                                     broadcast_from_rank0=True))
        move_buffers(policy, device)                               # buffers are not offloaded
        for buffer in policy.buffers():            # e.g. rotary frequencies: in no state dict
            dist.broadcast(buffer, 0)
    return policy


def move_buffers(policy: Policy, device: torch.device | str) -> None:
    for module in policy.modules():
        module._buffers.update({name: x if x is None else x.to(device)
                                for name, x in module._buffers.items()})


def shard(policy: Policy, dtype: str, device: torch.device, cpu_offload: bool) -> None:
    """Shard the weights over the ranks, each layer of the decoder by itself (FSDP2)."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(getattr(torch, dtype), torch.float32)
    pinned = device.type in ("cuda", "xpu")    # another maker's backend may have no such memory
    where = CPUOffloadPolicy(pinned) if cpu_offload else OffloadPolicy()
    layers = policy.model._no_split_modules or ()
    for module in [x for x in policy.model.modules() if type(x).__name__ in layers]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=where)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=where)


def set_aside(policy: Policy, sums: dict[Tensor, Tensor]) -> None:
    """Add the gradient of every weight to `sums`, and leave none.

    Of offloaded weights FSDP2 brings a gradient to the host without waiting only if no other is
    there to add it to.
    """
    for weight in policy.parameters():
        if weight.grad is not None:
            sums[weight] = sums[weight].add_(weight.grad) if weight in sums else weight.grad
            weight.grad = None


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def check(policy: Policy, packed: bool = False) -> None:
    """Raise ValueError if the model's own logits give other log-probs, or if training is random.

    The model runs each row alone, the policy two at once: with one prompt for both, then with
    prompts and responses of other lengths.
    """
    model, name, training = policy.model, type(policy.model).__name__, policy.training
    runs, goes_on, of = ("prompts first and then responses, from a cache of keys and values",
                         "continue from its cache by several tokens", Shape.of)
    if packed:
        require_packable(model)
        runs, goes_on, of = "packed rows", "keep packed rows apart", Packing.of
    attention = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [0, 0] + [1] * 5])        # P = 3, T = 4
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 6, 4, 0, 0], [0, 0, 8, 3, 9, 5, 2]])
    tokens %= model.config.get_text_config().vocab_size

    policy.eval()
    for pair in [0, 1], [0, 2]:
        given = tokens[pair], attention[pair], 4, of(tokens[pair], attention[pair], 4, "cpu")
        try:
            ours = policy(*given)
        except Exception as error:         # whatever a model's own code may raise
            raise ValueError(f"{name} does not run {runs}, as policy.py does: {error}") from error
        for row, on, log_prob in zip(tokens[pair], attention[pair].bool(), ours):
            alone, length = row[on], int(on[3:].sum())
            logits = model(input_ids=alone[None]).logits[0, -length - 1:-1].float()
            right = (logits / policy.temperature).log_softmax(-1).gather(-1, alone[-length:, None])
            if not torch.allclose(log_prob[:length], right[:, 0], atol=1e-3):
                raise ValueError(f"{name} does more to its logits than policy.py knows of, or does "
                                 f"not {goes_on}, so its log-probs would be wrong")

    trained = policy.train()(*given)
    policy.train(training)
    if not torch.allclose(ours, trained, atol=1e-4):
        raise ValueError(f"{name} draws at random in training, so π_old and π_θ would differ at "
                         "equal weights: set its dropout to 0 in config.json")


@torch.no_grad()
def full_weights(policy: Policy, lora: str = "merged") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every weight, one at a time; every rank must iterate.

    `lora` says what is done with a LoRA (rollout.lora): W + sBA in float32, the same with
    both summands and their sum rounded to bfloat16, or apart: A and B alone, under peft's names.
    """
    if isinstance(policy, FSDPModule):
        policy.reshard()                   # after a forward pass alone the root is still gathered
    for name, weight in policy.model.named_parameters():
        if weight.requires_grad if lora == "apart" else ".lora_" not in name:
            place, base, own = name.partition(".base_layer.")
            if base and own == "weight":
                layer: Any = policy.model.get_submodule(place)
                grid = torch.bfloat16 if lora == "merged-bfloat16" else weight.dtype
                weight = weight.to(grid) + layer.get_delta_weight("default").to(grid)
            yield name.replace(base or " ", "."), full_tensor(weight.detach())
