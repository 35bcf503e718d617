"""A run: what it has open, what it says, and what it leaves behind in runs/<run>/.

This file decides nothing that is learned: it opens task, models and engine, counts the steps under
a progress bar, writes metrics, curves and the final model, and watches the engine's calls.
"""

import contextlib
import ctypes
import functools
import gc
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm

from metrics import diagnose, to_host
from plumbing.checkpoints import Checkpoints, aside, read_metrics, write
from plumbing.faults import explain, process_group, require_one_directory, watched
from plumbing.settings import Config, UserError, correction_of, remarks
from plumbing.tasks import Problem, make_demo_model, make_task, seed_of
from policy import full_weights, load_policy
from rollout import Cut, Sample, WeightSync, make_engine

@contextlib.contextmanager
def opened(config: Config):
    """The run of a configuration, in its process group; None if it is finished already."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="torch.distributed")
    with process_group() as device:
        if device.type == "cpu":
            keep_memory()
        if dist.get_world_size() > 1:
            require_one_directory(Path("runs"))
        run = Run(config, device)
        if run.finished:
            run.say(f"{run.directory} is finished after {run.done} steps; a larger train.steps "
                    "continues it")
            yield None
            return
        try:
            run.open()
            run.restore()
            gc.freeze()            # else a collection walks through all loaded libraries: 0.2 s
            yield run
        finally:
            gc.unfreeze()
            run.close()            # before the process group: vLLM needs it to shut down


def keep_memory() -> None:
    """What is freed stays with the process: else the kernel hands out, and clears, every large
    tensor anew, which takes a third of an update of 0.5B parameters. glibc's mallopt(3)."""
    with contextlib.suppress(OSError, AttributeError):         # another C library
        mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4       # of malloc.h
        mallopt(mmap_max, 0)                   # no block is a mapping of its own
        mallopt(trim_threshold, -1)            # and the heap never shrinks


class Run:
    """What a run has open: the directory runs/<run>/, the models, the engine, the clock."""

    def __init__(self, config: Config, device):
        self.config, self.device, self.main = config, device, dist.get_rank() == 0
        self.directory = Path("runs") / config.run
        self.metrics = self.directory / "metrics.jsonl"
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config)
        self.done, self.before = self.checkpoints.step, self.checkpoints.saved.get("before")
        self.engine = self.reference = self.answers = None
        self.warned = set()                        # metrics that `diagnose` has already spoken of

    @property
    def finished(self) -> bool:
        return self.done >= self.config.train.steps and (self.directory / "model").is_dir()

    def open(self) -> None:
        config = self.config
        self.task = make_task(config.task, config.seed)
        if config.policy.path is None and not self.task.exact:
            raise UserError("policy.path must name a model for task.kind=jsonl or parquet: the "
                            "demo model knows digits and brackets only")
        path = config.policy.path or make_demo_model(config, self.task)
        try:
            model = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            try:
                Cut.of(config.rollout.top_p, config.rollout.top_k, config.rollout.min_p,
                       model.get_text_config().vocab_size)
            except ValueError as error:
                raise UserError(str(error)) from None
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path,
                                                                        trust_remote_code=False)
            self.prompts = self.encode(self.task.train, model)
            self.held_out_prompts = self.encode(self.task.held_out, model)
            load = functools.partial(load_policy, path, config.rollout.temperature,
                                     config.policy.dtype, self.device)
            self.policy = load(gradient_checkpointing=config.policy.gradient_checkpointing)
        except UserError:
            raise
        except Exception as error:         # of as many types as there are kinds of damage
            reason = explain(error) or str(error).strip().split("\n")[0]
            raise UserError(f"policy.path={path} cannot be loaded: {reason}") from None
        ends = self.policy.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.eos_ids = sorted({*ends, self.tokenizer.eos_token_id} - {None})
        if config.loss.kl_coef != 0:
            self.reference = load(frozen=True)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.train.lr, fused=True,
                                           weight_decay=config.train.weight_decay)
        longest = max(map(len, self.prompts + self.held_out_prompts)) + config.rollout.max_tokens
        try:
            self.engine = make_engine(
                config.rollout.engine, str(path), dtype=config.rollout.dtype, device=self.device,
                max_model_len=longest, batch_size=config.rollout.batch_size,
                gpu_memory_utilization=config.rollout.gpu_memory_utilization,
                enforce_eager=config.rollout.enforce_eager, top_p=config.rollout.top_p,
                top_k=config.rollout.top_k, min_p=config.rollout.min_p, candidates=(
                    config.rollout.candidates if correction_of(config).score_centering else 0))
        except Exception as error:         # vLLM's are of many types
            raise UserError(f"rollout.engine={config.rollout.engine} does not start: "
                            f"{explain(error) or error}") from None
        self.sync = WeightSync(self.engine, config.rollout.staleness, config.rollout.quantize_bits,
                               config.rollout.dtype)

    def encode(self, problems: list[Problem], model) -> list[list[int]]:
        """Token ids of every prompt, through the chat template of a model that has one."""
        context = getattr(model.get_text_config(), "max_position_embeddings", None) or math.inf
        encoded, room = [], context - self.config.rollout.max_tokens
        for problem in problems:
            text = f"{problem.question} {self.config.task.instruction}".rstrip()
            if self.tokenizer.chat_template:
                ids = self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True,
                    return_dict=False)
            else:
                ids = self.tokenizer(text).input_ids
            if not 0 < len(ids) <= room:
                raise UserError(f"{problem.where} is a prompt of {len(ids)} tokens: between 1 and "
                                f"{room} are left of the model's context of {context} by "
                                f"rollout.max_tokens={self.config.rollout.max_tokens}")
            encoded.append(ids)
        return encoded

    def restore(self) -> None:
        """To the last checkpoint, if there is one."""
        config, count = self.config, sum(p.numel() for p in self.policy.parameters())
        if count < 10_000_000:
            torch.set_num_threads(1)         # a second thread costs a tiny model more than it saves
        self.say(f"{self.directory}: {count / 1e6:.1f}M parameters on {dist.get_world_size()} × "
                 f"{self.device.type}, engine {self.engine.name} ({config.rollout.dtype}), "
                 f"correction {config.correction.get('preset', 'as configured')}")
        for sentence in remarks(config):
            self.say(f"* {sentence}")
        if self.done:
            self.checkpoints.load(self)
            self.say(f"continuing after step {self.done}")

    def steps(self):
        """The numbers of the steps still to do, under a progress bar."""
        config, self.accuracy = self.config, self.before
        if self.main:              # the metrics are cut back to the last checkpoint
            self.directory.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(OmegaConf.structured(config), self.directory / "config.yaml")
            lines = read_metrics(self.metrics) if self.metrics.exists() else []
            write(self.metrics, [line for line in lines if line["step"] <= self.done])
        with tqdm(total=config.train.steps, initial=self.done, disable=not self.main,
                  desc=config.run, mininterval=1) as self.bar, self.tensorboard() as self.scalars:
            for step in range(self.done + 1, config.train.steps + 1):
                torch.manual_seed(seed_of(config.seed, "dropout", step, dist.get_rank()))
                self.times, self.began, self.step = {}, time.perf_counter(), step
                self.skipped = {"train/skipped_samples": 0, "train/skipped_updates": 0}
                yield step

    def tensorboard(self):
        """A writer of the same metrics for TensorBoard, where that is installed; else None."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return contextlib.nullcontext()
        if not self.main:
            return contextlib.nullcontext()
        return SummaryWriter(self.directory / "tensorboard", purge_step=self.done + 1)

    def nonfinite(self, what: str, own: list[str]) -> None:
        """All ranks together: end the run with the first sentence found, or say and count it."""
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        found = sum(everyone, []) or ["the gradient of π_θ is not finite, though its log-probs are"]
        sentence = f"step {self.step}: {found[0]}"
        if self.config.train.on_nonfinite == "raise":
            raise UserError(f"{sentence}; train.on_nonfinite=skip goes on without such {what}")
        self.skipped[f"train/skipped_{what}"] += len(found) if what == "samples" else 1
        self.say(f"* {sentence}")

    def nonfinite_rows(self, batch, policies: dict[str, Tensor]) -> list[str]:
        """Policy, token and prompt of the first log-prob that is not finite, for each such row."""
        found, width = {}, batch.response_mask.shape[1]
        for policy, log_prob in policies.items():
            for row, t in (~log_prob.isfinite() & batch.response_mask).nonzero().tolist():
                prompt = batch.tokens[row, :-width][batch.attention[row, :-width].bool()]
                prompt, token = map(self.tokenizer.decode, (prompt, batch.tokens[row, t - width]))
                found.setdefault(row, f"{policy} has the log-prob {log_prob[row, t].item()} for "
                                 f"token {t + 1}, {token!r}, after the prompt {prompt[-200:]!r}")
        return list(found.values())

    @contextlib.contextmanager
    def timed(self, name: str):
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times[f"time/{name}"] = time.perf_counter() - began

    def generate(self, prompts: list[list[int]],
                 seeds: list[int]) -> tuple[list[Sample], list[str]]:
        with watched(self.engine, self.config.rollout.timeout):
            samples = self.engine.generate(
                prompts, seeds, temperature=self.config.rollout.temperature,
                max_tokens=self.config.rollout.max_tokens, eos_ids=self.eos_ids)
        return samples, self.tokenizer.batch_decode([s.tokens for s in samples],
                                                    skip_special_tokens=True)

    def update_engine(self, push) -> None:
        with watched(self.engine, self.config.rollout.timeout):
            push(full_weights(self.policy))

    def log(self, step: int, metrics: dict) -> None:
        seconds, metrics = time.perf_counter() - self.began, to_host(metrics)
        with contextlib.suppress(OSError):         # where the system tells what is in memory
            pages = Path("/proc/self/statm").read_text().split()[1]
            metrics["memory/rss_mb"] = int(pages) * os.sysconf("SC_PAGE_SIZE") / 2 ** 20
        metrics = {"step": step, **metrics, **self.skipped, **self.times,
                   "learning_rate": self.optimizer.param_groups[0]["lr"], "time/step": seconds,
                   "tokens_per_second": metrics["response/tokens"] / seconds}
        self.accuracy = metrics.get("eval/accuracy", self.accuracy)
        if not self.main:
            return
        with self.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        for name, value in metrics.items() if self.scalars else ():
            self.scalars.add_scalar(name, value, step)
        kl = metrics.get("rollout_corr/k3_kl", math.nan)
        self.bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f} accuracy {self.accuracy:.3f}"
                                 f" ESS {ess(metrics):.3f} KL {kl:.1e}", refresh=False)
        self.bar.update()
        for sentence in diagnose(metrics):         # each metric once, when it first looks wrong
            if (name := sentence.split()[0]) not in self.warned:
                self.warned.add(name)
                self.say(f"* step {step}: {sentence}")

    def save_if_due(self, step: int) -> None:
        if step == self.config.train.steps or step % self.config.train.save_every == 0:
            self.checkpoints.save(self, step)

    def finish(self) -> None:
        """The model as a Hugging Face directory, held-out answers, curves and a closing table."""
        weights = {name: x.cpu() for name, x in full_weights(self.policy) if self.main}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.answers)
        if self.main:
            write(self.directory / "eval.jsonl", sum(everyone, []))
            plot(lines := read_metrics(self.metrics), self.directory / "curves.png")
        with aside(self.directory / "model") as path:      # the last: a run with it is finished
            if self.main:
                self.policy.model.save_pretrained(path, state_dict=weights)
                self.tokenizer.save_pretrained(path)
        if not self.main:
            return
        first, last = lines[0], lines[-1]
        table = [(f"accuracy, {len(self.task.held_out)} held-out problems, sampled", self.before,
                  last["eval/accuracy"])]
        for name in ("reward/mean", "response/length_mean", "rollout_corr/k3_kl"):
            table.append((name, first.get(name, math.nan), last.get(name, math.nan)))
        table.append(("effective sample size / N", ess(first), ess(last)))
        self.say(f"\n{'':48}{'before':>10}{'after':>10}")
        for name, before, after in table:
            self.say(f"{name:48}{before:10.4g}{after:10.4g}")
        for sentence in diagnose(last):
            self.say(f"* {sentence}")
        self.say(f"model, metrics and curves: {self.directory}")

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def ess(metrics: dict) -> float:
    """ESS/N of the raw weights where there are any, else the tokens' 1/(1 + χ²)."""
    raw = metrics.get("rollout_corr/rollout_is_raw_eff_sample_size")
    chi2 = max(metrics.get("rollout_corr/chi2_token", math.nan), 0.0)       # nan: nothing was left
    return 1 / (1 + chi2) if raw is None else raw


def plot(lines: list[dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = ["reward/mean", "eval/accuracy", "response/length_mean", "rollout_corr/k3_kl",
             "loss/clip_fraction", "grad_norm"]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for name, axis in zip(names, axes.flat):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot(*zip(*points), marker="o" if len(points) < 20 else None)
        axis.set(title=name, xlabel="step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
