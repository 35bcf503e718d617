"""π_rollout = μ: the engines that sample, and the weights that they sample with.

What this file decides
* A sample carries log μ of the distribution its tokens were DRAWN from: temperature applied,
  cut by min-p, top-k and top-p where these are set, normalised in float32 over what is left. That
  set goes with each token, so that π_old and π_θ can be normalised over the same one. The model's
  generation_config.json has no say in any of it, and penalties are off.
* One seed per sample. A sample depends on its prompt, its seed and the weights, not on its batch:
  so it is on a CPU. A GPU's kernels round otherwise for another size of batch, and now and then
  another token is drawn; what is recorded of it is still its own log μ.
* Weights enter the running engine in place, by Hugging Face name, and every one has to arrive.
* μ differs from π_old for three reasons, each a setting: the engine's arithmetic (`dtype`),
  rounded weights (`quantize_bits`) and late weights (`staleness`).
* On a GPU with Triton vLLM takes its second model runner, whose sampler is other code than the CPU
  tests run; the contract (seeds, processed log-probs in float32) is the same, and was not tried.
What it leaves out: tensor parallelism (every rank holds a whole engine), LoRA, image inputs, and
models whose modules and checkpoints name or shape their weights differently (fused experts).

    engine = make_engine("auto", "path/to/model", dtype="bfloat16", max_model_len=512)
    samples = engine.generate([[5, 6]], [0], temperature=1.0, max_tokens=8, eos_ids=[1])
    engine.close()
"""

import difflib
import math
import warnings
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LogitsProcessor

from adapters.vllm import as_guest, import_vllm, repack_head
from estimators import sampling_log_probs
from policy import Shape, padded, run_prompts, sent

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEPT = 1024  # ids that a cut may leave: 4 KB a token in training, and a vocabulary of bytes fits


@dataclass(frozen=True)
class Sample:
    """One sampled response y of |y| tokens."""

    tokens: list[int]  # |y| ids; when the end token was sampled, it is the last of them
    log_probs: list[float]  # |y| values of log μ(y_t | x, y_<t), in nats
    finished: bool  # False: cut at max_tokens
    kept: list[list[int]] | None = None  # |y| sets of ids, what μ was cut to; None: all
    candidates: list[dict[int, float]] | None = None  # |y| tables {id: log μ}, of all kept
    # or of the likeliest; None: not asked for


class Cut(NamedTuple):
    """Min-p, top-k, then top-p: what μ is cut to, and with it π_old, π_θ, π_ref.  (eq:sampling)"""

    top_p: float
    top_k: int  # 0: nothing is cut
    min_p: float
    most: int  # ids in a set: what ties with the k-th is kept too, and bfloat16 has many ties

    @staticmethod
    def of(top_p, top_k, min_p, vocabulary):
        """Return the cut that these settings make; a top_k of None, 0 or -1 keeps every token.

        Raises ValueError where a set may have more than KEPT ids. Top-k alone bounds a set: of
        equally likely tokens min-p keeps all, and top-p the share p.
        """
        k = top_k if 0 < (top_k or 0) < vocabulary else vocabulary
        if top_p == 1 and min_p == 0 and k == vocabulary:
            return Cut(1.0, 0, 0.0, 0)
        if k > KEPT:
            raise ValueError(f"rollout.top_p={top_p}, rollout.top_k={top_k} and rollout.min_p="
                             f"{min_p} may keep {k} of {vocabulary} tokens, and training replays "
                             f"at most {KEPT}: set rollout.top_k to 1 … {KEPT}, or rollout.top_p=1 "
                             "and rollout.min_p=0 without it.")
        return Cut(top_p, k, min_p, 2 * k + 16)

    def checked(self, kept):
        """The sets of one response; raises ValueError where one has more than `most` ids."""
        if max(map(len, kept)) > self.most:
            raise ValueError(f"rollout.top_k={self.top_k} keeps more than {self.most} tokens, for "
                             "as many tie with the last; rollout.dtype=float32 ties fewer.")
        return kept


def make_engine(
    kind, path, *, dtype, max_model_len, gpu_memory_utilization=0.4, device="cpu", batch_size=512,
    enforce_eager=None, top_p=1.0, top_k=None, min_p=0.0, candidates=0
):
    """The engine named `kind`: "vllm", "transformers", or "auto", which is vLLM where it imports.

    path: directory or hub id of the first weights. dtype: a key of DTYPES. max_model_len: longest
    prompt plus response. gpu_memory_utilization: vLLM's share of the GPU while awake. batch_size:
    most samples at a time. enforce_eager: vLLM without CUDA graphs and compilation, far slower on a
    GPU; None: on a CPU only. top_p, top_k, min_p: see `Cut.of`. candidates: with each token come
    those of μ's likeliest, or with a cut all that are left. Under torchrun, call
    `init_process_group` before and `close` the engine before `destroy_process_group`.
    """
    kinds = ["auto", "vllm", "transformers"]
    for name, value, known in [("engine", kind, kinds), ("dtype", dtype, list(DTYPES))]:
        if value not in known:
            nearest = difflib.get_close_matches(str(value), known, n=1, cutoff=0)[0]
            raise ValueError(f"rollout.{name}={value!r} is unknown; did you mean {nearest!r}?")
    vocabulary = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    settings = dict(dtype=dtype, max_model_len=max_model_len, device=device, batch_size=batch_size,
                    cut=Cut.of(top_p, top_k, min_p, vocabulary),
                    candidates=min(candidates, vocabulary))
    if kind != "transformers":
        try:
            import_vllm()
        except ImportError as error:
            if kind == "vllm":
                raise RuntimeError(f"rollout.engine=vllm: {error}") from None
            if find_spec("vllm"):  # installed and broken is worth a word, absent is not
                warnings.warn(f"rollout.engine=auto takes transformers: {error}", stacklevel=2)
        else:
            return VllmEngine(path, gpu_memory_utilization=gpu_memory_utilization,
                              enforce_eager=enforce_eager, **settings)
    return TransformersEngine(path, **settings)


class TransformersEngine:
    """Hugging Face `generate` over a model of its own; needs no further installation."""

    name = "transformers"

    def __init__(self, path, *, dtype, max_model_len, device, batch_size, cut, candidates):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).to(device)
        self.model.eval()
        # `generate` fills what its own config leaves open from this one, so this one is emptied.
        self.model.generation_config = GenerationConfig()
        self.max_model_len, self.batch_size = max_model_len, batch_size
        self.cut, self.candidates = cut, candidates

    def generate(self, prompts, seeds, *, temperature, max_tokens, eos_ids, progress=None):
        """One Sample per prompt; temperature 0 is greedy, with the log-probs of temperature 1.

        Seeds must differ in their low 32 bits. `progress(n)` is told of every n finished samples.
        """
        _check_request(self, prompts, seeds, temperature, max_tokens)
        samples = []
        for start in range(0, len(prompts), self.batch_size):
            batch = slice(start, start + self.batch_size)
            samples += self._batch(prompts[batch], seeds[batch], temperature, max_tokens, eos_ids)
            if progress is not None:
                progress(len(prompts[batch]))
        return samples

    @torch.inference_mode()
    def _batch(self, prompts, seeds, temperature, max_tokens, eos_ids):
        width, device = max(map(len, prompts)), self.model.device
        ids, mask = padded(prompts, "left")  # [B, P]
        config = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, pad_token_id=0,
                                  eos_token_id=list(eos_ids) or None)
        sampler = GumbelMax(seeds, temperature, self.cut, self.candidates, device)
        shape = Shape.of(ids[:, :-1], mask[:, :-1], 0, device) if width > 1 else None
        (ids, mask), prefilled = sent(device, ids, mask), {}
        if shape:  # all but the last token, which `generate` runs itself
            before = run_prompts(self.model.get_decoder(), ids[:, :-1], mask[:, :-1], shape)
            prefilled["past_key_values"] = before.past_key_values
        output = self.model.generate(ids, attention_mask=mask, generation_config=config,
                                     logits_processor=[sampler], **prefilled)
        tokens, log_probs = output[:, width:], torch.stack(sampler.log_probs, dim=1)  # [B, T]
        samples, none = [], [None] * len(tokens)
        kept, tables = ([*zip(*x)] or none for x in (sampler.kept, sampler.tables))
        for row, values, sets, table in zip(tokens.tolist(), log_probs.tolist(), kept, tables,
                                            strict=True):
            ends = [t for t, token in enumerate(row) if token in eos_ids]
            length = ends[0] + 1 if ends else len(row)  # what follows the end token is padding
            samples.append(Sample(row[:length], values[:length], finished=bool(ends),
                                  kept=sets and self.cut.checked(list(sets[:length])),
                                  candidates=table and list(table[:length])))
        return samples

    @torch.no_grad()
    def update_weights(self, named_tensors):
        """Copy full tensors into the running model, cast to its dtype."""
        weights = self.model.state_dict()
        for name, tensor in _every_weight_once(named_tensors, self.model):
            weights[name].copy_(tensor)

    def sleep(self):
        """Nothing to give back: the cache lives only while `generate` runs."""

    wake = close = sleep


class GumbelMax(LogitsProcessor):
    """Sampling as an argmax, so that `generate` stays greedy and adds nothing of its own.

    argmax_v (log μ(v) + G_v) ~ μ, with independent G_v = -log E_v and E_v ~ Exp(1). Each sample
    takes its noise from a generator of its own, so its neighbours in the batch do not matter; and
    only the drawn token's log-prob is kept, [B] a position instead of [B, V].
    """

    def __init__(self, seeds, temperature, cut, candidates, device):
        self.temperature, self.cut, self.candidates = temperature, cut, candidates
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.log_probs = []  # one [B] per position
        self.kept = []  # B sets of ids per position, where something is cut
        self.tables = []  # B tables {id: log μ} per position, where candidates are asked for

    def __call__(self, input_ids, logits):
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
        self.log_probs.append(log_mu.gather(-1, drawn).squeeze(-1))
        if self.cut.most:
            kept = log_mu > -math.inf
            ids = kept.nonzero()[:, 1].cpu().split(kept.sum(-1).tolist())
            self.kept.append([x.tolist() for x in ids])
        if self.candidates:
            likeliest = log_mu.topk(min(self.cut.most or self.candidates, log_mu.shape[-1]))
            self.tables.append([{v: x for v, x in zip(*row) if x > -math.inf} for row in zip(
                likeliest.indices.tolist(), likeliest.values.tolist())])
        return scores


class VllmEngine:
    """vLLM inside the trainer's process, a whole engine on every rank."""

    name = "vllm"

    def __init__(self, path, *, dtype, max_model_len, gpu_memory_utilization, enforce_eager, device,
                 batch_size, cut, candidates):
        LLM, self.SamplingParams = import_vllm()
        self.llm, self.max_model_len, self.asleep = None, max_model_len, set()
        self.on_gpu = torch.device(device).type == "cuda"
        self.eager = not self.on_gpu if enforce_eager is None else enforce_eager
        self.cut, self.candidates, self.group_is_ours = cut, candidates, not dist.is_initialized()
        # Under torchrun: the GPU of this rank rather than the first one, and ranks that agree.
        alone = self.group_is_ours or dist.get_world_size() == 1
        with torch.device("meta"):  # names and shapes of the weights, without the weights
            self.layout = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        # On a GPU vLLM returns what was kept (by its source: the authors have not tried it). On a
        # CPU it does not, but log-probs are -inf where cut: one more is asked for than may be kept.
        vocabulary = self.layout.config.get_text_config().vocab_size
        of_cut = cut.most + 1 if cut.most and (candidates or not self.on_gpu) else candidates
        self.asked = min(of_cut, vocabulary)
        with as_guest():
            self.llm = LLM(
                str(path), dtype=dtype, max_model_len=max_model_len,
                max_num_seqs=min(batch_size, 1024),
                logprobs_mode="processed_logprobs",  # after temperature and cut, not before them
                max_logprobs=self.asked, return_sampling_mask=self.on_gpu and cut.most > 0,
                generation_config="vllm",  # the model's own cuts and penalties stay out
                enable_prefix_caching=False,  # a cached prefix would outlive its weights
                enable_chunked_prefill=self.on_gpu,  # on a CPU it fails where requests have seeds
                enforce_eager=self.eager,
                enable_sleep_mode=self.on_gpu, gpu_memory_utilization=gpu_memory_utilization,
                distributed_executor_backend=None if alone else "external_launcher",
                tensor_parallel_size=1, skip_tokenizer_init=True, disable_log_stats=True)

    def generate(self, prompts, seeds, *, temperature, max_tokens, eos_ids, progress=None):
        """As TransformersEngine.generate; vLLM batches by itself, so progress comes at the end."""
        _check_request(self, prompts, seeds, temperature, max_tokens)
        self.wake()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            self.SamplingParams(
                seed=seed, temperature=temperature,
                top_p=self.cut.top_p, top_k=self.cut.top_k, min_p=self.cut.min_p,
                max_tokens=max_tokens, logprobs=self.asked,  # beside that of the drawn token
                stop_token_ids=list(eos_ids), ignore_eos=True,  # ours, not the model's idea of them
                detokenize=False)
            for seed in seeds
        ]
        # Eager vLLM still compiles one small function: that takes 3 s and a C++ compiler.
        with torch.compiler.set_stance("force_eager") if self.eager else nullcontext():
            outputs = self.llm.generate(requests, params, use_tqdm=False)
        if progress is not None:
            progress(len(outputs))
        return [
            Sample(list(o.token_ids),
                   [step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)],
                   finished=o.finish_reason == "stop", kept=self._kept(o),
                   candidates=self._tables(o) if self.candidates else None)
            for o in (request.outputs[0] for request in outputs)
        ]

    def _kept(self, output):
        if not self.cut.most:
            return None
        return self.cut.checked(output.sampling_mask.token_ids if self.on_gpu else [
            [v for v, x in step.items() if x.logprob > -math.inf] for step in output.logprobs])

    def _tables(self, output):
        """Without the drawn token where it is beyond them: candidates do not depend on the draw."""
        last = self.cut.most + 1 if self.cut.most else self.candidates
        return [{v: x.logprob for v, x in step.items() if x.logprob > -math.inf and x.rank <= last}
                for step in output.logprobs]

    def update_weights(self, named_tensors):
        """Load full tensors through vLLM's own loader, which fuses, repacks and casts them.

        They may come from a generator, one at a time; if it fails halfway, so has the engine.
        """
        self.wake("weights")  # the cache can wait until there is something to generate
        weights = _every_weight_once(named_tensors, self.layout)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.layout.config.tie_word_embeddings and not self.on_gpu:
            self.llm.apply_model(repack_head)

    def sleep(self):
        """Give the GPU's memory back for the update (not tried on a GPU by the authors).

        Level 1 moves the weights to the host and drops the cache. Level 2 would drop the weights
        too, sparing one copy, but then waking without a full update would sample from garbage.
        """
        if self.on_gpu and not self.asleep:
            self.llm.sleep(level=1)
            self.asleep = {"weights", "kv_cache"}

    def wake(self, *parts):
        """What is asleep of these parts, "weights" and "kv_cache"; none named: of both."""
        if parts := [part for part in parts or ("weights", "kv_cache") if part in self.asleep]:
            self.llm.wake_up(tags=parts)
            self.asleep -= set(parts)

    def close(self):
        """Shut vLLM down and keep the trainer's process group; a second call does nothing."""
        if self.llm is None:
            return
        with suppress(Exception):  # memory of a sleeping engine would be unmapped a second time
            self.wake()
        core, self.llm = self.llm.llm_engine.engine_core, None
        destroy = dist.destroy_process_group

        def destroy_ours(group=None):  # vLLM would destroy the default group as its own
            if (group is not None or self.group_is_ours) and dist.is_initialized():
                destroy(group)

        with mock.patch.object(dist, "destroy_process_group", destroy_ours):
            core.shutdown()


class WeightSync:
    """What the engine sees of the policy: weights `staleness` pushes late, rounded to few bits.

    After push number n (n = 0 before the first update) the engine holds the weights of push
    max(0, n - staleness): an asynchronous trainer on one machine. The snapshots wait in host
    memory as the engine will get them: rounded already, and matrices in its dtype.
    """

    def __init__(self, engine, staleness=0, quantize_bits=None, dtype="float32"):
        if staleness < 0:
            raise ValueError(f"rollout.staleness={staleness} must be 0 or more updates.")
        quantize_weights([], quantize_bits)  # raises now rather than at the first push
        self.engine, self.staleness, self.bits = engine, staleness, quantize_bits
        self.dtype = DTYPES[dtype]
        self.waiting = deque(maxlen=staleness + 1)  # the latest pushes, oldest first

    def push(self, named_tensors):
        """To be called with the policy's full weights at the start, also of a resumed run, and
        after every update."""
        named_tensors = quantize_weights(named_tensors, self.bits)
        if self.staleness > 0:
            self.waiting.append(dict(map(self.kept, named_tensors)))
            named_tensors = self.waiting[0].items()
        self.engine.update_weights(named_tensors)

    def kept(self, named_tensor):
        """A weight as it waits. Engines keep some vectors in float32, so these stay as they are."""
        name, tensor = named_tensor
        dtype = self.dtype if tensor.dim() > 1 else tensor.dtype
        return name, tensor.detach().to("cpu", dtype, copy=True)

    def state_dict(self):
        """The older snapshots; the newest is the policy itself, which a resumed run pushes."""
        return {"waiting": list(self.waiting)[:-1]}

    def load_state_dict(self, state):
        """Follow it with a `push` of the restored policy: then the engine is as it was."""
        self.waiting = deque(state["waiting"], maxlen=self.staleness + 1)


def quantize_weights(named_tensors, bits=None):
    """Round matrices to `bits` bits and back: w → step·round(w/step).

    One step = max|w| / (2^(bits-1) - 1) per output channel (all indices but the last): symmetric,
    at most 2^bits - 1 levels, error at most step/2. Embeddings are matrices like any other. Vectors
    (norms, biases) are left alone, and everything is when bits is None.
    """
    if bits is not None and bits not in range(2, 17):
        raise ValueError(f"rollout.quantize_bits={bits} must be null or a number from 2 to 16.")
    if bits is None:
        return iter(named_tensors)
    return ((name, _rounded(t, bits) if t.dim() > 1 else t) for name, t in named_tensors)


def _rounded(weight, bits):
    w = weight.detach().float()  # [..., out, in]
    step = w.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)  # [..., out, 1]
    step = torch.where(step > 0, step, 1.0)
    return ((w / step).round() * step).to(weight.dtype)


# ---- plumbing: nothing below is about the method ------------------------------------------------


def _check_request(engine, prompts, seeds, temperature, max_tokens):
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts need as many seeds, not {len(seeds)}.")
    if temperature != 0 and temperature < 0.01:  # vLLM would raise it to 0.01 without a word
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


def _every_weight_once(named_tensors, model):
    """Yield (name, tensor) for each parameter of `model`; raise if one is unknown or missing.

    Tied parameters (lm_head and embedding) are one parameter with two names: either will do.
    """
    first_name, names = {}, {}
    for name, parameter in model.state_dict(keep_vars=True).items():
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
