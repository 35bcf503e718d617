"""Draws the figures into math/figures/. The chapters' are without sampling noise: enumeration and
formulas only. The README's is of a real run, runs/demo, and is drawn when asked for by name.
`runs` compares runs of your own: their training curves side by side, and a table.

    python math/figures.py                  # the chapters', about 15 s; names draw some of them
    python trainer.py && python math/figures.py demo
    python math/figures.py runs RUN RUN … [--out FILE.png] [--metrics NAME,NAME]
"""

import argparse
import dataclasses
import difflib
import io
import json
import math
import statistics
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import matplotlib
import torch
from omegaconf import OmegaConf
from PIL import Image
from tables import (AGES, OBJECTIVES, PARTS, POLICIES, ROOT, ascend, bias_and_std, gain_reached,
                    gains_by_batch_size, runs)

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
import plants
import sides
from oracle import Policy

from adapters.dumps import response
from causes import Tokens
from correction import PRESETS
from correction import RolloutCorrectionConfig as Config
from estimators import aggregate_log_ratio, kl_estimate
from plumbing import gallery
from plumbing.settings import CHANGEABLE, UserError, flat, leaves, read_yaml
from plumbing.settings import Config as Settings

# Okabe and Ito's palette, and a line style beside every colour: readable without colours, too.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
plt.rcParams.update({"figure.facecolor": "white", "savefig.facecolor": "white", "font.size": 9,
                     "axes.grid": True, "grid.color": "#dddddd", "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False, "lines.linewidth": 1.8,
                     "figure.constrained_layout.use": True})


def length_trap():
    """A constant ratio per token: the product against the geometric mean."""
    figure, axis = plt.subplots(figsize=(6, 3.2))
    lengths = sorted({round(2 ** (i / 5)) for i in range(61)})
    axis.axhspan(0.5, 2, color="#eeeeee")
    axis.text(1.1, 0.58, "a bound of [0.5, 2]", fontsize=8, color="#555555")
    for ratio, color, style in ((1.1, RED, "-"), (1.01, ORANGE, "--"), (1.001, BLUE, "-.")):
        for level, width in (("sequence", 1.8), ("geometric", 0.9)):
            values = []
            for L in lengths:
                log_ratio = torch.full((1, L), ratio, dtype=torch.float64).log()
                whole = aggregate_log_ratio(log_ratio, torch.ones(1, L), level)
                values.append(whole[0, 0].exp().item())
            label = f"product, every ρ = {ratio:g}" if level == "sequence" else None
            axis.plot(lengths, values, style, color=color, linewidth=width, label=label)
    axis.plot([], [], color="#777777", linewidth=0.9, label="thin: their geometric means")
    axis.set(xscale="log", yscale="log", ylim=(0.3, 1e5), xlim=(1, 4096),
             xlabel="tokens in the response",
             ylabel="ρ of the response")
    axis.legend(loc="upper left", fontsize=8)
    return figure


def bias_variance():
    """Exact bias and standard deviation of the gradient from one response,
    against the cap and the limit."""
    figure, axes = plt.subplots(2, 2, figsize=(7, 4.6), sharex="col", sharey="row")
    caps = [1, 1.15, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8]
    against_cap = {
        "token, truncated": (lambda c: Config("token", c), SKY, "--"),
        "sequence, truncated": (lambda c: Config("sequence", c), BLUE, "-"),
        "sequence, zero outside [1/C, C]": (lambda c: Config("sequence", (1 / c, c)), RED, "-."),
        "no weight": (lambda c: Config(), BLACK, ":"),
    }
    for name, (config, color, style) in against_cap.items():
        found = [bias_and_std(config(c), T=4, size=0.5) for c in caps]
        for row, which in ((0, 0), (1, 2)):
            axes[row, 0].plot(caps, [f[which] for f in found], style, color=color, label=name)
        axes[0, 0].fill_between(caps, [f[0] - f[1] for f in found], [f[0] + f[1] for f in found],
                                color=color,
                                alpha=0.15, linewidth=0)
    limits = list(range(1, 9))
    against_limit = {
        "token, C = 2": (Config("token", 2.0), SKY, "--"),
        "sequence, C = 2": (Config("sequence", 2.0), BLUE, "-"),
        "sequence, C = ∞": (Config("sequence", torch.inf), GREEN, (0, (5, 1, 1, 1, 1, 1))),
        "geometric, C = ∞": (Config("geometric", torch.inf), ORANGE, (0, (3, 1))),
        "no weight": (Config(), BLACK, ":"),
    }
    for name, (config, color, style) in against_limit.items():
        found = [bias_and_std(config, T=T, size=0.5) for T in limits]
        for row, which in ((0, 0), (1, 2)):
            axes[row, 1].plot(limits, [f[which] for f in found], linestyle=style, color=color,
                              label=name)
        axes[0, 1].fill_between(limits, [f[0] - f[1] for f in found], [f[0] + f[1] for f in found],
                                color=color,
                                alpha=0.15, linewidth=0)
    axes[0, 0].set(ylabel="bias / |∇J|", title="against the cap C (T = 4)", ylim=(-0.03, None))
    axes[0, 1].set(title="against the limit T")
    figure.suptitle(f"{POLICIES} random policies, noise of std Δ = 0.5 on the logits of μ; "
                    "shaded: ± standard error", fontsize=9)
    axes[1, 0].set(ylabel="std / |∇J|", xlabel="C", xscale="log", ylim=(0, None))
    axes[1, 0].set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes[1, 0].minorticks_off()
    axes[1, 1].set(xlabel="T", xticks=limits)
    for axis in axes[1]:
        axis.legend(fontsize=7.5, loc="upper left")
    return figure


def kl_estimators():
    """Value and gradient coefficient (of ∇log π) of every estimator against ℓ."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3))
    curves = ("k1", BLACK, ":"), ("k2", BLUE, "-"), ("k3", RED, "--"), ("abs", ORANGE, "-.")
    for kind, color, style in curves:
        ell = torch.linspace(-2, 2, 400, dtype=torch.float64, requires_grad=True)
        value = kl_estimate(ell, torch.zeros_like(ell), kind)
        slope = torch.autograd.grad(value.sum(), ell)[0]
        left.plot(ell.detach(), value.detach(), style, color=color, label=kind)
        label = "k2 and every “+”: ℓ" if kind == "k2" else kind
        right.plot(ell.detach(), slope, style, color=color, label=label)
    left.set(title="value", xlabel="ℓ = log π_θ − log π_ref", ylim=(-2, 4.5))
    right.set(title="coefficient of ∇log π_θ", xlabel="ℓ = log π_θ − log π_ref", ylim=(-4, 2.5))
    left.legend(fontsize=8)
    right.legend(fontsize=8, loc="lower right")
    return figure


def gradient_field():
    """Two tokens, two states: the policy is a point in a square. Where exact
    ascent takes it, by preset."""
    def policy(first, second):
        start = Policy(V=2, T=2)
        start.logits = torch.tensor([[0.0, first], [0.0,
                                                    second]], dtype=torch.float64).requires_grad_()
        return start

    def chances(logits):  # P(go on), P(1 after 1)
        return torch.sigmoid(logits[..., 1] - logits[..., 0]).unbind(-1)

    reward = torch.tensor([[0.45], [0.0], [1.0]], dtype=torch.float64)  # of "0", "10" and "11"
    start, noise = policy(-0.7, -0.4), torch.tensor([[0.0, 0.1], [0.0, -1.0]], dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.9), sharey=True)
    shown = {
        "sequence ρ, C = ∞": (Config.bypass_pg_is(torch.inf), GREEN, "-"),
        "decoupled_token_is": (PRESETS["decoupled_token_is"](), SKY, "--"),
        "decoupled_seq_is": (PRESETS["decoupled_seq_is"](), BLUE, "-."),
        "decoupled_seq_is_rs": (PRESETS["decoupled_seq_is_rs"](), RED, (0, (3, 1))),
        "decoupled_token_icepop": (PRESETS["decoupled_token_icepop"](), PINK, (0, (5, 1, 1, 1))),
        "bypass_ppo_clip": (PRESETS["bypass_ppo_clip"](), ORANGE, (0, (1, 1))),
        "disabled": (PRESETS["disabled"](), BLACK, ":"),
    }
    grid = torch.linspace(0.02, 0.98, 60, dtype=torch.float64)
    height = []
    for second in grid:  # a row of the square at a time
        row = torch.cat([policy(first.logit(), second.logit()).logits.detach() for first in grid])
        height.append(gain_reached(row, [start] * len(grid), reward.expand(len(grid), -1, -1)))
    for axis, lagging in zip(axes, (False, True), strict=True):
        axis.contour(grid, grid, torch.stack(height), levels=[-1, -0.5, 0, 0.5, 0.8, 0.95],
                     colors="#bbbbbb",
                     linewidths=0.8)
        for name, (config, color, style) in shown.items():
            path = torch.stack(ascend(config, [start], [noise], reward[None],
                                      torch.tensor([lagging])))
            a, b = chances(path)
            axis.plot(a, b, linestyle=style, color=color, label=name)
            axis.plot(a[-1], b[-1], "o", color=color, markersize=4, clip_on=False)
        black = dict(color=BLACK, linestyle="none")
        axis.plot(*optimum(start, reward), "*", ms=11, markerfacecolor="white", label="optimum π*",
                  **black)
        axis.plot(*[x[0] for x in chances(path[:1])], "s", markersize=5, label="start", **black)
        axis.set(title="lagging μ" if lagging else "fixed μ", xlabel="P(go on after the prompt)",
                 xlim=(0, 1),
                 ylim=(0, 1.02))
    axes[0].set(ylabel="P(“1” after “1”)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  fontsize=8)
    return figure


def optimum(start, reward, beta=0.3):
    """π* ∝ start·exp(R/β) of the two-token policy, as a point in the square."""
    stop, ten, eleven = (start.probs().detach() * (reward.squeeze(-1) / beta).exp()).tolist()
    return (ten + eleven) / (stop + ten + eleven), eleven / (ten + eleven)


def batch_size():
    """The same data in one to eight updates, fresh or old: decoupled against coupled PPO."""
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.9), sharey=True)
    gains = gains_by_batch_size()
    for axis, (name, preset) in zip(axes, OBJECTIVES.items(), strict=True):
        for age, color, style in zip(AGES, (BLACK, BLUE, ORANGE, RED), ("-", "--", "-.", ":"),
                                     strict=True):
            values = [gains[name, age, parts] for parts in PARTS]
            axis.plot(PARTS, values, marker="o", markersize=4, linestyle=style, color=color,
                      label=f"data 0 to {age} rounds old" if age else "fresh data")
        axis.set(title=f"{name}: {preset}", xscale="log", xlabel="updates per round", ylim=(0, 0.6))
        axis.set_xticks(PARTS, PARTS)
        axis.minorticks_off()
    axes[0].set(ylabel="share of the gain reached")
    axes[0].legend(fontsize=8, loc="lower left")
    return figure


def study():
    """Final accuracies of the study, a dot per seed, staleness 8; the
    best while training in grey."""
    shown = ["matched", "small_steps_token_is", "token_is_opsm", "small_steps", "bypass_ppo_clip",
             "decoupled_seq_is",
             "decoupled_token_is", "decoupled_seq_is_rs", "bypass_pg_is", "naive",
             "shuffled_weights"]
    cells = {name: runs()["staleness_8"][name] if name != "matched" else runs()["matched"]["naive"]
             for name in shown}
    figure, axis = plt.subplots(figsize=(5.2, 3.4))
    for y, name in enumerate(reversed(shown)):
        final, best = ([float(row[c]) for row in cells[name].values()]
                       for c in ("final_accuracy", "best_accuracy"))
        color = {"matched": BLACK, "naive": RED, "shuffled_weights": RED}.get(name, BLUE)
        axis.plot(best, [y] * len(best), "|", color="#999999", markersize=9)
        axis.plot(final, [y] * len(final), "o", color=color, markersize=4, alpha=0.6,
                  markeredgewidth=0)
        axis.plot(sum(final) / len(final), y, "D", color=color, markersize=6)
    labels = [name if name != "matched" else "naive (matched)" for name in reversed(shown)]
    axis.set_yticks(range(len(shown)), labels)
    axis.set(xlim=(0, 1), xlabel="held-out accuracy after 60 steps, rollouts 8 steps late\n"
             "● a seed   ◆ their mean   | the best while training")
    starts = [float(row["first_accuracy"]) for row in cells["naive"].values()]
    axis.axvline(sum(starts) / len(starts), color="#999999", linestyle=":")
    return figure


ARMS = {"matched": (BLACK, "-"), "decoupled_seq_is": (BLUE, "-"), "decoupled_token_is": (SKY, "--"),
        "naive": (RED, ":"),
        "bypass_ppo_clip": (ORANGE, "-."), "bypass_open": (GREEN, (0, (3, 1))),
        "bypass_low_open": (PINK, (0, (1, 1))),
        "bypass_high_open": ("#999999", "-.")}


def curves(rows, axis=None):
    """Held-out accuracy against the step: a thin line per seed, a thick
    one for the mean of an arm."""
    figure, axis = (None, axis) if axis else plt.subplots(figsize=(5.2, 3.2))
    for arm, (color, style) in ARMS.items():
        seeds = [[float(x) for x in row["curve"].split()] for row in rows if row["method"] == arm]
        steps = [5 * (i + 1) for i in range(len(seeds[0]))] if seeds else []
        for values in seeds:
            axis.plot(steps, values, linestyle=style, color=color, linewidth=0.6, alpha=0.5)
        if seeds:
            means = [sum(values) / len(values) for values in zip(*seeds, strict=True)]
            axis.plot(steps, means, linestyle=style, color=color,
                      label=f"{arm} ({len(seeds)} seed{'s'[:len(seeds) - 1]})")
    axis.set(xlabel="step", ylabel="held-out accuracy", ylim=(-0.02, 1))
    if figure:
        axis.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


def study_64():
    """The second study's three main regimes, those that have been run: every arm's curves."""
    found = runs("study-64")
    names = [regime for regime in ("int4_fast", "int4_slow", "staleness_4") if regime in found]
    figure, axes = plt.subplots(1, len(names), figsize=(1.2 + 3 * len(names), 3.2), sharey=True,
                                squeeze=False)
    for axis, regime in zip(axes[0], names, strict=True):
        curves([row for of_method in found[regime].values() for row in of_method.values()], axis)
        axis.set(title=regime)
    lines = {line.get_label().split(" (")[0]: line for axis in axes[0]
             for line in axis.get_legend_handles_labels()[0]}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def study_64_areas(regimes=("int4_fast", "int4_slow", "staleness_4")):
    """The endpoint of the second study in regimes that have been run: a
    dot per seed, their mean."""
    found = runs("study-64")
    names = [regime for regime in regimes if regime in found]
    shown = [arm for arm in ("naive", "bypass_ppo_clip", "decoupled_token_is", "decoupled_seq_is",
                             "matched")
             if any(arm in found[regime] for regime in names)]
    figure, axes = plt.subplots(1, len(names),
                                figsize=(2 + 2.2 * len(names), 0.8 + 0.4 * len(shown)), sharey=True,
                                squeeze=False)
    for axis, regime in zip(axes[0], names, strict=True):
        for y, arm in enumerate(shown):
            areas = [float(row["area"]) for row in found[regime].get(arm, {}).values()]
            axis.plot(areas, [y] * len(areas), "o", color=ARMS[arm][0], markersize=4, alpha=0.6,
                      markeredgewidth=0)
            axis.plot(statistics.mean(areas) if areas else [], y if areas else [], "D",
                      color=ARMS[arm][0], markersize=6)
        starts = [float(row["first_accuracy"]) for row in found[regime]["naive"].values()]
        axis.axvline(sum(starts) / len(starts), color="#999999", linestyle=":")
        axis.set(title=TITLES[regime], xlim=(0, 1), ylim=(-0.5, len(shown) - 0.5),
                 yticks=range(len(shown)), yticklabels=shown)
    figure.supxlabel("area under the held-out accuracy of 40 steps      "
                     "● a seed   ◆ their mean   dotted: before training", fontsize=9)
    return figure


def study_64_others():
    """The same in the regimes of the second family."""
    return study_64_areas(("int4_staleness_4", "vllm_bf16_staleness_4", "int5", "int6"))


def study_64_tried(regime="int4_fast"):
    """What every arm of one regime adds to the area of `naive`, paired by seed: a
    dot per seed, their mean."""
    arms = runs("study-64")[regime]
    gains = {arm: [float(row["area"]) - float(arms["naive"][seed]["area"])
                   for seed, row in rows.items()] for arm, rows in arms.items()}
    shown = sorted(gains.keys() - {"naive"}, key=lambda arm: statistics.mean(gains[arm]))
    figure, axis = plt.subplots(figsize=(6, 0.8 + 0.24 * len(shown)))
    for y, arm in enumerate(shown):
        color = ARMS[arm][0] if arm in ARMS else "#777777"
        axis.plot(gains[arm], [y] * len(gains[arm]), "o", color=color, markersize=3.5, alpha=0.5,
                  markeredgewidth=0)
        axis.plot(statistics.mean(gains[arm]), y, "D", color=color, markersize=5)
    axis.axvline(0, color=RED, linestyle=":")
    axis.set(ylim=(-0.6, len(shown) - 0.4), yticks=range(len(shown)), yticklabels=shown)
    figure.supxlabel("area, minus that of naive with the same seed      ● a seed   ◆ their mean",
                     fontsize=9)
    return figure


def study_64_lengths():
    """Four-bit weights, large steps, by length: what χ² of a token says of a response's
    ESS/N, and what was learnt."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3))
    shown = ("decoupled_seq_is", "decoupled_token_is", "naive")
    found = {length: runs("study-64").get(regime, {}) for length, regime in LENGTHS.items()}
    found = {length: arms for length, arms in found.items() if arms.keys() >= set(shown)}
    for length, marker, color in zip(found, "o^sD", (SKY, BLUE, GREEN, BLACK), strict=False):
        seeds = found[length]["decoupled_seq_is"].values()
        left.plot([(1 + float(row["chi2_token"])) ** -(length + 1) for row in seeds],
                  [1 / (1 + float(row["chi2_seq"])) for row in seeds], marker, color=color,
                  markersize=4, label=f"{length} tokens")
    left.plot([0, 1], [0, 1], color="#999999", linewidth=1)
    left.set(xlim=(0, 1), ylim=(0, 1), xlabel="$(1 + χ²_{token})^{-|y|}$",
             title="ESS/N of responses")
    left.legend(fontsize=8, loc="lower right")
    for arm in shown:
        areas = {length: [float(row["area"]) for row in arms[arm].values()]
                 for length, arms in found.items()}
        (color, style), points = ARMS[arm], [(length, x) for length, values in areas.items()
                                             for x in values]
        right.plot(*zip(*points, strict=True), "o", color=color, markersize=3, alpha=0.4,
                   markeredgewidth=0)
        right.plot(list(areas), [statistics.mean(values) for values in areas.values()],
                   linestyle=style, color=color, label=arm)
    right.set(xscale="log", ylim=(0, 1), xlabel="tokens of an answer",
              title="area under the held-out accuracy")
    right.set_xticks(list(found), labels=map(str, found))
    right.minorticks_off()
    right.legend(fontsize=8, loc="lower left")
    return figure


LENGTHS = {16: "int4_fast_length_16", 32: "int4_fast_length_32", 64: "int4_fast",
           128: "int4_fast_length_128"}
TITLES = {"int4_fast": "weights rounded to 4 bits,\nlarge steps",
          "int4_slow": "weights rounded to 4 bits,\nsmall steps",
          "staleness_4": "weights of four steps ago,\nsmall steps",
          "int4_staleness_4": "4 bits,\nand four steps ago",
          "vllm_bf16_staleness_4": "vLLM in bf16,\nfour steps ago", "int5": "5 bits",
          "int6": "6 bits"}


def demo():
    """What `python trainer.py` did: learning on the left, the distance of
    the policies on the right."""
    lines = [json.loads(line) for line in (ROOT / "runs/demo/metrics.jsonl").open()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6))
    steps = [line["step"] for line in lines]
    evaluated = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    left.plot(steps, [line["reward/mean"] for line in lines], color=SKY, linewidth=1,
              label="reward, rollouts")
    left.plot(*zip(*evaluated), "o-", color=BLUE, markersize=4, label="held-out accuracy, sampled")
    left.set(xlabel="step", ylim=(0, 1))
    left.legend(loc="lower right", fontsize=8)
    right.plot(steps, [line["rollout_corr/k3_kl"] for line in lines], color=RED, linewidth=1)
    right.set(xlabel="step", yscale="log", title="KL(π_rollout‖π_old), nats per token",
              ylim=(1e-5, 1e-1))
    left.set(title="learning to add")
    return figure


# ------------------------------------------------------------------------------- runs side by side

PANELS = ["reward/mean", "eval/accuracy", "response/length_mean", "rollout_corr/k3_kl",
          "ESS/N_token", "grad_norm"]
LOG = {"rollout_corr/k3_kl"}  # drawn on a log axis where all values are positive
COLORS = [BLUE, RED, BLACK, ORANGE, GREEN, PINK, SKY, "#999999"]
STYLES = ["-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1))]
MARKERS = "osD^vXP<>"  # 8, 7 and 9 of them: no two groups have the same three


def read_run(given):
    """Return what is compared of a run: its name, seed, other settings, and
    {step: {metric: number}}."""
    from plumbing.checkpoints import read_metrics                   # it loads transformers: 3 s
    places, files = [Path(given), Path("runs") / given], ("config.yaml", "metrics.jsonl")
    found = [place for place in places if any((place / file).exists() for file in files)]
    if not found:
        known = [path.parent.name for path in Path("runs").glob("*/config.yaml")]
        near = "".join(f"; did you mean {name}?"
                       for name in difflib.get_close_matches(given, known, n=1))
        raise UserError(f"{given} is not a run: neither {places[0]} nor {places[1]} has a "
                        f"config.yaml{near}")
    config, metrics = (found[0] / file for file in files)
    seed, settings = read_settings(config)
    try:
        lines = read_metrics(metrics) if metrics.exists() else []
        steps = {int(line["step"]): with_ess({name: float(x) for name, x in line.items()})
                 for line in lines}
    except OSError as error:
        raise UserError(f"{metrics} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{metrics} has a line with something else than numbers") from None
    if not steps:
        raise UserError(f"{found[0]} has no metrics yet: its first step has not ended")
    return SimpleNamespace(name=str(found[0]), seed=seed, settings=settings,
                           steps=dict(sorted(steps.items())))


def read_settings(path):
    """Return a run's seed, and the settings that stay when it is continued. One that is
    left out has its default."""
    defaults = {key: of.default for key, _, of in leaves(Settings)
                if of.default is not dataclasses.MISSING}
    given = flat(cast(dict, OmegaConf.to_container(read_yaml(path, [])[0])))
    if "seed" not in given:
        raise UserError(f"{path} is not the settings of a run: it has no seed")
    own = defaults | given
    return own["seed"], {key: own[key] for key in sorted(own.keys() - CHANGEABLE - {"run", "seed"})}


def with_ess(line):
    """Add ESS/N of the tokens, 1/(1 + χ²). Each run's own effective sample size is that of its
    weights, of tokens in one and of sequences in another: these cannot be compared."""
    chi2 = line.get("rollout_corr/chi2_token", math.nan)               # nan: nothing was left
    return {**line, "ESS/N_token": 1 / (1 + max(chi2, 0.0))}


def groups_of(found):
    """Return {name: runs}: runs that differ in nothing but their seed are a group,
    named by what sets it apart."""
    groups = []
    for run in found:
        group = next((group for group in groups if group[0].settings == run.settings), [])
        for twin in group:
            if twin.seed == run.seed:
                raise UserError(f"{twin.name} and {run.name} have the same settings and the same "
                                f"seed, {run.seed}: leave one out")
        if not group:
            groups.append(group)
        group.append(run)
    if len(groups) == 1:
        return {Path(found[0].name).resolve().name if len(found) == 1 else "same settings": found}
    of_groups, missing = [group[0].settings for group in groups], object()
    differing = [key for key in sorted(set().union(*of_groups))
                 if any(own.get(key, missing) != of_groups[0].get(key, missing)
                        for own in of_groups)]
    return {in_words(own, differing): group for own, group in zip(of_groups, groups, strict=True)}


def in_words(settings, keys):
    """Return key=value for those of the keys that the settings have;
    where they have none, say so."""
    values = {key: settings[key] for key in keys if key in settings}
    words = [f"{key}={x if isinstance(x, str) else json.dumps(x)}" for key, x in values.items()]
    return ", ".join(words or [f"no {key}" for key in keys])


def values_of(runs, metric):
    """Return {step: a finite value per run}, for the steps at which
    every run of a group has one."""
    found = {step: [run.steps.get(step, {}).get(metric, math.nan) for run in runs]
             for step in runs[0].steps}
    return {step: values for step, values in found.items() if all(map(math.isfinite, values))}


def band(values):
    """Return mean, low and high: mean ± standard deviation (n − 1), but of two seeds
    the lower and the higher."""
    mean = statistics.mean(values)
    if len(values) < 3:
        return mean, min(values), max(values)
    return mean, mean - statistics.stdev(values), mean + statistics.stdev(values)


def draw_runs(groups, metrics):
    """Draw a panel per metric below the groups' names. The view is what the seeds
    reach; a band may go beyond it."""
    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(6, 3.4 * columns), 2.4 * rows),
                                squeeze=False)
    for metric, axis in zip(metrics, axes.flat, strict=False):
        found = [values_of(runs, metric) for runs in groups.values()]
        for i, values in enumerate(found):
            draw_group(axis, i, values)
        reached = sorted(x for values in found for of_step in values.values() for x in of_step)
        if metric in LOG and reached[0] > 0:
            axis.set(yscale="log", ylim=(reached[0] / 1.3, reached[-1] * 1.3))
        else:
            margin = 0.05 * (reached[-1] - reached[0]) or 0.05
            axis.set_ylim(reached[0] - margin, reached[-1] + margin)
        axis.set(title=metric, xlabel="step")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axis in axes.flat[len(metrics):]:
        axis.remove()
    legend_above(figure, groups)
    return figure


def draw_group(axis, i, values):
    """Draw the mean of a group's seeds and its band; with a marker at every
    point where these are few."""
    if not values:
        return
    steps, (mean, low, high) = list(values), zip(*map(band, values.values()), strict=True)
    few = len(steps) <= 25 or len(steps) < 0.75 * max(steps)
    every = 1 if few else math.ceil(len(steps) / 10)
    axis.plot(steps, mean, markevery=(3 * i % every, every), **look_of(i))
    if len(values[steps[0]]) > 1:
        axis.fill_between(steps, low, high, color=look_of(i)["color"], alpha=0.15, linewidth=0)


def look_of(i):
    return {"color": COLORS[i % len(COLORS)], "linestyle": STYLES[i % len(STYLES)],
            "marker": MARKERS[i % len(MARKERS)], "markersize": 4, "linewidth": 1.5}


def legend_above(figure, groups):
    """Put the groups' names above the panels, in as many columns as fit, and make the
    figure higher by as much."""
    kinds, names, handles = {1: "1 seed", 2: "mean and range of 2 seeds"}, [], []
    for i, (name, runs) in enumerate(groups.items()):
        kind = kinds.get(len(runs), f"mean ± std of {len(runs)} seeds")
        name = f"{name}: {kind}".replace("$", r"\$")
        names.append(textwrap.fill(name, int(11 * figure.get_figwidth()), break_on_hyphens=False))
        shade = Patch(color=look_of(i)["color"], alpha=0.15 if len(runs) > 1 else 0, linewidth=0)
        handles.append((shade, Line2D([], [], **look_of(i))))
    for columns in range(min(3, len(names)), 0, -1):
        legend = figure.legend(handles, names, loc="outside upper center", ncols=columns,
                               fontsize=8, handlelength=4)
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / figure.dpi)


def table_of(groups):
    """Return an aligned table, a line per group. "Last" is the last step at which all
    of its runs have a value."""
    lines = [("", "seeds", "steps", "accuracy, first → last", "last reward", "last k3")]
    for name, runs in groups.items():
        accuracy, reward, k3 = (list(values_of(runs, metric).values()) or [None]
                                for metric in ("eval/accuracy", "reward/mean",
                                               "rollout_corr/k3_kl"))
        ends = sorted({max(run.steps) for run in runs})
        last = accuracy[-1] if accuracy[1:] else None
        lines.append((name, str(len(runs)),
                      " to ".join(map(str, dict.fromkeys((ends[0], ends[-1])))),
                      f"{spread(accuracy[0])} → {spread(last)}", spread(reward[-1]),
                      spread(k3[-1], ".1e")))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def spread(values, form=".3f"):
    """Return mean ± standard deviation; of two seeds the mean and both; a dash for nothing."""
    if values is None:
        return "–"
    mean, low, high = (format(x, form) for x in band(values))
    if len(values) < 3:
        return mean if len(values) == 1 else f"{mean} [{low}, {high}]"
    return f"{mean} ± {statistics.stdev(values):{form}}"


def left_out(groups, metrics):
    """Yield a sentence for whatever of the groups is not in the figure."""
    for name, runs in groups.items():
        ends = [max(run.steps) for run in runs]
        if min(ends) < max(ends):
            yield (f"{name}: drawn up to step {min(ends)}, where its shortest run ends; its "
                   f"longest has {max(ends)}")
        for metric in metrics:
            shown = values_of(runs, metric)
            steps = {step for run in runs for step, line in run.steps.items()
                     if metric in line and step <= min(ends)}
            if not shown:
                yield f"{name}: no {metric}, as at no step do all of its runs have a number"
            elif lost := len(steps - shown.keys()):
                steps = f"{lost} step{'s'[:lost - 1]}"
                yield (f"{name}: {metric} is left out at {steps}, where not all of its runs have a "
                       "number")


def panels_of(given, found):
    """Return the metrics to draw: those that were named, each of which must be there, or
    those of PANELS that are."""
    known = {name for run in found for line in run.steps.values() for name, x in line.items()
             if math.isfinite(x)}
    for name in given or ():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)[0]
            raise UserError(f"--metrics: no run has a number named {name!r}; did you mean {near}?")
    return list(dict.fromkeys(given or [name for name in PANELS if name in known]))


def compare(runs, metrics, out):
    """Draw runs side by side into a file, and print their table and what is not drawn."""
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--out={out} must end in .png, .pdf or .svg")
    found = [read_run(given) for given in runs]
    groups, metrics = groups_of(found), panels_of(metrics, found)
    for name, runs in groups.items():
        if not any(values_of(runs, metric) for metric in metrics):
            raise UserError(f"{name}: nothing can be compared, as there is no step at which all of "
                            f"{', '.join(run.name for run in runs)} have one of "
                            f"{', '.join(metrics or PANELS)}")
    figure = draw_runs(groups, metrics)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        plt.close(figure)
    print(table_of(groups), *(f"* {sentence}" for sentence in left_out(groups, metrics)), out,
          sep="\n")


def compare_runs(argv):
    """The command line of `runs`. Return the exit code: 2 after the
    sentence that says what is wrong."""
    parser = argparse.ArgumentParser(prog="figures.py runs",
                                     description="Draw training curves of runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="a directory with metrics.jsonl and config.yaml, or its name in runs/")
    parser.add_argument("--out", type=Path, default=Path("runs/compared.png"), metavar="FILE.png",
                        help="default: %(default)s")
    parser.add_argument("--metrics", type=lambda names: names.split(","), metavar="NAME,NAME",
                        help=f"names of metrics.jsonl, or ESS/N_token; default: {','.join(PANELS)}")
    try:
        compare(**vars(parser.parse_args(argv)))
    except UserError as error:
        print(f"figures.py: {error}", file=sys.stderr)
        return 2
    return 0


# ------------------------------------------------------------------------------ causes in dumps

SIGNED = ("temperature", "raw", "cut", "shift", "padding", "retokenised", "in-flight", "penalty",
          "softcap")


def signatures():
    """Plant causes in one model, and draw a row of five panels for each, a healthy pair first."""
    with torch.no_grad(), plt.rc_context({"axes.grid": False}):
        model = sides.subject(3, "Qwen2")
        planted = {"healthy, bf16": plants.plant(model, "healthy", 3, variant="bf16-sampler")} | {
            cause: plants.plant(model, cause, seed=3, severity=0.6) for cause in SIGNED}
        return gallery.draw({name: Tokens.of([response(i, row) for i, row in enumerate(rows, 1)])
                             for name, rows in planted.items()})


# ----------------------------------------------------------------------------- the command line

FIGURES = {"length-trap": length_trap, "bias-variance": bias_variance,
           "kl-estimators": kl_estimators,
           "gradient-field": gradient_field, "batch-size": batch_size, "study": study,
           "study-64": study_64, "study-64-areas": study_64_areas,
           "study-64-others": study_64_others,
           "study-64-tried": study_64_tried, "study-64-lengths": study_64_lengths,
           "signatures": signatures}

if __name__ == "__main__":
    if sys.argv[1:2] == ["runs"]:
        sys.exit(compare_runs(sys.argv[2:]))
    for name in sys.argv[1:] or FIGURES:
        image, path = io.BytesIO(), ROOT / "math" / "figures" / f"{name}.png"
        (FIGURES | {"demo": demo})[name]().savefig(image, dpi=110)
        few = Image.open(image).convert("RGB").quantize(48, dither=Image.Dither.NONE)    # colours
        few.save(path, optimize=True)
