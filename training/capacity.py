"""Compute what a run asks of a GPU: bytes of memory, FLOPs, and the share of its speed.

This file decides: a run that cannot fit on its GPU is refused before a weight is loaded, with the
figures and what to change; one that may not fit gets a remark. The bytes are arithmetic on numbers.
Counts of tensors were compared with real ones on a CPU. One update was measured on an H100: 9.2
GiB, by arithmetic 10.0 (`python tools/gpu_report.py`).
"""

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from three_policies.checks import UserError
from three_policies.rollout import DTYPES
from three_policies.training.settings import Config

GIB = 2 ** 30
LOGITS = GIB / 2           # at most, for a slice of training/heads.py and its copies
UNSURE = 1.5 * GIB         # CUDA's libraries, NCCL, vLLM's graphs: 1.4 GiB on an H100, 0.5B model


class Sizes(NamedTuple):
    """What the arithmetic reads of a model."""

    parameters: int                    # a head that is tied to the embeddings counts once
    trained: int                       # all of them, or the LoRA's
    layers: int
    layer: int                         # parameters of the largest layer
    root: int                          # parameters outside the layers, above all embeddings
    matrices: int                      # products of all layers for one token, of its experts alone
    head: int                          # and of the head: vocabulary × hidden
    hidden: int
    inner: int                         # width of the MLP
    attended: int                      # heads × their width
    cached: int                        # numbers that a token leaves in the cache
    pinned: int                        # bytes of all weights, and of those that learn, in float32
    pinned_trained: int                # and pinned memory: torch rounds each up to a power of two

    @staticmethod
    def of(model: Any) -> "Sizes":
        """Count a model, which may be on the meta device."""
        config, hidden = model.config.get_text_config(), model.config.get_text_config().hidden_size
        layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers] or [0]
        parameters, heads = sum(p.numel() for p in model.parameters()), config.num_attention_heads
        width = getattr(config, "head_dim", None) or hidden // heads
        of_cache = getattr(config, "num_key_value_heads", None) or heads

        def multiplied(p: Any) -> int:             # packed experts: [experts, out, in]
            some = getattr(config, "num_experts_per_tok", None) if p.dim() == 3 else None
            return p.numel() * (p.dim() > 1) if some is None else p.numel() * some // len(p)

        def in_pinned_memory(weights: Iterable[Any]) -> int:
            return sum(1 << (4 * p.numel() - 1).bit_length() for p in weights)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Sizes(
            parameters, sum(p.numel() for p in trained),
            config.num_hidden_layers, max(sizes), parameters - sum(sizes),
            sum(multiplied(p) for layer in layers for p in layer.parameters()),
            config.vocab_size * hidden, hidden,
            getattr(config, "intermediate_size", None) or 4 * hidden, heads * width,
            2 * config.num_hidden_layers * of_cache * width,
            in_pinned_memory(model.parameters()), in_pinned_memory(trained))


def memory(model: Sizes, config: Config, ranks: int, length: int, vllm_bytes: float
           ) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes on one rank's GPU, by what holds them: in an update, and while it samples.

    length: tokens of the longest prompt and response. vllm_bytes: what vLLM takes while awake; 0
    means the engine of transformers, which stays awake.

    FSDP2 divides float32 weights, gradients and AdamW's two moments among the ranks. It keeps the
    root gathered, and each layer together with the next, in the policy's dtype of d bytes. The root
    and one layer also have gathered gradients, in two copies: d bytes and 4 a number. For the
    backward pass a layer of Llama or Qwen2 keeps, for each token, d bytes times: four MLP widths,
    four hidden and attention widths, a row of the mask; and two hidden widths in float32. Packed
    rows have no mask, and a budget of tokens is met to the last. Weights under a LoRA have no
    gradients and no moments; they are π_ref.
    """
    policy, train, d = config.policy, config.train, DTYPES[config.policy.dtype].itemsize
    own, learns = (0 if policy.cpu_offload else 4 * x / ranks
                   for x in (model.parameters, model.trained))
    backward = model.trained == model.parameters       # else the gathered gradients are few
    rows = config.rollout.prompts * config.rollout.samples // (ranks * train.mini_batches)
    most = train.micro_batch_tokens or train.micro_batch_size * length
    most -= 0 if policy.packed else most % length              # padded rows are all as long
    tokens = min(max(most, length), rows * length)
    mask = 0 if policy.packed else length
    one = d * (4 * (model.inner + model.hidden + model.attended) + mask) + 8 * model.hidden
    kept = d * model.hidden * model.layers + one if policy.gradient_checkpointing else (
        one * model.layers)
    reference = config.loss.kl_coef != 0 and policy.lora_rank is None
    stays = {"weights": own * (1 + reference), "moments": 2 * learns}
    engine = {"the engine": vllm_bytes or smallest_engine(model, config, length)}
    update = {"gradients": learns, "gathered weights with their gradients":
              (model.root + 2 * model.layer) * d + (model.root + model.layer) * (d + 4) * backward,
              "slices of logits": LOGITS, "activations": tokens * kept}
    return stays | update | ({} if vllm_bytes else engine), stays | engine


def smallest_engine(model: Sizes, config: Config, length: int) -> float:
    """Return the bytes of an engine's weights, whole on every rank, and of one row's cache."""
    return DTYPES[config.rollout.dtype].itemsize * (model.parameters + model.cached * length)


def require_room(model: Sizes, config: Config, ranks: int, length: int, free: float, total: float,
                 vllm: bool) -> list[str]:
    """Refuse a run that cannot fit in a GPU's free bytes; return a remark if it may not fit.

    Activations depend on lengths, and `UNSURE` is a guess: neither makes a run impossible.
    """
    share, rows = config.rollout.gpu_memory_utilization, (
        "train.micro_batch_tokens" if config.train.micro_batch_tokens else "train.micro_batch_size")
    update, sampling = memory(model, config, ranks, length, share * total * vllm)
    change = ("a larger GPU or a smaller model" if config.policy.cpu_offload else
              f"policy.cpu_offload=true, more ranks than {ranks}, or a smaller model")
    lora = "" if config.policy.lora_rank else "policy.lora_rank=8, "

    stays, least = sampling["weights"] + sampling["moments"], smallest_engine(model, config, length)
    certain = {name: size for name, size in update.items() if name != "activations"}
    if sum(certain.values()) > free:
        raise UserError(f"{need('an update', certain, free)}, without activations: take "
                        f"{lora}{change}")
    if stays + least > free:
        sampling["the engine"] = least
        raise UserError(f"{need('sampling', sampling, free)}, as each rank has a whole engine: "
                        f"take {change}")

    low, high = math.ceil(100 * least / total) / 100, math.floor(100 * (free - stays) / total) / 100
    if vllm and not low <= share <= high:
        raise UserError(f"{need('sampling', sampling, free)}, where the smallest engine takes "
                        f"{least / GIB:.1f}: set rollout.gpu_memory_utilization between {low} and "
                        f"{high}, not {share:g}, or take {change}")
    return [f"{need(when, parts, free)}, and libraries about {UNSURE / GIB:g} more: should it run "
            f"out of memory, {lower}, or take {change}"
            for when, parts, lower in (
                ("an update", update, f"lower {rows}"),
                ("sampling", sampling, "lower rollout.gpu_memory_utilization"))
            if sum(parts.values()) + UNSURE > free]


def host_bytes(model: Sizes, config: Config) -> int:
    """Return the bytes that policy.cpu_offload keeps on the hosts, in float32.

    In pinned memory: the weights (twice with a whole π_ref), and of those that learn a
    micro-batch's gradients and the sum so far. Elsewhere: AdamW's two moments.
    """
    reference = config.loss.kl_coef != 0 and config.policy.lora_rank is None
    return (1 + reference) * model.pinned + 2 * model.pinned_trained + 8 * model.trained


def judge_host(model: Sizes, config: Config, share: float, host: float) -> list[str]:
    """Return a remark if this machine's share of `host_bytes` exceeds its memory."""
    kept = share * host_bytes(model, config)
    if not config.policy.cpu_offload or kept <= host:
        return []
    return [f"policy.cpu_offload=true keeps {kept / GIB:.0f} GiB of weights, gradients and moments "
            f"in this machine's memory, by arithmetic, and it has {host / GIB:.0f}"]


def host_memory() -> float:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def need(when: str, parts: dict[str, float], free: float) -> str:
    figures = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    return (f"by arithmetic {when} takes {sum(parts.values()) / GIB:.1f} GiB of a GPU, and "
            f"{free / GIB:.1f} are free ({figures})")


def free_memory(device: torch.device) -> tuple[float, float] | None:
    """Return the free and the total bytes of the fullest rank's GPU; None: there is no GPU."""
    if device.type == "cpu":
        return None
    found = torch.tensor(torch.accelerator.get_memory_info(device), dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MIN)          # so that all ranks decide the same
    return found[0].item(), found[1].item()


def gpu_peak(device: torch.device, given_back: int) -> float:
    """Return the most MiB that torch had on a GPU since the last call, without those given back.

    A sleeping vLLM frees memory that torch goes on counting.
    """
    peak = torch.accelerator.max_memory_allocated(device) - given_back
    torch.accelerator.reset_peak_memory_stats(device)
    return peak / 2 ** 20


def memory_metrics(device: torch.device, most: float = 0.0) -> dict[str, float]:
    """Return what this process holds, and the most: on a GPU `most`, else the most it ever had.

    `most`: on a GPU the largest `gpu_peak`, else the peak that the last call returned. The kernel
    updates its own now and then, so that it can be below that.
    """
    found, peak = {}, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024)
    with contextlib.suppress(OSError):             # where the system tells what is in memory
        pages = Path("/proc/self/statm").read_text().split()[1]
        found["memory/rss_mb"] = int(pages) * os.sysconf("SC_PAGE_SIZE") / 2 ** 20
    peak = max(peak / 2 ** 20, found.get("memory/rss_mb", 0.0), most)
    if device.type != "cpu":
        peak = most
    return found | {"memory/peak_mb": peak}


def update_flops(model: Sizes, prompts: int, responses: int) -> float:
    """Return the FLOPs that one epoch over so many tokens needs: 2 forward and 4 back a weight.

    A weight under a LoRA needs 2 back, as it has no gradient. The head sees responses alone.
    Attention's products of pairs of tokens are left out.
    """
    each = 6 if model.trained == model.parameters else 4
    return each * (model.matrices * (prompts + responses) + model.head * responses)


SIDES = {"cpu": 512}               # of the matrices whose product is timed, where it is not 4096


def matrix_rate(device: torch.device, dtype: str) -> float:
    """Measure the FLOPs a second of a product of matrices, in less than a tenth of a second."""
    n, seconds = SIDES.get(device.type, 4096), []
    x = torch.full((n, n), 0.5, dtype=DTYPES[dtype], device=device)
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(x, x)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * n ** 3 / min(seconds)
