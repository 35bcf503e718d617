"""Sample responses from π_rollout = μ with an engine, and record log μ of every token.

This file decides
* A sample carries log μ of the distribution its tokens were DRAWN from: after temperature, min-p,
  top-k and top-p, normalised in float32 over what is kept. The kept ids go with each token, so that
  π_old and π_θ can be normalised over the same set. The model's generation_config.json is ignored,
  and penalties are off.
* Each sample has its own seed. On a CPU prompt, seed and weights determine a sample; its batch
  changes the rounding of log μ alone. A GPU's kernels round differently for another batch
  size, so now and then another token is drawn; its recorded log μ is right all the same. On an
  H100 one of 8 responses of 128 tokens was the same alone and among 64.
* Weights enter the running engine in place, by Hugging Face name, and every one has to arrive.
* μ differs from π_old for three reasons, each a setting: the engine's arithmetic (`dtype`), rounded
  weights (`quantize`) and stale weights (`staleness`). With `update_every` the stale weights
  are replaced within a response, as an asynchronous trainer does (math/16-versions.md).
The engine here is Hugging Face's; vLLM's is in engines/vllm.py. `make_engine` of
engines/choice.py chooses between them. Left out are tensor parallelism (every rank holds a whole
engine), image inputs, tools and several turns (math/17-turns-and-tools.md), replayed routes
(math/18-routes.md).

    engine = make_engine("auto", "path/to/model", dtype="bfloat16", max_model_len=512)
    samples = engine.generate([[5, 6]], [0], temperature=1.0, max_tokens=8, eos_ids=[1])
    engine.close()
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

from three_policies.estimators import sampling_log_probs
from three_policies.training.heads import widen_head
from three_policies.training.rounding import quantize_weights
from three_policies.training.shapes import Shape, pad_rows, run_prompts, to_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEPT = 1024  # largest top-k: 4 KB a token in training, 8 with ties; a vocabulary of bytes fits
NamedTensor = tuple[str, Tensor]  # a weight, by its Hugging Face name


@dataclass(frozen=True)
class Sample:
    """One response y of |y| tokens, with what the engine recorded of each token."""

    tokens: list[int]  # |y| ids; when the end token was sampled, it is the last of them
    rollout_log_prob: list[float]  # |y| values of log μ(y_t | x, y_<t), in nats
    finished: bool  # False: cut at max_tokens
    kept_ids: list[list[int]] | None = None  # |y| sets: the ids μ was cut to; None: all
    candidates: tuple[Tensor, Tensor] | None = None  # ids and log μ of all kept tokens or of the
    # likeliest, [|y|, K] each, the likeliest first, −∞ where there are fewer; None: not asked for
    versions: list[int] | None = None  # |y| pushes, whose weights drew the token; None: one for all

    @property
    def crossed(self) -> bool:
        """True if the engine's weights changed within the response."""
        return len(set(self.versions or [])) > 1


class InFlight(NamedTuple):
    """The weights that an engine takes in turn, between two tokens of every response."""

    every: int  # tokens between two updates
    recompute: bool  # run the earlier tokens again through new weights, or keep their cache
    versions: list[tuple[int, dict[str, Tensor]]]  # the push and its weights, oldest first

    def stages(self, max_tokens: int) -> Iterator[tuple[int, dict[str, Tensor], int]]:
        """Yield (push, weights, tokens to sample with them); the newest weights sample the rest."""
        for i, (push, weights) in enumerate(self.versions, 1):
            tokens = max_tokens if i == len(self.versions) else min(max_tokens, self.every)
            max_tokens -= tokens
            if tokens:
                yield push, weights, tokens


class Cut(NamedTuple):
    """How min-p, top-k, then top-p cut μ, and with it π_old, π_θ and π_ref.  (eq:sampling)"""

    top_p: float
    top_k: int  # 0: nothing is cut
    min_p: float
    most: int  # most ids in a set; ties with the k-th are kept too, and bfloat16 has many

    @staticmethod
    def of(top_p: float, top_k: int | None, min_p: float, vocabulary: int) -> "Cut":
        """Return the cut that these settings make; a top_k of None, 0 or -1 keeps every token.

        Raises ValueError where more than KEPT ids may be kept. Only top-k bounds their number: of
        equally likely tokens min-p keeps all, and top-p the share p.
        """
        k = top_k if top_k and 0 < top_k < vocabulary else vocabulary
        if top_p == 1 and min_p == 0 and k == vocabulary:
            return Cut(1.0, 0, 0.0, 0)
        if k > KEPT:
            raise ValueError(f"rollout.top_p={top_p}, rollout.top_k={top_k} and rollout.min_p="
                             f"{min_p} may keep {k} of {vocabulary} tokens, and training replays "
                             f"at most {KEPT}: set rollout.top_k to 1 … {KEPT}, or rollout.top_p=1 "
                             "and rollout.min_p=0 without it.")
        return Cut(top_p, k, min_p, 2 * k + 16)

    def check(self, kept_ids: list[list[int]]) -> list[list[int]]:
        """Return the kept ids of one response; raise ValueError if a token has more than `most`."""
        if max(map(len, kept_ids)) > self.most:
            raise ValueError(f"rollout.top_k={self.top_k} keeps more than {self.most} tokens, for "
                             "as many tie with the last; rollout.dtype=float32 ties fewer.")
        return kept_ids


class Engine(Protocol):
    """An engine holds weights of its own, and samples with them."""

    name: str
    cut: Cut
    max_model_len: int  # longest prompt plus response

    @property
    def given_back(self) -> int:
        """Return the bytes that a sleeping engine has given back and torch goes on counting."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *,
                 temperature: float, max_tokens: int, eos_ids: Collection[int]) -> list[Sample]:
        """Return one Sample per prompt; temperature 0 is greedy, with log-probs of temperature 1.

        Seeds must differ in their low 32 bits.
        """
        ...

    def update_weights(self, named_tensors: Iterable[NamedTensor]) -> None:
        """Load all weights, as full tensors, into the running engine."""

    def sleep(self) -> None:
        """Give the GPU's memory back for the update; then `update_weights` precedes `generate`."""

    def wake(self) -> None:
        """Re-acquire the GPU's memory; `generate` and `update_weights` do so by themselves."""

    def close(self) -> None:
        """Shut the engine down; a second call does nothing."""


class TransformersEngine:
    """Sample by Hugging Face's `generate` from a model of its own; it needs nothing else."""

    name, given_back = "transformers", 0

    def __init__(self, path: str | PathLike[str], *, dtype: str, max_model_len: int,
                 device: torch.device | str, batch_size: int, cut: Cut, candidates: int,
                 lora: Callable[[Any], object] | None = None) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")     # SDPA would leave the cap out
        if lora is not None:
            lora(model)
        self.model = model.to(device).eval()
        if self.model.dtype.itemsize < 4:
            widen_head(self.model.get_output_embeddings())
        # `generate` takes what its config leaves open from the model's, so that one is emptied.
        self.model.generation_config = GenerationConfig()
        self.max_model_len, self.batch_size = max_model_len, batch_size
        self.cut, self.candidates = cut, candidates

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *,
                 temperature: float, max_tokens: int, eos_ids: Collection[int],
                 in_flight: InFlight | None = None) -> list[Sample]:
        """Return one Sample per prompt, as `Engine.generate` says, `batch_size` at a time.

        With `in_flight` each batch begins with its oldest weights, and the engine is left with
        others than before.
        """
        check_request(self, prompts, seeds, temperature, max_tokens)
        samples = []
        for start in range(0, len(prompts), self.batch_size):
            batch = slice(start, start + self.batch_size)
            samples += self._batch(prompts[batch], seeds[batch], temperature, max_tokens, eos_ids,
                                   in_flight)
        return samples

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float,
               max_tokens: int, eos_ids: Collection[int], in_flight: InFlight | None
               ) -> list[Sample]:
        width, device = max(map(len, prompts)), self.model.device
        ids, mask = pad_rows(prompts, "left")  # [B, P]
        sampler = GumbelMax(seeds, temperature, self.cut, self.candidates, device)
        shape = Shape.of(ids[:, :-1], mask[:, :-1], 0, device) if width > 1 else None
        (ids, mask), cache, versions = to_device(device, ids, mask), None, []

        for push, weights, most in in_flight.stages(max_tokens) if in_flight else [
                (None, {}, max_tokens)]:
            if weights:
                with torch.inference_mode(False):  # the weights are no inference tensors
                    self.update_weights(weights.items())
            if shape and not versions:  # all but the last token, which `generate` runs itself
                cache = run_prompts(self.model.get_decoder(), ids[:, :-1], mask[:, :-1],
                                    shape).past_key_values
            config = GenerationConfig(do_sample=False, max_new_tokens=most, pad_token_id=0,
                                      eos_token_id=list(eos_ids) or None,
                                      return_dict_in_generate=True)
            output: Any = self.model.generate(ids, attention_mask=mask, generation_config=config,
                                              logits_processor=[sampler], past_key_values=cache)
            drawn = output.sequences.shape[1] - ids.shape[1]
            versions += [push] * drawn
            ids, mask = output.sequences, nn.functional.pad(mask, (0, drawn), value=1)
            cache = None if in_flight and in_flight.recompute else output.past_key_values
            if drawn < most:
                break  # all responses have ended; one that ended before is cut there below

        tokens, recorded = ids[:, width:], torch.stack(sampler.rollout_log_prob, dim=1)  # [B, T]
        samples, none = [], [None] * len(tokens)
        kept_ids: list[Any] = [*zip(*sampler.kept_ids)] or none
        tables: list[Any] = [*zip(*(torch.stack(x, 1).cpu() for x in zip(*sampler.tables)))] or none
        for row, values, sets, table in zip(tokens.tolist(), recorded.tolist(), kept_ids, tables,
                                            strict=True):
            ends = [t for t, token in enumerate(row) if token in eos_ids]
            length = ends[0] + 1 if ends else len(row)  # what follows the end token is padding
            samples.append(Sample(row[:length], values[:length], finished=bool(ends),
                                  kept_ids=sets and self.cut.check(list(sets[:length])),
                                  candidates=table and (table[0][:length], table[1][:length]),
                                  versions=versions[:length] if in_flight else None))
        return samples

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[NamedTensor]) -> None:
        """Copy full tensors into the running model, cast to its dtype."""
        weights = self.model.state_dict()
        for name, tensor in every_weight_once(named_tensors, self.model):
            weights[name].copy_(tensor)

    def sleep(self) -> None:
        """Do nothing: the cache lives only while `generate` runs."""

    wake = close = sleep


class GumbelMax(LogitsProcessor):
    """Sample by an argmax, so that `generate` stays greedy and adds nothing of its own.

    argmax_v (log μ(v) + G_v) ~ μ, with independent G_v = -log E_v and E_v ~ Exp(1). Each sample has
    a generator of its own, so its neighbours in the batch do not matter. Only the drawn token's
    log-prob is kept: [B] per position instead of [B, V].
    """

    def __init__(self, seeds: Sequence[int], temperature: float, cut: Cut, candidates: int,
                 device: torch.device) -> None:
        self.temperature, self.cut, self.candidates = temperature, cut, candidates
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.rollout_log_prob: list[Tensor] = []  # one [B] per position
        self.kept_ids: list[list[list[int]]] = []  # B sets per position, if there is a cut
        self.tables: list[tuple[Tensor, Tensor]] = []  # likewise candidates' ids, log μ: [B, K]

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        log_mu, _ = sampling_log_probs(  # [B, V]
            logits.float(), self.temperature or 1.0, self.cut.top_k, self.cut.top_p,
            self.cut.min_p)
        scores = log_mu
        if self.temperature > 0:
            exponential = torch.empty_like(log_mu)
            for row, generator in zip(exponential, self.generators, strict=True):
                row.exponential_(generator=generator)
            scores = log_mu - exponential.log()
        drawn = scores.argmax(-1, keepdim=True)  # [B, 1]: what `generate` is about to take
        self.rollout_log_prob.append(log_mu.gather(-1, drawn).squeeze(-1))
        if self.cut.most:
            kept = log_mu > -math.inf
            ids = kept.nonzero()[:, 1].cpu().split(kept.sum(-1).tolist())
            self.kept_ids.append([x.tolist() for x in ids])
        if self.candidates:
            likeliest = log_mu.topk(min(self.cut.most or self.candidates, log_mu.shape[-1]))
            self.tables.append((likeliest.indices.int(), likeliest.values))
        return scores


class WeightSync:
    """Give the engine the policy's weights, `staleness` pushes old and rounded as it stores them.

    After push n (n = 0 before the first step) the engine holds the weights of push
    max(0, n - staleness). So one machine imitates an asynchronous trainer. The snapshots wait in
    host memory as the engine will get them: already rounded, and matrices in its dtype.
    """

    def __init__(self, engine: Engine, staleness: int = 0,
                 quantize: str | int | None = None, dtype: str = "float32") -> None:
        if staleness < 0:
            raise ValueError(f"rollout.staleness={staleness} must be 0 or more weight syncs.")
        quantize_weights([], quantize)  # raises now rather than at the first push
        self.engine, self.staleness, self.quantize = engine, staleness, quantize
        self.dtype = DTYPES[dtype]
        self.waiting: deque[dict[str, Tensor]] = deque(maxlen=staleness + 1)  # oldest first

    def push(self, named_tensors: Iterable[NamedTensor]) -> None:
        """Take the policy's full weights, and load into the engine those that are due.

        It is called at the start, also of a resumed run, and after every step.
        """
        named_tensors = quantize_weights(named_tensors, self.quantize)
        if self.staleness > 0:
            self.waiting.append(dict(map(self.copy_to_host, named_tensors)))
            named_tensors = self.waiting[0].items()
        self.engine.update_weights(named_tensors)

    @property
    def as_is(self) -> bool:
        """True if a push loads the policy's own weights, neither rounded nor stale."""
        return self.staleness == 0 and self.quantize is None

    def in_flight(self, every: int, recompute: bool, newest: int) -> InFlight:
        """Return the weights that wait, of which the newest are those of push `newest`."""
        first = newest + 1 - len(self.waiting)
        return InFlight(every, recompute, [*enumerate(self.waiting, first)])

    def copy_to_host(self, named_tensor: NamedTensor) -> NamedTensor:
        """Copy a weight to the host, a matrix in the engine's dtype.

        Vectors keep their dtype, since engines keep some of them in float32.
        """
        name, tensor = named_tensor
        dtype = self.dtype if tensor.dim() > 1 else tensor.dtype
        return name, tensor.detach().to("cpu", dtype, copy=True)

    def state_dict(self) -> dict[str, list[dict[str, Tensor]]]:
        """Return the older snapshots; the newest is the policy, which a resumed run pushes."""
        return {"waiting": list(self.waiting)[:-1]}

    def load_state_dict(self, state: dict[str, list[dict[str, Tensor]]]) -> None:
        """Restore the older snapshots; a `push` of the restored policy then restores the engine."""
        self.waiting = deque(state["waiting"], maxlen=self.staleness + 1)


# ---- the work: nothing below is about the method ------------------------------------------------


def check_request(engine: Engine, prompts: Sequence[Sequence[int]], seeds: Sequence[int],
                  temperature: float, max_tokens: int) -> None:
    """Raise ValueError with one sentence if the engine must not take this request."""
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts need as many seeds, not {len(seeds)}.")
    if temperature != 0 and temperature < 0.01:  # vLLM would raise it to 0.01 silently
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or at least 0.01.")
    if temperature == 0 and engine.cut.most:
        raise ValueError("temperature=0 (greedy) is for engines without top_p, top_k and min_p.")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1.")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty: there is nothing to continue.")
        if len(prompt) + max_tokens > engine.max_model_len:
            raise ValueError(f"prompt {index} has {len(prompt)} tokens and no room for max_tokens="
                             f"{max_tokens} within max_model_len={engine.max_model_len}.")


def every_weight_once(named_tensors: Iterable[NamedTensor], model: nn.Module
                      ) -> Iterator[NamedTensor]:
    """Yield (name, tensor) for each parameter of `model`; raise if one is unknown or missing.

    Tied parameters (lm_head and embedding) are one parameter with two names, and either will do.
    Of a model with a LoRA only the LoRA's weights change.
    """
    first_name: dict[int, str] = {}
    names: dict[str, tuple[str, torch.Size]] = {}
    adapted = hasattr(model, "peft_config")
    for name, parameter in model.state_dict(keep_vars=True).items():
        if isinstance(parameter, nn.Parameter) and (parameter.requires_grad or not adapted):
            names[name] = first_name.setdefault(id(parameter), name), parameter.shape
    left = set(first_name.values())
    for name, tensor in named_tensors:
        if name not in names:
            raise ValueError(f"the engine's model has no weight named {name!r}.")
        target, shape = names[name]
        if tensor.shape != shape:
            raise ValueError(f"weight {name!r} has shape {list(tensor.shape)}, not {list(shape)}.")
        if target in left:
            left.remove(target)
            yield target, tensor
    if left:
        raise ValueError(f"{len(left)} weights of the engine's model are missing: {min(left)}, …")
