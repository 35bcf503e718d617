"""Does training collapse without correction, and does correction rescue it? The runs, one line each.

    python math/study.py        # what study.yaml asks for and study.csv has not got yet; then the
                                # figure and, in chapter 10, the tables

A cell is (regime, method, seed). Each runs the trainer in a process of its own, `--workers` at a
time, and adds one line to study.csv when it ends: stop this at any time, and start it again.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
COLUMNS = ["regime", "method", "seed", "final_accuracy", "best_accuracy", "first_accuracy",
           "steps_to_0.8", "max_grad_norm", "ess_raw", "ess_applied", "k3", "chi2_seq", "kept",
           "drop_step", "warned_ess", "warned_k3", "warned_grad_norm", "tokens", "seconds"]


# ---------------------------------------------------------------------------------------- one run

def run_cell(study: dict, regime: str, method: str, seed: int) -> dict:
    """Trains, and reads its line of the table out of the run's metrics."""
    import trainer
    from plumbing.checkpoints import read_metrics
    from plumbing.settings import flat, load_config
    settings = flat({**study["settings"], "correction": {"preset": method}, "seed": seed})
    settings |= study["regimes"][regime] | study["methods"].get(method, {})
    run = f"study-{regime}-{method}-{seed}"
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config([str(ROOT / "configs" / "disabled.yaml"), *overrides, f"run={run}"])
    log = Path("runs") / ".study" / f"{run}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    began = time.perf_counter()
    plant(method, trainer)
    trainer.start(config)
    lines = read_metrics(Path("runs") / run / "metrics.jsonl")
    return {"regime": regime, "method": method, "seed": seed, **summary(lines),
            "seconds": round(time.perf_counter() - began, 1)}


def plant(method: str, trainer) -> None:
    """The mistake, the controls and two weights: on purpose, the trainer has no settings for them."""
    import torch
    loss, correct = trainer.policy_loss, trainer.correct

    def double_count(log_prob, old, rollout, advantages, mask, *rest, **more):
        """PPO's ratio is π_θ/μ already, and π_θ/μ weighs it again: w·min(ρA, clip(ρ)A)."""
        weights = torch.where(mask, log_prob - rollout, 0.0).detach().exp().clamp(max=2.0)
        return loss(log_prob, old, rollout, weights * advantages, mask, *rest, **more)

    def shuffled_weights(old, rollout, mask, *rest):
        found = correct(old, rollout, mask, *rest)
        weights = found.weights.amax(-1, keepdim=True)[torch.randperm(len(mask))]     # [B, 1]
        return replace(found, weights=torch.where(mask, weights, 0.0))

    def fewer_samples(old, rollout, mask, *rest):
        found = correct(old, rollout, mask, *rest)
        kept = found.mask.any(-1, keepdim=True)[torch.randperm(len(mask))]            # [B, 1]
        return replace(found, weights=None, mask=mask & kept)

    def prefix_is(old, rollout, mask, *rest):
        found = correct(old, rollout, mask, *rest)
        products = torch.where(mask, old - rollout, 0.0).cumsum(-1).exp()             # [B, T]
        return replace(found, weights=torch.where(mask, products.clamp(max=2.0), 0.0))

    def mixture_is(old, rollout, mask, *rest):
        found = correct(old, rollout, mask, *rest)
        token = torch.where(mask, old - rollout, 0.0).exp().clamp(max=2.0)            # [B, T]
        return replace(found, weights=torch.where(mask, (token + found.weights) / 2, 0.0))

    if method == "double_count":
        trainer.policy_loss = double_count
    elif planted := {"shuffled_weights": shuffled_weights, "fewer_samples": fewer_samples,
                     "prefix_is": prefix_is, "mixture_is": mixture_is}.get(method):
        trainer.correct = planted


def summary(lines: list[dict]) -> dict:
    """One line of study.csv. Means over the steps; χ², whose tail is heavy, as the median."""
    def each(name, default=None):
        return [line.get(f"rollout_corr/{name}", default) for line in lines]

    accuracy = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    ess = [1 / (1 + max(0.0, x)) for x in each("chi2_seq")]
    reward = smooth([line["reward/mean"] for line in lines])
    best = [max(reward[:i + 1]) for i in range(len(reward))]
    row = {
        "final_accuracy": accuracy[-1][1], "best_accuracy": max(a for _, a in accuracy),
        "first_accuracy": accuracy[0][1],
        "steps_to_0.8": next((step for step, a in accuracy if a >= 0.8), ""),
        "max_grad_norm": max(line["grad_norm"] for line in lines),
        "ess_raw": statistics.mean(ess),
        "ess_applied": statistics.mean(each("rollout_is_eff_sample_size", 1.0)),
        "k3": statistics.mean(each("k3_kl")), "chi2_seq": statistics.median(each("chi2_seq")),
        "kept": 1 - statistics.mean(each("rollout_rs_masked_fraction", 0.0)),
        "drop_step": first(r < b - 0.1 for r, b in zip(reward, best)),
        "warned_ess": first(x < 0.5 for x in smooth(ess)),
        "warned_k3": first(x > 0.02 for x in smooth(each("k3_kl"))),
        "warned_grad_norm": first(x > 2 for x in smooth([line["grad_norm"] for line in lines])),
        "tokens": int(sum(line["response/tokens"] for line in lines))}
    return {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}


def smooth(values: list[float], width: int = 5) -> list[float]:
    return [statistics.mean(values[max(0, i - width + 1):i + 1]) for i in range(len(values))]


def first(flags):
    """The first step at which it holds, or nothing."""
    return next((step for step, flag in enumerate(flags, 1) if flag), "")


# ------------------------------------------------------------------------------------- all of them

def wanted(study: dict) -> list[tuple[str, str, int]]:
    """The cells, in the order of the file, each once; method `presets` stands for all of them."""
    from correction import HISTORICAL, PRESETS
    presets = [name for name in PRESETS if name not in HISTORICAL and name != "disabled"]
    found = {}
    for block in study["cells"]:
        regimes = list(study["regimes"]) if block["regimes"] == "all" else block["regimes"]
        for regime in regimes:
            for method in block["methods"]:
                for name in presets if method == "presets" else [method]:
                    found |= {(regime, name, seed): None for seed in block["seeds"]}
    return list(found)


def read(path: Path) -> list[dict]:
    return list(csv.DictReader(path.open())) if path.exists() else []


def write(path: Path, rows: list[dict]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    part.replace(path)


def run_all(study: dict, path: Path, workers: int) -> None:
    rows = read(path)
    done = {(row["regime"], row["method"], int(row["seed"])) for row in rows}
    todo = [cell for cell in wanted(study) if cell not in done]
    context = get_context("forkserver")            # torch is imported once, and forked
    context.set_forkserver_preload(["trainer"])
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(run_cell, study, *cell): cell for cell in todo}
        for future in tqdm(as_completed(futures), total=len(todo), desc="cells", smoothing=0.1):
            try:
                rows.append(future.result())
                write(path, rows)
            except Exception as error:             # the others go on; this one is tried again
                tqdm.write(f"{futures[future]}: {type(error).__name__}: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("grid", nargs="?", type=Path, default=ROOT / "math" / "study.yaml")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time")
    options = parser.parse_args()
    study = OmegaConf.to_container(OmegaConf.load(options.grid))
    run_all(study, options.grid.with_suffix(".csv"), options.workers)
    for script in (["figures.py", "study"], ["tables.py"]):
        subprocess.run([sys.executable, str(ROOT / "math" / script[0]), *script[1:]], check=True)


if __name__ == "__main__":
    main()
