"""Choose an engine by its name: vLLM where it imports, else Hugging Face's `generate`.

An unknown name is answered with the nearest one. A vLLM that is installed but does not import is
worth a warning.
"""

import difflib
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from os import PathLike
from typing import Any

import torch
from transformers import AutoConfig

from three_policies.engines.vllm import VllmEngine, import_vllm
from three_policies.rollout import DTYPES, Cut, Engine, TransformersEngine

ENGINES = ("auto", "vllm", "transformers")         # what rollout.engine may be


def make_engine(
    kind: str, path: str | PathLike[str], *, dtype: str, max_model_len: int,
    gpu_memory_utilization: float = 0.4, device: torch.device | str = "cpu",
    batch_size: int = 512, enforce_eager: bool | None = None, top_p: float = 1.0,
    top_k: int | None = None, min_p: float = 0.0, candidates: int = 0,
    lora: Callable[[Any], object] | None = None,
    say: Callable[[str], object] = lambda sentence: None
) -> Engine:
    """Make the engine `kind`: "vllm", "transformers", or "auto", which is vLLM where it imports.

    path: directory or hub id of the first weights. dtype: a key of DTYPES. max_model_len: longest
    prompt plus response. gpu_memory_utilization: vLLM's share of the GPU while awake. batch_size:
    most samples at a time. enforce_eager: vLLM without CUDA graphs and compilation, far slower on a
    GPU; None: on a CPU only. top_p, top_k, min_p: see `Cut.of`. candidates: how many of μ's
    likeliest ids come with each token; with a cut all that are kept come. lora: adds
    a LoRA to a model, whose weights then come apart from the model's. say: is told of a
    start that takes long. Under torchrun, call `init_process_group` before and `close` the engine
    before `destroy_process_group`.
    """
    for name, value, known in [("engine", kind, ENGINES), ("dtype", dtype, DTYPES)]:
        if value not in known:
            nearest = difflib.get_close_matches(str(value), known, n=1, cutoff=0)[0]
            raise ValueError(f"rollout.{name}={value!r} is unknown; did you mean {nearest!r}?")

    vocabulary = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    settings: dict[str, Any] = dict(
        dtype=dtype, max_model_len=max_model_len, device=device, batch_size=batch_size,
        cut=Cut.of(top_p, top_k, min_p, vocabulary), candidates=min(candidates, vocabulary),
        lora=lora)

    if kind != "transformers":
        try:
            import_vllm(device)
        except ImportError as error:
            if kind == "vllm":
                raise RuntimeError(str(error)) from None
            if find_spec("vllm"):  # warn if it is broken, not if it is absent
                warnings.warn(f"rollout.engine=auto takes transformers: {error}", stacklevel=2)
        else:
            say("vLLM starts: seconds on a CPU, up to three minutes on a GPU; with "
                "VLLM_LOGGING_LEVEL=WARNING it shows what it prints")
            return VllmEngine(path, gpu_memory_utilization=gpu_memory_utilization,
                              enforce_eager=enforce_eager, **settings)
    return TransformersEngine(path, **settings)
