"""A run reports its settings in short, its closing table and its curves.

This file decides nothing: it reads the metrics that are there. `three-policies report RUN` does so
for a run that goes on, was stopped, or has ended.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from three_policies.checks import UserError
from three_policies.doctor import diagnose
from three_policies.training.files import read_metrics
from three_policies.training.settings import Config


def say(text: str) -> None:
    """Print a line above the progress bar, on the first rank alone."""
    if dist.get_rank() == 0:
        tqdm.write(text, file=sys.stderr)


def summarize(config: Config) -> str:
    """Return the settings that matter most, for the run's first lines."""
    rollout, train = config.rollout, config.train
    weights = rollout.quantize or rollout.dtype
    weights = f"{weights}-bit" if isinstance(weights, int) else weights
    late = f", {rollout.staleness} syncs stale" if rollout.staleness else ""
    late += f" and renewed every {rollout.update_every} tokens" if rollout.update_every else ""
    return (f"{rollout.prompts} prompts × {rollout.samples} responses of at most "
            f"{rollout.max_tokens} tokens a step at temperature {rollout.temperature:g}, from "
            f"{weights} weights{late}; "
            f"{train.steps} steps of {train.epochs * train.mini_batches} updates at learning rate "
            f"{train.lr:g}, {train.micro_batch_tokens or train.micro_batch_size} "
            f"{'tokens' if train.micro_batch_tokens else 'rows'} at a time")


def judge_accuracy(before: float, after: float, n: int) -> str:
    """Return in words if the accuracy on n problems moved by more than two standard errors.

    The standard error is that of a difference, √(p(1 − p)/n + q(1 − q)/n). For p and q it takes
    (right + 1)/(n + 2), so that accuracies of 0 and 1 have an error, too.
    """
    shares = [(accuracy * n + 1) / (n + 2) for accuracy in (before, after)]
    error = math.sqrt(sum(p * (1 - p) / n for p in shares))
    change = f"by {abs(after - before):.3f}, and two standard errors are {2 * error:.3f}"
    if abs(after - before) <= 2 * error:
        return f"held-out accuracy changed {change}: this run shows neither a rise nor a fall"
    return f"held-out accuracy {'rose' if after > before else 'FELL'} {change}"


def closing_table(lines: list[dict], before: float, after: float, n: int) -> list[str]:
    """Compare the first step with the last, judge the accuracy on n problems, and list warnings."""
    table = [(f"accuracy, {n} held-out problems, sampled", before, after),
             *compared(lines[0], lines[-1])]
    return ["", *in_columns(table), judge_accuracy(before, after, n),
            *(f"* {sentence}" for sentence in diagnose(lines[-1]))]


Row = tuple[str, float, float]


def compared(first: dict, last: dict) -> list[Row]:
    """Return what a table compares of two steps."""
    names = ("reward/mean", "response/length_mean", "rollout_corr/k3_kl")
    return [*((name, first.get(name, math.nan), last.get(name, math.nan)) for name in names),
            ("effective sample size / N", ess(first), ess(last))]


def in_columns(rows: list[Row]) -> list[str]:
    return [f"{'':48}{'before':>12}{'after':>12}",
            *(f"{name:48}{x:12.4g}{y:12.4g}" for name, x, y in rows)]


def ess(metrics: dict) -> float:
    """Return ESS/N of the raw weights, or, if a run has no weights, 1/(1 + χ²) of its tokens."""
    seq = "seq_" if metrics.get("rollout_corr/rollout_is_per_sequence") == 1 else ""
    raw = metrics.get(f"rollout_corr/rollout_is_raw_{seq}eff_sample_size")
    chi2 = max(metrics.get("rollout_corr/chi2_token", math.nan), 0.0)       # nan: nothing was left
    return 1 / (1 + chi2) if raw is None else raw


CURVES = ["reward/mean", "eval/accuracy", "response/length_mean", "rollout_corr/k3_kl",
          "loss/clip_fraction", "grad_norm"]


def plot(lines: list[dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for name, axis in zip(CURVES, axes.flat):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot(*zip(*points), marker="o" if len(points) < 20 else None)
        axis.set(title=name, xlabel="step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a run's table and draw its curves; return 0, or 2 if there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="three-policies report", description="Compare the first step of a run with its last, "
        "say what looks wrong, and draw the curves.")
    parser.add_argument("run", metavar="RUN", help="its name in runs/, or its directory")
    named = Path(parser.parse_args(argv).run)
    directory = named if (named / "metrics.jsonl").exists() else Path("runs") / named

    try:
        lines = read_metrics(directory / "metrics.jsonl")
    except (OSError, UserError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"report: {why}", file=sys.stderr)
        return 2
    if not lines:
        print(f"report: {directory} has no step yet", file=sys.stderr)
        return 2

    plot(lines, directory / "curves.png")
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line] or [math.nan]
    table = [("accuracy, held-out problems, sampled", accuracy[0], accuracy[-1]),
             *compared(lines[0], lines[-1])]
    print("\n".join([f"{directory}, steps {lines[0]['step']} to {lines[-1]['step']}",
                     *in_columns(table), *(f"* {sentence}" for sentence in diagnose(lines[-1])),
                     f"curves: {directory / 'curves.png'}"]))
    return 0
