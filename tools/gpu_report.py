"""This script checks correctness and speed on the GPU at hand, and prints a table for the README.

    python tools/gpu_report.py

It downloads nothing. On a GPU it takes half an hour at most, with shapes of Qwen2.5-0.5B and random
weights. Without a GPU it takes tiny shapes, and says what it leaves out.
pytest does not collect this file.
"""

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import trainer
from correction import PRESETS, correct
from estimators import kl_estimate
from plumbing.faults import process_group
from plumbing.tasks import character_tokenizer
from plumbing.engines import make_engine
from policy import full_weights, load_policy
from rollout import Sample

ON_GPU = torch.cuda.is_available()
LARGE: dict[str, Any] = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864,
                             num_hidden_layers=24, num_attention_heads=14,
             num_key_value_heads=2)
TINY: dict[str, Any] = dict(vocab_size=64, hidden_size=64, intermediate_size=128,
                            num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1)
ROWS, PROMPT, RESPONSE, MICRO = (64, 128, 512, 16) if ON_GPU else (8, 6, 10, 4)
DTYPES = ("float32", "bfloat16")


def row(what: str, found: str) -> None:
    print(f"| {what} | {found} |", flush=True)


def make_model(directory: Path) -> str:
    """Write a model of random weights, far from a uniform distribution, and a tokenizer."""
    torch.manual_seed(0)
    tokenizer: Any = character_tokenizer("0123456789+=")
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        **(LARGE if ON_GPU else TINY), tie_word_embeddings=True, initializer_range=0.05,
        dtype="float32",
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def make_batch(device) -> trainer.Batch:
    """Return eight samples per prompt, of different lengths."""
    generator, size = torch.Generator().manual_seed(1), (LARGE if ON_GPU else TINY)["vocab_size"]

    def draw(n):
        return torch.randint(3, size, (n,), generator=generator).tolist()
    prompts = [prompt for i in range(ROWS // 8) for prompt in [draw(PROMPT - i)] * 8]
    responses = [draw(RESPONSE - 17 * i % (RESPONSE // 2)) for i in range(ROWS)]
    samples = [Sample(tokens, [-3.0] * len(tokens), True) for tokens in responses]
    return trainer.pad(prompts, samples, torch.randn(ROWS, generator=generator), device)


def settings(**train) -> trainer.Config:
    config = trainer.Config()
    config.train = replace(config.train, micro_batch_size=MICRO, **train)
    return config


# -------------------------------------------------------------------------------------- is it right

def right_log_probs(path: str, device) -> None:
    """Compare a row's log-probs when it is padded among others with those when it is alone."""
    for dtype in DTYPES:
        policy, batch = load_policy(path, 1.0, dtype, device), make_batch(device)
        together = trainer.score(policy, batch, settings())
        alone = torch.cat([trainer.score(policy, batch.rows(slice(i, i + 1), slice(i, i + 1)),
                                         settings())
                           for i in range(0, ROWS, 7)])
        gap = (together[::7] - alone).abs()[batch.response_mask[::7]]
        row(f"log-probs, padded against alone, {dtype}",
            f"at most {gap.max():.1e}, mean {gap.mean():.1e}")


def right_attention(device) -> None:
    """Reproduce PyTorch issue 196678: L % 128 = 64, a mask, rows whose log-sum is below −88.7."""
    if not ON_GPU:
        return row("NaN in the backward pass of cuDNN's attention", "left out: only a GPU has it")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    mask = torch.ones(1, 1, 192, 192, dtype=torch.bool, device=device).tril()
    for name, backends in [("cuDNN", [SDPBackend.CUDNN_ATTENTION]),
                           ("as here, without cuDNN", None)]:
        q = torch.full((1, 14, 192, 64), 4.0, device=device, dtype=torch.bfloat16,
                       requires_grad=True)
        k, v = (-q.detach()).requires_grad_(), torch.randn_like(q).requires_grad_()
        torch.backends.cuda.enable_cudnn_sdp(backends is not None)
        try:
            with sdpa_kernel(backends) if backends else contextlib.nullcontext():
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                gradients = torch.autograd.grad(out.sum(), (q, k, v))
            found = "finite" if all(x.isfinite().all() for x in gradients) else "NaN"
        except RuntimeError as error:
            found = f"does not run ({str(error).splitlines()[0]})"
        row(f"gradient of attention with a mask, L = 192, log-sum −120: {name}", found)


def right_resume(path: str, directory: Path) -> None:
    """Compare the weights after four steps with those after two and two, and time a save."""
    command = [sys.executable, str(ROOT / "trainer.py"), f"policy.path={path}",
               "rollout.engine=transformers",
               "task.size=1", "task.eval_size=8", "rollout.prompts=8", "rollout.samples=4",
               "rollout.max_tokens=8",
               "train.mini_batches=2", "train.micro_batch_size=16", "train.save_every=2",
               "train.keep=1",
               "train.lr=1e-4", "loss.kl_coef=0.01"]
    for name, steps in [("whole", 4), ("parts", 2), ("parts", 4)]:
        began = time.perf_counter()
        subprocess.run([*command, f"run={name}", f"train.steps={steps}"], cwd=directory, check=True,
                       stderr=subprocess.DEVNULL)
    seconds, load = time.perf_counter() - began, transformers.AutoModelForCausalLM.from_pretrained
    whole, parts = (load(directory / "runs" / name / "model").state_dict()
                    for name in ("whole", "parts"))
    gap = max((whole[name] - x).abs().max().item() for name, x in parts.items())
    row("weights of a run that stopped and went on against one that did not",
        "the same bits" if gap == 0 else f"at most {gap:.1e} apart")
    row("resume, two steps, save and the final model", f"{seconds:.0f} s")


# --------------------------------------------------------------------------------------- is it fast

def wait() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def matmul_rate(device, dtype) -> float:
    """Return the FLOP/s of a @ b, which no update can exceed."""
    n = 8192 if ON_GPU else 512
    (a, b), times = torch.randn(2, n, n, device=device, dtype=dtype), []
    for _ in range(5):
        began = wait()
        torch.mm(a, b)
        times.append(wait() - began)
    return 2 * n ** 3 / min(times)


def fast_update(path: str, device) -> None:
    """Measure an update's tokens per second, its share of a @ b, its host waits and its memory."""
    for dtype in DTYPES:
        policy = load_policy(path, 1.0, dtype, device)
        batch, config = make_batch(device), settings()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
        run: Any = SimpleNamespace(config=config, policy=policy, optimizer=optimizer)
        options = PRESETS["decoupled_token_is"]()
        old = trainer.score(policy, batch, config)
        batch = batch._replace(old_log_prob=old)
        given = correct(old, batch.rollout_log_prob, batch.response_mask, options)
        trainer.update(run, batch, options, given)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            row(f"host waits of an update of {ROWS // MICRO} micro-batches, {dtype}",
                waits(lambda: trainer.update(run, batch, options, given)))
        began = wait()
        trainer.update(run, batch, options, given)
        seconds, tokens = wait() - began, int(batch.attention.sum())
        flops = 6 * sum(p.numel() for p in policy.parameters()) * tokens / seconds
        row(f"update, {tokens} tokens, {dtype}",
            f"{tokens / seconds:,.0f} tokens/s, {flops / 1e12:.3g} TFLOP/s, "
            f"{flops / matmul_rate(device, getattr(torch, dtype)):.2f} of a @ b")
        if ON_GPU:
            row(f"peak memory of an update, {dtype}",
                f"{torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB")
    if not ON_GPU:
        row("host waits by line, peak memory", "left out: only a GPU has them")


def waits(call) -> str:
    """Return the lines at which CUDA makes the host wait, from torch's sync debug mode."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    torch.cuda.set_sync_debug_mode("default")
    lines = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught
                    if "synchroniz" in str(w.message))
    return ", ".join(f"{line} × {n}" for line, n in lines.most_common()) or "none"


# --------------------------------------------------------------------------------------- the engine

def engine_rows(path: str, device) -> None:
    """Compare μ with π_old, with CUDA graphs on and off, and with sampling cut by top-p and top-k.

    The rows also check seeds, and weights that are pushed while the engine sleeps.
    """
    dtype, prompts = "bfloat16" if ON_GPU else "float32", [[3 + i % 9, 4, 5] for i in range(ROWS)]
    whole, top = {}, dict(top_p=0.9, top_k=50)
    both = [(True, whole), (True, top)]
    for eager, cut in [(False, whole), (True, whole), (False, top)] if ON_GPU else both:
        try:
            engine = make_engine("vllm", path, dtype=dtype, max_model_len=PROMPT + RESPONSE,
                                 device=device,
                                 enforce_eager=eager, **cut)
        except RuntimeError as error:
            return row("vLLM", f"left out: {str(error).split(' (')[0]}")

        def ask(temperature):
            return engine.generate(prompts, range(ROWS), temperature=temperature,
                                   max_tokens=RESPONSE, eos_ids=[])
        try:
            first, began = ask(1.0), wait()
            again = ask(1.0)
            rate, same = ROWS * RESPONSE / (wait() - began), sum(a.tokens == b.tokens
                                                                 for a, b in zip(first, again))
            graphs = f"{'off' if eager else 'on'}{f', {cut}' if cut else ''}"
            row(f"vLLM {dtype}, graphs {graphs}: {ROWS} samples",
                f"{rate:,.0f} tokens/s, {same} the same with the same seeds")
            for temperature in 1.0, 0.7:
                k3, worst = mismatch(path, prompts, ask(temperature), temperature, dtype, device)
                row(f"μ against π_old, temperature {temperature}",
                    f"k3 {k3:.1e}, largest |log ρ| {worst:.2g}")
            if not cut:
                asleep(engine, path, device)
        finally:
            engine.close()


def mismatch(path, prompts, samples, temperature, dtype, device) -> tuple[float, float]:
    batch = trainer.pad(prompts, samples, torch.zeros(len(samples)), device)
    old = trainer.score(load_policy(path, temperature, dtype, device), batch, settings())
    mask = batch.response_mask
    # The mean of k3 on samples of μ estimates KL(μ‖π_old).
    k3 = kl_estimate(batch.rollout_log_prob, old, "k3")[mask].mean()
    return k3.item(), (old - batch.rollout_log_prob)[mask].abs().max().item()


def asleep(engine, path, device) -> None:
    """Check that weights pushed during sleep arrive: greedy samples change, then change back."""
    def greedy():
        samples = engine.generate([[5, 6]], [0], temperature=0, max_tokens=8, eos_ids=[])
        return samples[0].tokens

    def used():
        free, whole = torch.cuda.mem_get_info() if ON_GPU else (0, math.nan)
        return f"{(whole - free) / 2 ** 30:.1f} GiB"
    weights, before, awake = dict(full_weights(load_policy(path, 1.0, "float32",
                                                           device))), greedy(), used()
    engine.sleep()
    sleeping = used()
    engine.update_weights((name, -x) for name, x in weights.items())
    other = greedy()
    engine.sleep()
    engine.update_weights(weights.items())
    row("weights pushed while asleep",
        "arrive" if greedy() == before != other else f"do not: {before}, {other}")
    row("the GPU's memory, engine awake and asleep",
        f"{awake}, {sleeping}" if ON_GPU else "left out: a CPU's does not sleep")


def main() -> None:
    where = f"{os.cpu_count()} CPU cores, NO GPU: tiny shapes"
    if ON_GPU:
        where = torch.cuda.get_device_name()
    print(f"| {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {where} | |\n|---|---|")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory, process_group() as device:
        path = make_model(Path(directory) / "model")
        right_log_probs(path, device)
        right_attention(device)
        fast_update(path, device)
        engine_rows(path, device)
        right_resume(path, Path(directory))


if __name__ == "__main__":
    main()
