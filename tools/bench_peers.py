"""This script measures an update beside TRL's, and `correct` beside verl's, on one device.

    PYTHONPATH=TRLS python tools/bench_peers.py --verl VERLS     # without a GPU tiny shapes
    … --parts step --response 128                                # steps with their sampling

TRLS is a folder with what TRL 1.16.0 adds to requirements.txt, and VERLS verl's wheel, unpacked:

    pip install --target TRLS --no-deps accelerate==1.15.0 datasets==5.2.0 dill==0.4.1 \\
        multiprocess==0.70.19 pandas==3.1.1 python-dateutil six trl==1.16.0 xxhash==4.1.0
    pip download --no-deps verl==0.9.1 && unzip -d VERLS verl-0.9.1-*.whl

This file decides
* An update is everything from tokens to new weights: log-probs, loss, backward, norm and AdamW.
  Rows, micro-batches, float32 weights and gradient checkpointing are the same for both. TRL's runs
  in its own `train()`; only its sampling is replaced, by the fixed batch. The norms of the first
  gradient show that both compute the same. Rates count tokens without padding.
* TRL gets PyTorch's choice of attention kernels; `policy.py` leaves out cuDNN's.
* verl's file is imported without the package around it, which asks for Ray. A row names stand-ins.
* A part that fails is one row, and the next one runs. Figures of tiny shapes mean nothing.
  TRL would spread a batch over all GPUs that it sees: show it one.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from three_policies import trainer
from three_policies.correction import correct
from three_policies.presets import PRESETS
from three_policies.rollout import Sample
from three_policies.tools import bench, gpu_report
from three_policies.tools.gpu_report import GIB, ON_GPU, wait
from three_policies.training.files import read_metrics
from three_policies.training.settings import load_config
from three_policies.training.tasks import Task

SAMPLES = 4                                # of each prompt
failed: list[str] = []


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |", flush=True)


def head(*cells: str) -> None:
    print(flush=True)
    row(*cells)
    print("|---" * len(cells) + "|", flush=True)


@contextlib.contextmanager
def attempt(what: str):
    """Turn whatever goes wrong into a row."""
    try:
        yield
    except Exception as error:
        failed.append(what)
        lines = str(error).strip().splitlines() or ["no word"]
        row(what, f"FAILED: {type(error).__name__}: {lines[0]}")


def free() -> int:
    """Free what nothing refers to; return the bytes that are left on the GPU."""
    gc.collect()
    if not ON_GPU:
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


# -------------------------------------------------------------------------- an update, beside TRL's

class Figures(NamedTuple):
    seconds: list[float]                   # of each update after the first
    gibibytes: float                       # at the peak, of this trainer alone
    gradient: float                        # norm of the first update's

    def show(self, what: str, tokens: int, ours: float | None) -> float:
        """Print a row with k = our rate over this one, and return this rate."""
        middle = statistics.median(self.seconds)
        rate = tokens / middle
        row(what, f"{rate:,.0f}", f"{middle:.4g} ({min(self.seconds):.4g}–{max(self.seconds):.4g})",
            f"{self.gibibytes:.1f}" if ON_GPU else "a GPU's", f"{self.gradient:.4g}",
            f"{ours / rate:.2f}" if ours else "1")
        return rate


def make_batch(given: argparse.Namespace, shortest: int, device: torch.device) -> trainer.Batch:
    """Draw random tokens: groups of `SAMPLES`, responses of `shortest` to `given.response`."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = AutoConfig.from_pretrained("model").vocab_size

    def draw(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=generator).tolist()

    span = given.response - shortest + 1
    prompts = [p for _ in range(given.rows // SAMPLES) for p in [draw(given.prompt)] * SAMPLES]
    responses = [draw(given.response - 17 * i % span) for i in range(given.rows)]
    samples = [Sample(tokens, [0.0] * len(tokens), True) for tokens in responses]
    return trainer.pad(prompts, samples, torch.randn(given.rows, generator=generator), device)


class Ours:
    """As much of a run as `trainer.update` needs, as in tools/gpu_report.py."""

    def __init__(self, given: argparse.Namespace, device: torch.device) -> None:
        self.held, self.repeats = free(), given.repeats
        self.run = gpu_report.make_run(
            gpu_report.settings(given.micro, given.dtype, checkpointing=True), device)

    def measure(self, batch: trainer.Batch) -> Figures:
        """Take updates at π_rollout = π_old, where no weight of `correct` changes the gradient."""
        options, policy = PRESETS["decoupled_token_is"](), self.run.loaded.policy
        free()
        old = trainer.score(policy, batch, self.run.config)
        batch = batch._replace(old_log_prob=old, rollout_log_prob=old)
        decided = correct(old, old, batch.response_mask, options)
        done, seconds = trainer.update(self.run, batch, options, decided), []
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()

        for _ in range(self.repeats):
            began = wait()
            trainer.update(self.run, batch, options, decided)
            seconds.append(wait() - began)
        most = torch.cuda.max_memory_allocated() if ON_GPU else 0
        return Figures(seconds, (most - self.held) / GIB, done.metrics["grad_norm"].item())


class Clock(TrainerCallback):
    """Times what lies between the two ends of every step but the first."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, []

    def on_step_begin(self, args, state, control, **_):
        if ON_GPU and state.global_step == 1:                  # the first one is done
            torch.cuda.reset_peak_memory_stats()
        self.began = wait()

    def on_step_end(self, args, state, control, **_):
        if state.global_step > 1:
            self.seconds.append(wait() - self.began)


def make_trl(given: argparse.Namespace, weights: str, clock: Clock, made: Any,
             reward: Callable[..., list[float]]) -> Any:
    """Make TRL's trainer, or a subclass of it that is `made`, with TRL's defaults otherwise."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from datasets.table import InMemoryTable  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]
    config = GRPOConfig(
        output_dir="trl", max_steps=1 + given.repeats, per_device_train_batch_size=given.micro,
        gradient_accumulation_steps=given.rows // given.micro, num_generations=SAMPLES,
        max_completion_length=given.response, beta=0.0, loss_type="dapo", temperature=1.0,
        bf16=given.dtype == "bfloat16", gradient_checkpointing=True, lr_scheduler_type="constant",
        model_init_kwargs={"dtype": weights}, use_cpu=not ON_GPU, save_strategy="no", report_to=[],
        logging_first_step=True, logging_steps=10_000, disable_tqdm=True)
    table = InMemoryTable.from_pydict({"prompt": questions(given)})
    return made("model", reward, config, Dataset(table, fingerprint="prompts"), callbacks=[clock],
                processing_class=AutoTokenizer.from_pretrained("model"))


def measure_trl(given: argparse.Namespace, batch: trainer.Batch, weights: str) -> Figures:
    """Run TRL's `train()` on the batch; `weights` is their dtype and that of AdamW's moments."""
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    class Fixed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            (prompts, responses), (prompt_mask, response_mask) = (
                x.to(batch.advantages.device).tensor_split([given.prompt], 1) for x in batch[:2])
            return {"prompt_ids": prompts, "prompt_mask": prompt_mask,
                    "completion_ids": responses, "completion_mask": response_mask,
                    "advantages": batch.advantages[:, 0],
                    "num_items_in_batch": response_mask.sum()}

    held, clock = free(), Clock()
    trl = make_trl(given, weights, clock, Fixed, lambda **_: [])
    with contextlib.redirect_stdout(sys.stderr):               # its log
        trl.train()
    most = torch.cuda.max_memory_allocated() if ON_GPU else 0
    return Figures(clock.seconds, (most - held) / GIB, trl.state.log_history[0]["grad_norm"])


@contextlib.contextmanager
def attention_of_torch():
    """Give TRL the kernels that it has alone: `load_policy` switches cuDNN's off, for all."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def update(given: argparse.Namespace) -> None:
    """Measure ours, TRL's twice, and ours again, which shows the drift of the machine."""
    head("update", "tokens/s", "s an update (lowest–highest)", "peak, GiB", "first gradient",
         "ours over this")
    kinds = {"float32": f"float32 weights, computed in {given.dtype}",
             "bfloat16": "bfloat16 weights and moments"}
    with gpu_report.group() as device:
        ours = None
        with attempt("ours"):
            ours = Ours(given, device)
        for shortest in (given.response, max(1, given.response // 2)):
            batch, rate = make_batch(given, shortest, device), None
            tokens = int(batch.attention.sum())
            shape = (f"{given.rows} × ({given.prompt} + {shortest}"
                     f"{'' if shortest == given.response else f' to {given.response}'})")
            if ours:
                with attempt(f"ours, {shape}"):
                    rate = ours.measure(batch).show(
                        f"ours, {kinds['float32']}, {shape}", tokens, None)
            for weights in ["float32"] + ["bfloat16"] * (given.dtype == "bfloat16"):
                with attempt(f"TRL, {kinds[weights]}, {shape}"), attention_of_torch():
                    measure_trl(given, batch, weights).show(
                        f"TRL, {kinds[weights]}, {shape}", tokens, rate)
            if ours and rate:
                with attempt(f"ours again, {shape}"):
                    ours.measure(batch).show(f"ours again, {shape}", tokens, rate)


# --------------------------------------------------------------- a step with sampling, beside TRL's

def step(given: argparse.Namespace) -> None:
    """Measure whole steps, each trainer with its own loop around Hugging Face's `generate`.

    TRL has no pass for π_old here and no engine to send weights to; ours has both. Rewards are
    drawn at random, since the answers are noise and equal rewards would give no gradient.
    """
    head("step", "sampled tokens/s", "s a step (lowest–highest)", "ours over this")
    what = (f"{given.rows} × ({given.prompt} + {given.response}), {{}} weights, "
            f"computed in {given.dtype}")
    ours = None
    with attempt("ours"):
        ours = show_steps(f"ours, {what.format('float32')}", steps_of_ours(given), None)
    for weights in ["float32"] + ["bfloat16"] * (given.dtype == "bfloat16"):
        with attempt(f"TRL, {weights} weights"), attention_of_torch():
            show_steps(f"TRL, {what.format(weights)}", steps_of_trl(given, weights), ours)


def show_steps(what: str, steps: list[tuple[float, float]], ours: float | None) -> float:
    """Print a row of (tokens, seconds) of each step, and return the rate."""
    rate = sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)
    seconds = [seconds for _, seconds in steps]
    row(what, f"{rate:,.0f}", f"{statistics.median(seconds):.4g} ({min(seconds):.4g}–"
        f"{max(seconds):.4g})", f"{ours / rate:.2f}" if ours else "1")
    return rate


def questions(given: argparse.Namespace) -> list[str]:
    """Return questions of `given.prompt` characters, which are tokens of random weights' model."""
    return [f"{i}+{i}=".rjust(given.prompt, "0") for i in range(10 * given.rows)]


def steps_of_ours(given: argparse.Namespace) -> list[tuple[float, float]]:
    Path("questions.jsonl").write_text("\n".join(
        json.dumps({"question": question, "answer": "#### 0"}) for question in questions(given)))
    config = load_config([
        "run=ours", "policy.path=model", f"policy.dtype={given.dtype}", "rollout.quantize=null",
        "policy.gradient_checkpointing=true", "rollout.engine=transformers",
        f"rollout.dtype={given.dtype}", f"rollout.prompts={given.rows // SAMPLES}",
        f"rollout.samples={SAMPLES}", f"rollout.max_tokens={given.response}", "task.kind=jsonl",
        "task.path=questions.jsonl", "task.eval_path=null", "task.eval_size=4",
        "task.instruction=''", "task.chat_template=false", "train.mini_batches=1", "train.lr=1e-6",
        f"train.micro_batch_size={given.micro}", f"train.steps={given.repeats + 2}",
        "train.eval_every=1000", "train.save_every=1000"])
    with (mock.patch.object(Task, "reward", lambda *_: random.random()),
          contextlib.redirect_stdout(sys.stderr)):
        trainer.start(config)
    lines = read_metrics(Path("runs/ours/metrics.jsonl"))[1:-1]      # the last one evaluates too
    return [(line["response/tokens"], line["time/step"]) for line in lines]


def steps_of_trl(given: argparse.Namespace, weights: str) -> list[tuple[float, float]]:
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]
    tokens, clock = [], Clock()

    def reward(completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        return [random.random() for _ in completion_ids]

    free()
    with contextlib.redirect_stdout(sys.stderr):
        make_trl(given, weights, clock, GRPOTrainer, reward).train()
    return list(zip(tokens[1:], clock.seconds, strict=True))


# ------------------------------------------------------------------------- `correct`, beside verl's

def load_verl(directory: str) -> tuple[Callable[..., Any], list[str]]:
    """Import verl's file alone, and name what stands in for its imports.

    Its packages are entered without their __init__.py, which asks for Ray. DataProto, a wrapper of
    the returned weights, and PolicyLossConfig, a type in a signature, are stand-ins.
    """
    if not Path(directory, "verl/trainer/ppo/rollout_corr_helper.py").exists():
        raise FileNotFoundError(f"{directory} is not verl's wheel, unpacked")
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.config", "verl.trainer.ppo",
                 "verl.workers", "verl.workers.config"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(Path(directory, *name.split(".")))]

    class DataProto(SimpleNamespace):
        @classmethod
        def from_dict(cls, tensors):
            return cls(batch=tensors)

    given = {"verl.protocol": ("DataProto", DataProto),
             "verl.workers.config.actor": ("PolicyLossConfig", type("PolicyLossConfig", (), {}))}
    try:
        import tensordict  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        given["tensordict"] = ("TensorDict", dict)
    for module, (name, stand_in) in given.items():
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], name, stand_in)
    from verl.trainer.ppo import rollout_corr_helper  # pyright: ignore[reportMissingImports]
    return (rollout_corr_helper.compute_rollout_correction_and_rejection_mask,
            [f"{module}.{name}" for module, (name, _) in given.items()])


def on_host(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Bring all metrics to the host at once, as a trainer's log does."""
    return dict(zip(metrics, torch.stack([x.float() for x in metrics.values()]).tolist()))


def peak(call: Callable[[], Any], unit: int) -> str:
    """Return the most memory beyond the inputs, in tensors of `unit` bytes."""
    if not ON_GPU:
        return f"{bench.peak(call) / unit:.1f}"
    before = free()
    torch.cuda.reset_peak_memory_stats()
    call()
    return f"{(torch.cuda.max_memory_allocated() - before) / unit:.1f}"


def correction(given: argparse.Namespace) -> None:
    """Measure `correct` until its metrics are floats on the host, which verl's always are."""
    shape = (512, 4096) if ON_GPU else (64, 512)
    head(f"`correct` with metrics, {[*shape]}", "ours, ms", "peak, [B, T] tensors",
         "verl 0.9.1, ms", "verl's peak", "ours/verl (quartiles)",
         "ours, metrics left on the device/verl", "metrics in both")
    train, rollout, mask = (
        x.to("cuda" if ON_GPU else "cpu") for x in bench.batch(*shape))
    data, verl = (train, rollout, mask), None
    with attempt("verl's file"):
        if given.verl is None:
            raise FileNotFoundError("--verl is not given")
        verl, stand_ins = load_verl(given.verl)
        row("stand-ins for what verl's file imports", ", ".join(stand_ins))
    for name, (config, verls) in bench.SETTINGS.items():
        with attempt(name):
            calls = {"ours": lambda c=config: on_host(correct(*data, c).metrics),
                     "there": lambda c=config: correct(*data, c).metrics}
            if verl:
                calls["verl"] = lambda call=verl, v=verls: call(*data, **v)[2]
            row(name, *compare(calls, train.nbytes))


def compare(calls: dict[str, Callable[[], Any]], unit: int) -> list[str]:
    """Return the cells of a row; `unit` bytes are a [B, T] tensor."""
    took = bench.paired({name: lambda call=call: (call(), wait()) for name, call in calls.items()},
                        turns=20)
    ours, *theirs = ([f"{1e3 * statistics.median(took[name]):.3g}", peak(calls[name], unit)]
                     for name in ("ours", "verl") if name in calls)
    if not theirs:
        return [*ours, *[""] * 5]
    mine, verls = calls["ours"](), calls["verl"]()
    both = sorted(mine.keys() & verls.keys())
    apart = [name.removeprefix("rollout_corr/") for name in both
             if not math.isclose(mine[name], verls[name], rel_tol=1e-3, abs_tol=1e-3)]
    return [*ours, *theirs[0], bench.ratio(took["ours"], took["verl"]),
            bench.ratio(took["there"], took["verl"]),
            f"{len(both)}, of which apart: {', '.join(apart) or 'none'}"]


# --------------------------------------------------------------------------------------------------

PARTS = {"correct": correction, "update": update, "step": step}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["correct", "update"])
    parser.add_argument("--model", help="a folder; otherwise random weights are written")
    parser.add_argument("--verl", help="verl 0.9.1's wheel, unpacked")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    for name, on_gpu, tiny in [("rows", 64, 8), ("micro", 16, 4), ("prompt", 128, 6),
                               ("response", 512, 10), ("repeats", 4, 3)]:
        parser.add_argument(f"--{name}", type=int, default=on_gpu if ON_GPU else tiny)
    given = parser.parse_args(argv)
    if given.rows % given.micro or given.rows % SAMPLES:
        parser.error(f"--rows={given.rows} must be a multiple of --micro and of {SAMPLES}")
    return given


def main(argv: list[str]) -> int:
    given = parse(argv)
    for name in ("model", "verl"):
        if getattr(given, name):
            setattr(given, name, str(Path(getattr(given, name)).resolve()))
    if not ON_GPU:
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        where = torch.cuda.get_device_name() if ON_GPU else "NO GPU: tiny shapes"
        print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}",
              flush=True)
        if given.model:
            os.symlink(given.model, "model")
        elif given.parts != ["correct"]:
            gpu_report.make_model("model", gpu_report.SHAPE)
        for part in given.parts:
            with attempt(part):
                PARTS[part](given)
        os.chdir("/")
    print(f"\n{time.perf_counter() - began:.0f} s, {len(failed)} rows failed", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
