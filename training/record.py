"""Record a run: metrics.jsonl, TensorBoard, the progress bar, dumps, and what is said once.

This file decides nothing that is learned. A number that is not finite ends the run here, or is
counted, as train.on_nonfinite says.
"""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from three_policies.checks import UserError
from three_policies.doctor import diagnose, examine
from three_policies.doctor.dumps import append, responses_of, rows_of
from three_policies.doctor.normal import Class
from three_policies.metrics import to_host
from three_policies.rollout import Engine
from three_policies.training.capacity import gpu_peak, memory_metrics
from three_policies.training.files import read_metrics, write
from three_policies.training.report import ess, say
from three_policies.training.rewards import by_last_number
from three_policies.training.settings import TEXT_KINDS, Config, as_yaml
from three_policies.training.tasks import Problem

EXAMINED = 2 ** 14         # tokens of the first batch: the doctor needs less than half a second


class Record:
    """Record one run in its directory. Of several ranks the first one writes and speaks."""

    def __init__(self, config: Config, directory: Path, done: int, device: torch.device,
                 engine: Engine, experts: bool = False):
        self.config, self.directory, self.done, self.device = config, directory, done, device
        self.engine = engine                       # a GPU's peak leaves out what it gave back
        # What is known of both sides of a dump; a reader that does not know `pair` ignores it.
        self.pair = {"engine": config.rollout.dtype, "trainer": config.policy.dtype,
                     "quantize": config.rollout.quantize, "experts": experts}
        self.main = dist.get_rank() == 0
        self.metrics = directory / "metrics.jsonl"
        self.step, self.began = done, time.perf_counter()
        self.times: dict[str, float] = {}          # seconds of each part of the step
        self.skipped = {"train/skipped_samples": 0, "train/skipped_updates": 0}     # in the step
        self.most = 0.0                            # MB of memory so far, on a GPU in this step
        self.best = 0.0                            # mean reward of a step so far
        self.accuracy = math.nan                   # the last that was measured
        self.spoken_of: set[str] = set()           # metrics that a sentence was about
        self.consulted = False                     # whether the doctor has seen a batch
        self.shown = False                         # whether a prompt and a response were shown
        if self.main:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.yaml").write_text(as_yaml(config), encoding="utf-8")
            self.cut_back()
        self.bar = tqdm(total=config.train.steps, initial=done, disable=not self.main,
                        desc=config.run, mininterval=1)
        self.board = tensorboard(directory / "tensorboard", done + 1) if self.main else None

    def cut_back(self) -> None:
        """Cut the metrics back to the last checkpoint."""
        lines = read_metrics(self.metrics) if self.metrics.exists() else []
        done = [line for line in lines if line["step"] <= self.done]
        write(self.metrics, done)
        if [line["step"] for line in done] != [*range(1, self.done + 1)]:
            say(f"* {self.metrics} lacks steps before step {self.done + 1}, or repeats some: its "
                "curves and means are not of the whole run")
        self.best = max((line.get("reward/mean", 0.0) for line in done), default=0.0)
        if len(lines) > len(done):
            say("* steps repeated, since the last checkpoint is older: "
                f"{len(lines) - len(done)}")

    def close(self) -> None:
        self.bar.close()
        if self.board:
            self.board.close()

    def begin(self, step: int) -> None:
        self.step, self.began, self.times = step, time.perf_counter(), {}
        self.skipped = dict.fromkeys(self.skipped, 0)

    @contextlib.contextmanager
    def time_part(self, name: str) -> Iterator[None]:
        began, on_gpu = time.perf_counter(), self.device.type != "cpu"
        asleep = self.engine.given_back if on_gpu else 0
        yield
        if on_gpu:
            torch.accelerator.synchronize()
            asleep = min(asleep, self.engine.given_back)           # from the beginning to the end
            self.most = max(self.most, gpu_peak(self.device, asleep))
        self.times[f"time/{name}"] = time.perf_counter() - began

    def log(self, metrics: dict, flops: float, lr: float) -> None:
        """Write a step's line, and say what first looks wrong.

        flops: of the updates, in units of what all ranks do in a second.
        """
        seconds, metrics = time.perf_counter() - self.began, to_host(metrics)
        metrics |= memory_metrics(self.device, self.most)
        self.most = metrics["memory/peak_mb"] if self.device.type == "cpu" else 0.0
        self.times["time/mfu"] = flops / self.times["time/update"]
        self.best = max(self.best, metrics["reward/mean"])
        metrics = {"step": self.step, **metrics, "reward/best": self.best, **self.skipped,
                   **self.times, "learning_rate": lr, "time/step": seconds,
                   "tokens_per_second": metrics["response/tokens"] / seconds}
        self.accuracy = metrics.get("eval/accuracy", self.accuracy)
        if not self.main:
            return

        with self.metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, self.step)
        kl = metrics.get("rollout_corr/k3_kl", math.nan)
        self.bar.set_postfix_str(f"reward {metrics['reward/mean']:.3f} accuracy {self.accuracy:.3f}"
                                 f" ESS {ess(metrics):.3f} KL {kl:.1e}", refresh=False)
        self.bar.update()
        for sentence in diagnose(metrics):
            self.say_once(sentence.split()[0], f"* step {self.step}: {sentence}")

    def say_once(self, metric: str, sentence: str) -> None:
        if metric not in self.spoken_of:
            self.spoken_of.add(metric)
            say(sentence)

    def nonfinite(self, what: str, own: list[str]) -> None:
        """End the run with the first sentence of any rank, or report the sentence and count it."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        found = sum(everyone, []) or ["the gradient of π_θ is not finite, though its log-probs are"]
        sentence = f"step {self.step}: {found[0]}"
        if self.config.train.on_nonfinite == "raise":
            raise UserError(f"{sentence}; train.on_nonfinite=skip goes on without such {what}")
        self.skipped[f"train/skipped_{what}"] += len(found) if what == "samples" else 1
        say(f"* {sentence}")

    def show_first(self, prompt: str, response: str, reward: float) -> None:
        """Show a prompt as the model sees it, and its response, once."""
        if not self.shown:
            self.shown = True
            say(f"  the first prompt: {shortened(prompt)}")
            say(f"  the first response: {shortened(response)}, reward {reward:g}")

    def judge_match(self, problems: list[Problem], texts: list[str], rewards: list[float]) -> None:
        """Warn if nearly all rewards are 0 because answers are not found, not for want of skill."""
        task = self.config.task
        if (task.kind not in TEXT_KINDS or task.reward or task.match != "strict"
                or sum(rewards) > 0.1 * len(rewards)):
            return
        right = sum(by_last_number(p.question, p.answer, text) for p, text in zip(problems, texts))
        if right > 0.3 * len(texts):
            self.say_once("match", f"* of {len(texts)} responses {sum(x == 1 for x in rewards)} "
                          f"have reward 1, and {right:g} have the right last number: "
                          "task.match=last_number takes it")

    def wants_doctor(self) -> bool:
        """True if `consult` wants this step's, for the doctor or for a dump."""
        return not self.consulted or self.step <= self.done + self.config.train.dump

    def consult(self, batch: dict[str, Any]) -> None:
        """Dump a step's rows from all ranks, and report what the doctor says of the first step.

        batch: this rank's, as `rows_of` takes it.
        """
        if self.step <= self.done + self.config.train.dump:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.gather_object(rows_of(**batch), parts if self.main else None)
            if self.main:
                place = self.directory / "dumps" / f"step-{self.step:06d}.jsonl"
                place.parent.mkdir(exist_ok=True)
                place.unlink(missing_ok=True)          # of a start that was killed in this step
                append(place, [row | {"pair": self.pair} for part in parts for row in part])
        if not self.consulted and self.main:
            responses = responses_of(**batch)
            sizes = itertools.accumulate(len(r.token_ids) for r in responses)
            few = [r for r, size in zip(responses, sizes) if size <= EXAMINED] or responses[:1]
            report = examine(few, Class.stated(self.pair))
            say(f"the first batch, as the doctor sees it: {report.in_short()}")
        self.consulted = True


def tensorboard(place: Path, first: int) -> Any:
    """Return TensorBoard's writer of the steps from `first` on; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(place, purge_step=first)


def shortened(text: str, most: int = 400) -> str:
    """Return a text as Python writes it, without the middle of a long one."""
    return repr(text if len(text) <= most else f"{text[:most // 2]} … {text[-most // 2:]}")
