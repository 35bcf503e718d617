"""This script checks correctness and speed on the GPU at hand, and prints a table for appendix C.

    python tools/gpu_report.py             # one GPU of 24 GB; without a GPU tiny shapes, a minute
    python tools/gpu_report.py --ranks 2   # what needs two GPUs

This file decides: every row is a process of its own, the cheapest first. A row that fails is a row
of the table, with the last line of its error; the report goes on and ends with status 1. What a
row says on stderr follows on this script's. Nothing is downloaded: the shapes are those of
Qwen2.5-0.5B and 1.5B, and the weights are random.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file

from three_policies import trainer
from three_policies.correction import correct
from three_policies.engines.choice import make_engine
from three_policies.kl import kl_estimate
from three_policies.policy import full_tensor, full_weights, load_policy
from three_policies.presets import PRESETS
from three_policies.rollout import DTYPES, Sample
from three_policies.training.capacity import GIB, Sizes, matrix_rate, memory
from three_policies.training.faults import process_group
from three_policies.training.models import empty_model
from three_policies.training.demo import character_tokenizer
from three_policies.training.tasks import Task

ROOT = Path(__file__).resolve().parent.parent

ON_GPU = torch.cuda.is_available()
LARGE: dict[str, Any] = dict(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2)
TINY: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1)
LARGER = LARGE | dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                      num_attention_heads=12)
SHAPE = LARGE if ON_GPU else TINY
PROMPT, RESPONSE = (128, 512) if ON_GPU else (6, 10)
DISK = 30          # GiB: models, and a checkpoint of 1.5B parameters with AdamW's moments
PROGRAM = [sys.executable, str(Path(__file__).resolve())]


def row(what: str, found: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"| {what} | {found} |", flush=True)


# -------------------------------------------------------------------------------- what is measured

def make_model(directory: str, shape: dict[str, Any], dtype: str = "float32") -> None:
    """Write a model of random weights, far from a uniform distribution, and a tokenizer."""
    torch.manual_seed(0)
    tokenizer: Any = character_tokenizer("0123456789+=")
    with torch.device("cuda" if ON_GPU else "cpu"):
        model: Any = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            **shape, tie_word_embeddings=True, initializer_range=0.05, dtype="float32",
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None))
    model.to(DTYPES[dtype]).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_batch(device, rows: int) -> trainer.Batch:
    """Return groups of four samples, with prompts and responses of different lengths."""
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))

    def draw(n):
        return torch.randint(3, SHAPE["vocab_size"], (n,), generator=generator).tolist()
    prompts = [prompt for i in range(rows // 4) for prompt in [draw(PROMPT - i % 4)] * 4]
    responses = [draw(RESPONSE - 17 * i % (RESPONSE // 2)) for i in range(rows)]
    samples = [Sample(tokens, [-3.0] * len(tokens), True) for tokens in responses]
    return trainer.pad(prompts, samples, torch.randn(rows, generator=generator), device)


@contextlib.contextmanager
def group():
    with process_group() as device:
        if not ON_GPU:
            torch.set_num_threads(1)       # as a run takes for a tiny model
        yield device


def settings(micro: int, dtype: str = "bfloat16", checkpointing: bool = False,
             packed: bool = False) -> trainer.Config:
    config = trainer.Config()
    config.rollout.samples = 4
    config.train = replace(config.train, micro_batch_size=micro)
    config.policy = replace(config.policy, dtype=dtype, gradient_checkpointing=checkpointing,
                            packed=packed)
    return config


def make_run(config: trainer.Config, device) -> Any:
    """Return as much of a run as `trainer.update` needs."""
    policy = load_policy("model", 1.0, config.policy.dtype, device,
                         gradient_checkpointing=config.policy.gradient_checkpointing,
                         packed=config.policy.packed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)

    def nonfinite(what, sentences):
        raise ArithmeticError(f"{what}: {(sentences or ['the gradient is not finite'])[0]}")
    return SimpleNamespace(
        config=config, record=SimpleNamespace(nonfinite=nonfinite),
        loaded=SimpleNamespace(policy=policy, optimizer=optimizer,
                               tokenizer=SimpleNamespace(decode=str)))


def gradient(policy) -> torch.Tensor:
    """Return the policy's gradient as one vector on the host, and clear it."""
    parts = [full_tensor(p.grad).flatten().double().cpu() for p in policy.parameters()]
    policy.zero_grad()
    return torch.cat(parts)


def machine() -> None:
    """Name the machine, and write the model that the other rows read."""
    where = f"{os.cpu_count()} CPU cores, NO GPU: tiny shapes"
    if ON_GPU:
        free, whole = torch.cuda.mem_get_info()
        where = (f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, "
                 f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free, CUDA {torch.version.cuda}")
    row("machine", f"{where}, torch {torch.__version__}, transformers {transformers.__version__}")
    make_model("model", SHAPE)
    make_model("tiny", TINY)


def attention() -> None:
    """Reproduce PyTorch issue 196678: L % 128 = 64, a mask, rows whose log-sum is below −88.7."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    mask = torch.ones(1, 1, 192, 192, dtype=torch.bool, device="cuda").tril()
    for name, backends in [("cuDNN", [SDPBackend.CUDNN_ATTENTION]),
                           ("as here, without cuDNN", None)]:
        q = torch.full((1, 14, 192, 64), 4.0, device="cuda", dtype=torch.bfloat16,
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


def padding() -> None:
    """Compare padded rows with each row alone.

    Padding makes rows of attention of which everything is masked; they must send back nothing.
    """
    with group() as device:
        for dtype in ("float32", "bfloat16"):
            compare(f"padded against alone, {dtype}", of_rows(dtype, device, [[*range(8)]]),
                    of_rows(dtype, device, [[i] for i in range(8)]))


def against_cpu() -> None:
    """Compare the GPU with the CPU."""
    with group() as device:
        compare("GPU against CPU, float32", *(
            of_rows("float32", place, [[*range(8)]]) for place in (device, torch.device("cpu"))))


def of_rows(dtype: str, device, parts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of rows, taken part by part, and the gradient of their sum."""
    policy, batch, found = load_policy("model", 1.0, dtype, device), make_batch(device, 8), []
    for part in parts:
        rows = batch.rows(part, part)
        log_prob, _ = trainer.log_probs(policy, rows)
        found.append(log_prob[rows.response_mask])
        found[-1].sum().backward()
    return torch.cat(found).detach().cpu(), gradient(policy)


def compare(what: str, found: tuple[torch.Tensor, torch.Tensor],
            right: tuple[torch.Tensor, torch.Tensor]) -> None:
    gap = (found[0] - right[0]).abs()
    row(f"log-probs, {what}", f"at most {gap.max():.1e}, mean {gap.mean():.1e}")
    row(f"gradient, {what}",
        f"{((found[1] - right[1]).norm() / right[1].norm()).item():.1e} of its length")


def resume() -> None:
    """Compare the weights after two steps with those after one and one."""
    for name, steps in [("whole", 2), ("parts", 1), ("parts", 2)]:
        finish([f"run={name}", f"train.steps={steps}", "policy.path=tiny", "task.size=1",
                "task.eval_size=4", "rollout.engine=transformers", "rollout.prompts=4",
                "rollout.samples=4", "rollout.max_tokens=4", "train.mini_batches=2",
                "train.micro_batch_size=8", "train.save_every=1", "train.keep=1",
                "train.lr=1e-4", "loss.kl_coef=0.01"])
    row("weights of a run that stopped and went on against one that did not",
        apart(read_weights("runs/whole/model"), read_weights("runs/parts/model").items()))


def read_weights(directory: str) -> dict[str, torch.Tensor]:
    return load_file(f"{directory}/model.safetensors")


def apart(right: dict[str, torch.Tensor], found: Iterable[tuple[str, torch.Tensor]]) -> str:
    gap = max((x.cpu() - right[name]).abs().max().item() for name, x in found)
    return "the same bits" if gap == 0 else f"at most {gap:.1e} apart"


def finish(argv: list[str]) -> None:
    if code := trainer.main(argv):
        raise SystemExit(code)             # its sentence is on stderr


def wait() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def update(dtype: str, micro: int, checkpointing: bool, packed: bool = False) -> None:
    """Measure an update's tokens per second, its share of a @ b, its host waits and its memory."""
    with group() as device:
        config, rows = settings(micro, dtype, checkpointing, packed), 4 * micro
        run, batch = make_run(config, device), make_batch(device, rows)
        options = PRESETS["decoupled_token_is"]()
        old = trainer.score(run.loaded.policy, batch, config)
        batch = batch._replace(old_log_prob=old)
        given = correct(old, batch.rollout_log_prob, batch.response_mask, options)
        trainer.update(run, batch, options, given)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            row(f"host waits of an update of {rows // micro} micro-batches, {dtype}",
                waits(lambda: trainer.update(run, batch, options, given)))
        began = wait()
        done = trainer.update(run, batch, options, given)
        seconds, tokens = wait() - began, int(batch.attention.sum())
        flops = 6 * sum(p.numel() for p in run.loaded.policy.parameters()) * tokens / seconds
        how = (f"{'packed' if packed else 'padded'}, {micro} rows at a time, "
               f"{'with' if checkpointing else 'without'} gradient checkpointing")
        row(f"update, {tokens} tokens, {dtype}, {how}",
            f"{tokens / seconds:,.0f} tokens/s, {flops / 1e12:.3g} TFLOP/s, "
            f"{flops / matrix_rate(device, dtype):.2f} of a @ b, "
            f"gradient {done.metrics['grad_norm'].item():.3g}")
        parts, _ = memory(Sizes.of(empty_model("model")), config, 1, PROMPT + RESPONSE, 1)
        row(f"peak memory of an update, {dtype}",
            f"{torch.cuda.max_memory_allocated() / GIB:.1f} GiB, by arithmetic "
            f"{sum(parts.values()) / GIB:.1f}" if ON_GPU
            else "left out, like host waits by line: only a GPU has them")


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


# -------------------------------------------------------------------------------------- the engine

def open_engine(device, **given) -> Any:
    """Open vLLM on a GPU, and on a CPU what there is."""
    return make_engine("vllm" if ON_GPU else "auto", "model", device=device,
                       dtype="bfloat16" if ON_GPU else "float32",
                       max_model_len=PROMPT + RESPONSE, **given)


def engine(eager: bool, **cut) -> None:
    """Compare μ with π_old, the same seeds twice, and weights pushed while the engine sleeps."""
    rows, length = 64 if ON_GPU else 8, min(RESPONSE, 128)
    prompts = [[3 + i % 9, 4, 5] for i in range(rows)]
    with group() as device, contextlib.closing(
            open_engine(device, enforce_eager=eager, **cut)) as made:
        def ask(temperature, first=rows):
            return made.generate(prompts[:first], range(first), temperature=temperature,
                                 max_tokens=length, eos_ids=[])
        first, began = ask(1.0), wait()
        again = ask(1.0)
        rate, alone = rows * length / (wait() - began), ask(1.0, 8)
        same, kept = (sum(a.tokens == b.tokens for a, b in zip(first, x)) for x in (again, alone))
        row(f"{made.name}, graphs {'off' if eager else 'on'}, {cut or 'no cut'}: {rows} samples",
            f"{rate:,.0f} tokens/s, {same} the same with the same seeds, and {kept} of 8 alone")
        for temperature in 1.0, 0.7:
            k3, worst = mismatch(prompts, ask(temperature), temperature, device)
            row(f"μ against π_old, temperature {temperature}",
                f"k3 {k3:.1e}, log ρ at most {worst:.2g} from 0")
        if not cut:
            asleep(made, load_policy("model", 1.0, "float32", device))


def mismatch(prompts, samples, temperature, device) -> tuple[float, float]:
    batch = trainer.pad(prompts, samples, torch.zeros(len(samples)), device)
    policy = load_policy("model", temperature, "bfloat16" if ON_GPU else "float32", device)
    old, mask = trainer.score(policy, batch, settings(16)), batch.response_mask
    # The mean of k3 on samples of μ estimates KL(μ‖π_old).
    k3 = kl_estimate(batch.rollout_log_prob, old, "k3")[mask].mean()
    return k3.item(), (old - batch.rollout_log_prob)[mask].abs().max().item()


def asleep(made, policy) -> None:
    """Check that weights pushed during sleep arrive: greedy samples change, then change back."""
    def greedy():
        return made.generate([[5, 6]], [0], temperature=0, max_tokens=8, eos_ids=[])[0]

    def used():
        free, whole = torch.cuda.mem_get_info() if ON_GPU else (0, math.nan)
        return f"{(whole - free) / GIB:.1f} GiB"
    weights, before, awake = dict(full_weights(policy)), greedy(), used()
    made.sleep()
    sleeping = used()
    made.update_weights((name, -x) for name, x in weights.items())
    other = greedy()
    made.sleep()
    made.update_weights(weights.items())
    again = greedy()
    if not again.tokens == before.tokens != other.tokens:
        raise AssertionError(f"weights pushed while asleep do not arrive: {before.tokens}, with "
                             f"others {other.tokens}, then {again.tokens}")
    gap = max(abs(a - b) for a, b in zip(again.rollout_log_prob, before.rollout_log_prob))
    row("weights pushed while asleep", f"arrive, log-probs at most {gap:.1e} apart")
    row("the GPU's memory, engine awake and asleep",
        f"{awake}, {sleeping}" if ON_GPU else "left out: a CPU's does not sleep")


def ranks() -> None:
    """Load a model in shards, give an engine on every rank its weights, and take one step."""
    with group() as device:
        config = settings(4, checkpointing=True)
        run, batch = make_run(config, device), make_batch(device, 8)
        row(f"weights on {os.environ['WORLD_SIZE']} ranks ({torch.distributed.get_backend()})",
            apart(read_weights("model"), full_weights(run.loaded.policy)))
        with contextlib.closing(open_engine(device)) as made:
            asleep(made, run.loaded.policy)
            made.sleep()
            batch = batch._replace(old_log_prob=trainer.score(run.loaded.policy, batch, config))
            done = trainer.update(run, batch, PRESETS["decoupled_token_is"]())
            made.update_weights(full_weights(run.loaded.policy))
        row("one step and its weights in the engine", "gradient "
            f"{done.metrics['grad_norm'].item():.3g}")


def smoke(name: str, shape: dict[str, Any], prompts: int = 128) -> None:
    """Run two steps of a configuration on local questions; without a GPU with few samples."""
    make_model("of-run", shape, "bfloat16")            # as most models come
    Path("questions.jsonl").write_text("\n".join(
        json.dumps({"question": f"{i}+{i + 1}=", "answer": f"#### {2 * i + 1}"})
        for i in range(300)))
    small = ["rollout.engine=transformers", "rollout.prompts=4", "rollout.samples=2",
             "rollout.max_tokens=4", "train.micro_batch_size=2", "task.instruction=''"]
    # Random weights answer nothing right, and their tokens are mostly none of the tokenizer's.
    Task.reward = lambda self, problem, response: float(response != "")
    began = time.perf_counter()
    finish([str(ROOT / f"configs/{name}.yaml"), f"run={name}", "policy.path=of-run",
            f"rollout.prompts={prompts}", "train.steps=2", "task.path=questions.jsonl",
            "task.eval_path=null", "task.eval_size=8", *([] if ON_GPU else small)])
    row(f"two steps of configs/{name}.yaml, {prompts if ON_GPU else 4} prompts each",
        f"{time.perf_counter() - began:.0f} s")
    last = json.loads(Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()[-1])
    row("its second step", ", ".join(
        [f"{part.removeprefix('time/')} {last[part]:.3g}" for part in last
         if part.startswith("time/")] + [f"{last['tokens_per_second']:,.0f} tokens/s"]))
    row("its peak memory, mismatch and gradient", f"{last['memory/peak_mb'] / 1024:.1f} GiB, "
        f"k3 {last['rollout_corr/k3_kl']:.1e}, gradient {last['grad_norm']:.3g}")


# ------------------------------------------------------------------------------------- the report

class Row(NamedTuple):
    """A row of the report; gigabytes and minutes are by arithmetic, for a GPU of 24 GB."""

    function: Callable[..., None]
    gigabytes: int
    minutes: float                         # what it takes; four times as much is too long
    given: dict[str, Any] = {}             # noqa: RUF012 - nobody changes it
    left_out: str = ""                     # why, where there is no GPU


LIKE_GSM8K = "its code is that of the row before, its memory a GPU's"
ROWS = {                                   # cheapest first
    "machine": Row(machine, 1, 1),
    "attention": Row(attention, 1, 1, left_out="cuDNN's attention is a GPU's"),
    "resume": Row(resume, 1, 1),
    "padding": Row(padding, 8, 1),
    "against the CPU": Row(against_cpu, 8, 1, left_out="there is nothing but the CPU"),
    "update in bfloat16": Row(update, 14, 1.5, dict(dtype="bfloat16", micro=16 if ON_GPU else 4,
                                                    checkpointing=True)),
    "update of packed rows": Row(update, 14, 1.5, dict(
        dtype="bfloat16", micro=64 if ON_GPU else 4, checkpointing=True, packed=True)),
    "update in float32": Row(update, 18, 1.5, dict(dtype="float32", micro=4, checkpointing=False)),
    "engine": Row(engine, 16, 3, dict(eager=True)),
    "engine with graphs": Row(engine, 16, 4, dict(eager=False), "graphs are a GPU's"),
    "engine with a cut": Row(engine, 16, 4, dict(eager=not ON_GPU, top_p=0.9, top_k=50)),
    "gsm8k": Row(smoke, 22, 6, dict(name="gsm8k", shape=SHAPE)),
    "gsm8k-lora-24gb": Row(smoke, 22, 6, dict(name="gsm8k-lora-24gb", shape=LARGER,
                                              prompts=16), LIKE_GSM8K),
    "gsm8k-24gb": Row(smoke, 22, 6, dict(name="gsm8k-24gb", shape=LARGER, prompts=32), LIKE_GSM8K),
}
OF_RANKS = {"machine": ROWS["machine"], "ranks": Row(ranks, 20, 5)}


def attempt(name: str, of: Row, count: int, directory: str) -> str:
    """Run a row in `count` processes, one a rank; return why it failed, or nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port} if count > 1 else {}
    errors = [Path(directory) / f"stderr-{rank}" for rank in range(count)]
    started, until = [], time.monotonic() + 4 * 60 * of.minutes
    for rank in range(count):
        of_rank = together | {"RANK": rank, "LOCAL_RANK": rank} if together else {}
        with errors[rank].open("w") as stderr:
            started.append(subprocess.Popen(
                [*PROGRAM, "--row", name], cwd=directory, stderr=stderr,
                env={**os.environ, **{key: str(value) for key, value in of_rank.items()}}))
    try:
        while None in (codes := [p.poll() for p in started]) and not any(codes) and (
                time.monotonic() < until):
            time.sleep(0.05)
    finally:
        for process in started:            # the others would wait for a rank that has failed
            process.kill()
            process.wait()
    words = [path.read_text(errors="replace") for path in errors]
    sys.stderr.write("".join(words))
    for code, text in zip(codes, words):
        if code:
            full = "" if shutil.disk_usage(directory).free else f", and {directory} is full"
            lines = text.strip().splitlines() or [f"no word{full}"]
            # CUDA's errors go on for four lines after the one that says what it is.
            errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit): ", line)]
            return f"{(errors or lines)[-1].strip()} (status {code})"
    return f"not done after {4 * of.minutes:g} minutes" if None in codes else ""


def report(rows: dict[str, Row], count: int) -> int:
    """Print the table; return 1 if a row failed, and 0 if none did."""
    with tempfile.TemporaryDirectory() as directory:
        free, disk = shutil.disk_usage(directory).free / GIB, DISK if ON_GPU else 0.1
        minutes, largest = sum(of.minutes for of in rows.values()), max(
            of.gigabytes for of in rows.values())
        print(f"{len(rows)} rows, about {f'{minutes:g} minutes' if ON_GPU else 'a minute'}; the "
              f"largest takes {f'{largest} GB of each GPU' if ON_GPU else 'less than 2 GB'}. Needs "
              f"{disk:g} GiB in {directory}, where {free:.1f} GiB are free (TMPDIR names another "
              "place).", flush=True)
        if free < disk:
            return 1
        failures = 0
        print(f"\n| {time.strftime('%Y-%m-%d')} | |\n|---|---|", flush=True)
        for name, of in rows.items():
            if of.left_out and not ON_GPU:
                row(name, f"left out: {of.left_out}")
            elif why := attempt(name, of, 1 if name == "machine" else count, directory):
                failures += 1
                row(name, f"FAILED: {why.replace('|', '/')}")
        print(f"\n{failures} of {len(rows)} rows failed", flush=True)
    return int(failures > 0)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs")
    parser.add_argument("--row", choices=ROWS | OF_RANKS, help="run this row alone, here")
    given = parser.parse_args(argv)
    if given.ranks < 1:
        parser.error(f"--ranks={given.ranks} must be at least 1")
    if given.row is None:
        return report(ROWS if given.ranks == 1 else OF_RANKS, given.ranks)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = (ROWS | OF_RANKS)[given.row]
    chosen.function(**chosen.given)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))        # `attempt` ends its row
    sys.exit(main(sys.argv[1:]))
