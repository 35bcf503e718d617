"""Run the study: does training collapse without correction, and does correction rescue it?

    python studies/study.py                  # the runs of nine that it does not have yet;
                                             # then the figures, and chapter 11's tables
    python studies/study.py sixty-four       # the same for the second study
    python studies/study.py --quick          # three runs of it and runs/quick.png: collapse, rescue

A study is a folder: declared.yaml, committed before its runs, and results.csv.

A cell is (regime, method, seed). Each runs the trainer in a process of its own, `--workers` at a
time, and adds one line to results.csv when it ends: stop this at any time, and start it again.
"""

import argparse
import csv
import fcntl
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


# ---------------------------------------------------------------------------------------- one run

def run_cell(study: dict, regime: str, method: str, seed: int) -> dict:
    """Train a cell, and return its line of the table from the run's metrics."""
    from three_policies import trainer
    from three_policies.training import checkpoints, run
    from three_policies.training.files import read_metrics
    config = config_of(study, regime, method, seed)
    log = Path("runs") / ".study" / f"{config.run}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    began = time.perf_counter()
    if config.policy.path is None:
        warm_start(config, log.with_name(f"{study['name']}-{seed}.lock"))
    plant(method, trainer)
    write_no_weights(checkpoints, run)
    # A run that ended and lost its line is made again: it has left no model to end with.
    (run.directory_of(config) / "finished.json").unlink(missing_ok=True)
    shares = watch(trainer)
    if study.get("evaluator") == "float32":
        trainer.evaluate = in_float32(trainer.evaluate)
    trainer.start(config)
    lines = read_metrics(run.directory_of(config) / "metrics.jsonl")
    recorded = {"steps": judged(lines[:study["record"]])} if "record" in study else {}
    return {"regime": regime, "method": method, "seed": seed, **summary(lines), **shares,
            **recorded,
            "seconds": round(time.perf_counter() - began, 1)}


def config_of(study: dict, regime: str, method: str, seed: int):
    from three_policies.training.settings import flat, load_config
    settings = flat({**study["settings"], "correction": {"preset": method}, "seed": seed})
    settings |= study["regimes"][regime] | study["methods"].get(method, {})
    settings["run"] = f"{study['name']}-{regime}-{method}-{seed}"
    overrides = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    return load_config([str(ROOT / "configs/presets/disabled.yaml"), *overrides])


def warm_start(config, lock: Path) -> None:
    """Make the policy that all arms of a seed begin with, in one cell while the others wait."""
    from three_policies.training.faults import process_group
    from three_policies.training.demo import make_demo_model
    from three_policies.training.tasks import make_task
    with lock.open("w") as file, process_group():
        fcntl.flock(file, fcntl.LOCK_EX)
        make_demo_model(config, make_task(config.task, config.seed))


def write_no_weights(checkpoints, run) -> None:
    """Let a run write no checkpoint and no model, 2 GB of the real one: metrics are read alone."""
    checkpoints.Checkpoints.save = lambda *_: None
    run.Run.write_models = lambda *_: None


def in_float32(evaluate):
    """Return an evaluator that is the same for all arms: the transformers engine in float32."""
    from three_policies.engines.choice import make_engine

    def evaluated(run):
        sampling, longest = run.loaded, max(map(len, run.loaded.held_out_prompts))
        if (sampling.engine.name, run.config.rollout.dtype) != ("transformers", "float32"):
            run.loaded = replace(sampling, engine=make_engine(
                "transformers", sampling.path, dtype="float32",
                max_model_len=longest + run.config.rollout.max_tokens))
        try:
            return evaluate(run)
        finally:
            run.loaded = sampling
    return evaluated


def watch(trainer) -> dict:
    """Return a dict that will hold the first update's shares of tokens beyond the clip's ends.

    A share is that of the tokens whose π_θ/μ is beyond one end, for one sign of A.
    """
    import torch
    loss, found = trainer.policy_loss, {}

    def count_then_call(log_prob, old, rollout, advantages, mask, *rest, **more):
        if not found:
            ratio = torch.where(mask, log_prob.detach() - rollout, 0.0).exp()
            for end, beyond in (("below", ratio < 0.8), ("above", ratio > 1.2)):
                for sign, tokens in (("negative", advantages < 0), ("positive", advantages > 0)):
                    share = (beyond & tokens & mask).sum() / mask.sum()
                    found[f"{end}_{sign}"] = f"{share.item():.4g}"
        return loss(log_prob, old, rollout, advantages, mask, *rest, **more)

    trainer.policy_loss = count_then_call
    return found


def plant(method: str, trainer) -> None:
    """Plant a method that is not among the trainer's settings: a mistake, a control or a weight."""
    import torch

    from three_policies.policy import Policy
    loss, correct, train = trainer.policy_loss, trainer.correct, trainer.train
    sample = trainer.sample

    def double_count(log_prob, old, rollout, advantages, mask, *rest, **more):
        """Weigh PPO's ratio, which is π_θ/μ already, by π_θ/μ again: w·min(ρA, clip(ρ)A)."""
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

    def stepping_on_nothing(update):
        """Take AdamW's step on a gradient of 0 where nothing was kept."""
        def stepped(run, *given):
            done = update(run, *given)
            if done.empty:
                for parameter in run.loaded.policy.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                run.loaded.optimizer.step()
                run.loaded.optimizer.zero_grad()
            return done
        return stepped

    def recomputed(run, step):
        """Score what was drawn by the version at its end, which the engine still has."""
        batch, metrics = sample(run, step)
        end = Policy(run.loaded.engine.model, run.config.rollout.temperature)
        return batch._replace(rollout_log_prob=trainer.score(end, batch, run.config)), metrics

    def old_masked(run, step):
        batch, metrics = sample(run, step)
        every = run.config.rollout.update_every
        mask = batch.response_mask.clone()                                            # [B, T]
        if metrics["response/crossed_fraction"] > 0:
            mask[mask[:, every:].any(-1), :every] = False
        return batch._replace(response_mask=mask), metrics

    def with_sgd(run):
        run.loaded = replace(run.loaded, optimizer=sgd_with_adams_first_step(run))
        train(run)

    if method == "double_count":
        trainer.policy_loss = double_count
    elif planted := {"shuffled_weights": shuffled_weights, "fewer_samples": fewer_samples,
                     "prefix_is": prefix_is, "mixture_is": mixture_is}.get(method):
        trainer.correct = planted
    elif method in ("recomputed", "old_masked"):
        trainer.sample = {"recomputed": recomputed, "old_masked": old_masked}[method]
    elif method == "geo_rs_steps_on_nothing":
        trainer.update = stepping_on_nothing(trainer.update)
    elif method == "geo_rs_sgd":
        trainer.train = with_sgd


def sgd_with_adams_first_step(run):
    """Return an SGD whose first step is as long as that of the run's AdamW would be."""
    import torch

    from three_policies.policy import full_tensor
    policy, factor = run.loaded.policy, []
    optimizer = torch.optim.SGD(policy.parameters(), lr=run.config.train.lr)

    def scale(optimizer, *_):
        gradients = [p.grad for p in policy.parameters()]
        if not factor:                          # AdamW's first step is lr · g/(|g| + ε)
            whole = torch.cat([full_tensor(g).flatten() for g in gradients])
            factor.append((whole / (whole.abs() + 1e-8)).norm() / whole.norm())
        for g in gradients:
            g.mul_(factor[0])

    optimizer.register_step_pre_hook(scale)
    return optimizer


def summary(lines: list[dict]) -> dict:
    """Return one line of results.csv: means over the steps, but the median of χ², a heavy tail."""
    def each(name, default: Any = None) -> list[Any]:
        return [line.get(f"rollout_corr/{name}", default) for line in lines]

    accuracy = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    after = [a for step, a in accuracy if step > 1]            # that of step 1 is before any update
    ess = [1 / (1 + max(0.0, x)) for x in each("chi2_seq")]
    rewards = [line["reward/mean"] for line in lines]
    reward = smooth(rewards)
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
        "first_reward": rewards[0], "last_reward": statistics.mean(rewards[-5:]),
        "tokens": int(sum(line["response/tokens"] for line in lines)),
        "area": area(after), "curve": " ".join(f"{a:.4f}" for a in after),
        "chi2_token": statistics.median(each("chi2_token")),
        "clip_fraction": statistics.mean(line["loss/clip_fraction"] for line in lines),
        "empty_updates": sum(line.get("train/empty_updates", 0) for line in lines)}
    return {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in row.items()}


def judged(lines: list[dict]) -> str:
    """Return what `diagnose` looks at, step by step, as JSON with four digits."""
    from three_policies.doctor.health import BY_SEQUENCE, HEALTHY
    names = {*(row[0] for row in HEALTHY), *BY_SEQUENCE.values(), "rollout_is_per_sequence",
             "is_ratio_mean", "is_ratio_z", "kl", "kl_z"}
    steps = [{name.removeprefix("rollout_corr/"): float(f"{value:.4g}")
              for name, value in line.items()
              if name.removeprefix("rollout_corr/") in names} for line in lines]
    return json.dumps(steps, separators=(",", ":"))


def area(values: list[float]) -> float:
    """Return the area under evenly spaced values, by trapezoids, divided by its width.

    That is a mean whose ends count half.
    """
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    return statistics.mean(middles or values)


def smooth(values: list[float], width: int = 5) -> list[float]:
    return [statistics.mean(values[max(0, i - width + 1):i + 1]) for i in range(len(values))]


def first(flags):
    """Return the first step at which a flag holds, or nothing."""
    return next((step for step, flag in enumerate(flags, 1) if flag), "")


# ------------------------------------------------------------------------------------- all of them

def wanted(study: dict) -> list[tuple[str, str, int]]:
    """Return the cells, each once, by block and seed."""
    found = {}
    for block in study["cells"]:
        regimes = list(study["regimes"]) if block["regimes"] == "all" else block["regimes"]
        for regime in regimes:
            found |= {(regime, method, seed): None for seed in block["seeds"]
                      for method in block["methods"]}
    return list(found)


def read(path: Path) -> list[dict]:
    return list(csv.DictReader(path.open())) if path.exists() else []


def write(path: Path, rows: list[dict]) -> None:
    """Write the rows, with the columns that the file began with."""
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n", extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    part.replace(path)


def run_all(study: dict, path: Path, workers: int, regimes: list[str] | None = None) -> None:
    if sys.version_info < (3, 11):
        sys.exit("a study gives each of its runs a process of its own: that takes Python 3.11")
    rows = read(path)
    done = {(row["regime"], row["method"], int(row["seed"])) for row in rows}
    todo = [cell for cell in wanted(study)
            if cell not in done and cell[0] in (regimes or study["regimes"])]
    context = get_context("forkserver")            # torch is imported once, and forked
    context.set_forkserver_preload(["three_policies.trainer"])
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(run_cell, study, *cell): cell for cell in todo}
        for future in tqdm(as_completed(futures), total=len(todo), desc="cells", smoothing=0.1):
            try:
                rows.append(future.result())
                write(path, rows)
            except Exception as error:             # the others go on; this one is tried again
                tqdm.write(f"{futures[future]}: {type(error).__name__}: {error}", file=sys.stderr)


def declared(name: str) -> dict:
    """Return what a study declares, on top of what the study named by `like` declares.

    It inherits settings, evaluator, regimes and methods.
    """
    from three_policies.training.settings import merged, read_mapping
    own = read_mapping(HERE / name / "declared.yaml")
    if "like" in own:
        base = declared(own["like"])
        kept = [key for key in ("settings", "evaluator", "regimes", "methods") if key in base]
        own = merged({key: base[key] for key in kept}, own)
    return own | {"name": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("study", nargs="?", default="nine", help="a folder beside this file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--regime", action="append", help="cells of this regime; default: all")
    parser.add_argument("--quick", action="store_true",
                        help="three runs of sixty-four and their picture")
    options = parser.parse_args()
    if options.quick:
        return quick(options.workers)
    run_all(declared(options.study), HERE / options.study / "results.csv", options.workers,
            options.regime)
    for script in ("figures.py", "tables.py"):
        subprocess.run([sys.executable, str(ROOT / "book" / script)], check=True)


def quick(workers: int) -> None:
    """Run the few cells that sixty-four names as quick, and draw runs/quick.png."""
    study = declared("sixty-four")
    rows, picture = Path("runs") / ".study" / "quick.csv", Path("runs") / "quick.png"
    rows.parent.mkdir(parents=True, exist_ok=True)
    run_all(study | {"cells": [study["quick"]], "name": "quick"}, rows, workers)
    from three_policies.book.figures import curves
    figure = curves(read(rows))
    assert figure is not None              # it is made where no axis is given
    figure.savefig(picture, dpi=110)
    print(picture)


if __name__ == "__main__":
    main()
