"""Draw the figures into math/figures/: as SVG, two of them as PNG.

Most figures have no sampling noise: they are enumeration and formulas. Those named study-… show the
studies' tables, and `demo` shows a real run, runs/demo, when asked for by name. `runs` compares
runs of your own: their training curves side by side, and a table.

    python book/figures.py                  # the chapters', two minutes; names draw some
    python trainer.py && python book/figures.py demo
    python book/figures.py runs RUN RUN … [--out FILE.png] [--metrics NAME,NAME]
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
from typing import Any, cast

import matplotlib
import torch
from three_policies.book.drawn import as_svg
from three_policies.book.moving_exact import heights, in_square, optimum, square
from PIL import Image
from three_policies.book.tables import (POLICIES, ROOT, ascend, bias_and_std, borders, declared,
                                        gain_reached, judged_contrasts, runs)

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from three_policies.checks import UserError
from three_policies.doctor import panels, plants, sides
from three_policies.doctor.dumps import response
from three_policies.doctor.tokens import Tokens
from three_policies.estimators import grpo_advantages, rloo_advantages
from three_policies.kl import kl_estimate
from three_policies.losses import aggregate_loss
from three_policies.oracle import (J, Policy, estimator_moments, expectation, grad_J, rewards,
                                   routes, scores, turns, versions, words)
from three_policies.presets import PRESETS
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import aggregate_log_ratio
from three_policies.studies import merging
from three_policies.studies import sizes as real
from three_policies.surrogates import (cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss,
                                       sapo_loss)
from three_policies.training.settings import CHANGEABLE, SPLITS, flat, leaves, read_mapping
from three_policies.training.settings import Config as Settings

# The palette is Okabe and Ito's. Every colour has a line style: figures are readable without it.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
plt.rcParams.update({"figure.facecolor": "white", "savefig.facecolor": "white", "font.size": 9,
                     "axes.grid": True, "grid.color": "#dddddd", "axes.spines.top": False,
                     "axes.spines.right": False, "legend.frameon": False, "lines.linewidth": 1.8,
                     "figure.constrained_layout.use": True})


def three_policies():
    """Draw fifteen responses under π_old and under μ, and what μ does to the expected gradient."""
    old = Policy(V=3, T=3, seed=0)
    mu, R = old.perturbed(seed=1, size=0.5), rewards(old)
    figure, (tree, bars, plane) = plt.subplots(1, 3, figsize=(7.5, 4), width_ratios=(1, 1.6, 2.4))
    listed = [tuple(y[m].tolist()) for y, m in zip(old.tokens, old.mask, strict=True)]
    height = {y: -float(n) for n, y in enumerate(sorted(listed))}
    for prefix in sorted({y[:t] for y in listed for t in range(len(y))}, key=len, reverse=True):
        height[prefix] = statistics.mean(height[(*prefix, v)] for v in range(old.V))
    for y in sorted(height.keys() - {()}):
        tree.plot([len(y) - 1, len(y)], [height[y[:-1]], height[y]], color="#999999", linewidth=0.8)
        tree.text(len(y), height[y], y[-1], ha="center", va="center", fontsize=8,
                  bbox={"boxstyle": "circle,pad=0.15", "color": "white"})
    tree.axis("off")
    tree.set(title="response y", xlim=(-0.1, 3.2), ylim=(-14.6, 0.6))
    at = [height[y] for y in listed]
    for policy, color, up, name in ((old, BLACK, 0.2, "π_old (trainer)"),
                                    (mu, BLUE, -0.2, "μ (sampler)")):
        bars.barh([y + up for y in at], policy.probs().tolist(), 0.4, color=color)
        bars.text(0.2, -4 + 4 * up, name, color=color, va="center")
    bars.set(title="how often it is drawn", xlabel="probability of y", ylim=(-14.6, 0.6), yticks=[])
    wanted, found = grad_J(old, R), expectation(mu, R * scores(old).sum(1))
    along = (found @ wanted / wanted.square().sum()).item()
    across = ((found - along * wanted).norm() / wanted.norm()).item()
    for x, y, color in ((1, 0, BLACK), (along, across, BLUE)):
        plane.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": color,
                       "linewidth": 2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 15})
    plane.plot([1, along], [0, across], ":", color=RED)
    plane.text(0.5, -0.08, "∇J, the gradient wanted", ha="center")
    plane.text(0.35, 0.58, "mean gradient if\nμ draws the samples", color=BLUE, ha="center")
    plane.text(1.13, 0.3, f"error:\n{100 * math.hypot(along - 1, across):.0f} %", color=RED)
    plane.set(title="expected gradient", aspect="equal", xlim=(-0.05, 1.45), ylim=(-0.2, 1),
              xlabel="component along ∇J, in units of |∇J|",
              ylabel="component across ∇J, in units of |∇J|")
    return figure


def gradient_choices():
    """Draw what a baseline does to the spread of the gradient, and which choices turn its mean."""
    pi = Policy(V=3, T=3, seed=0)
    R, lp, one_prompt = rewards(pi), pi.log_probs(), torch.zeros(2)
    target, expected = grad_J(pi, R), J(pi, R).item()

    def pairs(advantages, offset=0.0, mode="seq-mean-token-sum"):
        """Return std/|mean| of the gradient of two responses, and its angle with ∇J in degrees."""
        mean, variance, _ = estimator_moments(pi, pi, lambda i: aggregate_loss(reinforce_loss(
            lp[i], advantages(R[i, 0] + offset, one_prompt)[:, None]), pi.mask[i], mode), batch=2)
        cosine = torch.cosine_similarity(-mean, target, 0).clamp(max=1)
        return (variance.sqrt() / mean.norm()).item(), torch.rad2deg(cosine.acos()).item()

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.2), width_ratios=(1, 1.2))
    offsets = [x / 4 for x in range(-8, 9)]
    rloo, known = pairs(rloo_advantages)[0], pairs(lambda r, group: r - expected)[0]
    for name, spread, color, style, place in (
            ("no baseline", [pairs(lambda r, group: r, x)[0] for x in offsets], RED, "-",
             (0.15, 7)),
            ("RLOO, Dr. GRPO", [rloo] * len(offsets), BLUE, "--", (-1.3, 3.2)),
            ("b = J, if it were known", [known] * len(offsets), BLACK, ":", (0, 2.1))):
        left.plot(offsets, spread, linestyle=style, color=color)
        left.text(*place, name, color=color, ha="center")
    left.set(title="spread by baseline", xlabel="constant added to every reward", ylim=(0, 10),
             ylabel="std of the gradient, in units of |its mean|")
    for name, advantages, color, up in (("RLOO, Dr. GRPO", rloo_advantages, BLUE, 0.2),
                                        ("GRPO", grpo_advantages, GREEN, -0.2)):
        for row, mode in enumerate(("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")):
            angle = pairs(advantages, mode=mode)[1]
            right.barh(row + up, angle, 0.38, color=color)
            right.text(angle + 0.5, row + up, f"{angle:.0f}°   {name}", color=color, va="center")
    right.set(title="direction by denominator and baseline", xlim=(0, 50), yticks=range(3),
              xlabel="angle between the mean gradient and ∇J (degrees)",
              yticklabels=("seq-mean-\ntoken-mean", "token-mean", "seq-mean-\ntoken-sum"))
    return figure


def length_trap():
    """Draw the product and the geometric mean of a ratio that is constant over the tokens."""
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
    """Draw bias and standard deviation of the gradient from one response, by cap and by limit."""
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


def weight_levels():
    """Draw bias and spread of each level of weight against T, and the error of a batch of N."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3))
    limits, batches = list(range(1, 9)), [2 ** (i / 2) for i in range(6, 27)]
    shown = {None: ("none", BLACK, ":"), "geometric": ("geometric", ORANGE, (0, (3, 1))),
             "token": ("token", SKY, "--"), "prefix": ("prefix", PINK, "-."),
             "sequence": ("sequence", BLUE, "-")}
    apart = {"geometric": (0.45, 6.15, 0.48), "none": (0.57, 6.8, 0.6),  # lines that touch
             "token": (0.4, 7.45, 0.405)}
    for level, (name, color, style) in shown.items():
        config = Config(level, torch.inf) if level else Config()
        found = [bias_and_std(config, T, size=0.5) for T in limits]
        bias, _, std, _ = found[-1]
        of_batch = [math.hypot(bias, std / math.sqrt(n)) for n in batches]
        drawn = [[f[0] for f in found], [f[2] for f in found], of_batch]
        ends = apart.get(name, (bias, std, of_batch[-1]))
        for axis, x, y, end in zip(axes, (limits, limits, batches), drawn, ends, strict=True):
            axis.plot(x, y, linestyle=style, color=color)
            axis.annotate(" " + name, (x[-1], end), color=color, va="center", fontsize=8,
                          annotation_clip=False)
    for axis in axes:
        axis.set(ylabel="in units of |∇J|")
    for axis in axes[:2]:
        axis.set(xlabel="T: longest response (tokens)", xticks=limits, xlim=(1, 8))
    axes[0].set(title="bias", ylim=(-0.02, None))
    axes[1].set(title="std of one response's gradient", ylim=(0, None))
    axes[2].set(title="error of a batch, T = 8", xlabel="N: responses in the batch", xscale="log",
                yscale="log", xlim=(8, 8192), ylim=(0.1, 4))
    axes[2].set_xticks([10, 100, 1000], ["10", "100", "1000"])
    axes[2].set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axes[2].minorticks_off()
    return figure


def loss_coefficients():
    """Draw how hard each loss pushes a token, by autograd, against r and by the sign of A."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.9), sharey=True)
    ratios = torch.arange(1, 401, dtype=torch.float64)[:, None] / 100
    shown = {  # loss, colour, style, width, and where its name stands, for A > 0 and A < 0
        "REINFORCE": (lambda new, old, A: reinforce_loss(new, A), BLACK, ":", 1.8,
                      (2.9, 0.88), (1.4, 0.84)),
        "GSPO": (lambda new, old, A: gspo_loss(new, old, A, torch.ones_like(ratios)), SKY, "-", 3.6,
                 (0.52, 0.15), (1.06, 0.3)),
        "CISPO": (cispo_loss, GREEN, "--", 1.8, (3.3, 1.3), (0.06, 0.66)),
        "SAPO": (sapo_loss, ORANGE, "-.", 1.8, (2.1, 1.68), (2.1, 1.66)),
        "dual clip, c = 3": (lambda *x: ppo_clip_loss(*x, dual_clip=3.0), PINK, "-", 3.6,
                             None, (3.06, 2.2)),
        "PPO": (ppo_clip_loss, RED, "-", 1.4, (1.27, 0.4), (2.35, 2.75)),
    }
    for axis, A in zip(axes, (1.0, -1.0), strict=True):
        for name, (loss, color, style, width, *places) in shown.items():
            new, old = ratios.log().requires_grad_(), torch.zeros_like(ratios)
            (slope,) = torch.autograd.grad(loss(new, old, torch.full_like(old, A)).sum(), new)
            axis.plot(ratios, -slope / A, linestyle=style, color=color, linewidth=width)
            if place := places[A < 0]:
                axis.annotate(name, place, color=color, fontsize=8, va="center")
        axis.set(title=f"A {'>' if A > 0 else '<'} 0", xlim=(0, 4), ylim=(0, 3.5),
                 xlabel="r = π_θ/π_old of the token (GSPO: r̄)")
    axes[0].set(ylabel="coefficient of −A g in ∇L")
    return figure


def kl_estimators():
    """Draw value and gradient coefficient (of ∇log π) of every estimator against ℓ."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3))
    curves = ("k1", BLACK, ":"), ("k2", BLUE, "-"), ("k3", RED, "--"), ("abs", ORANGE, "-.")
    for kind, color, style in curves:
        ell = torch.linspace(-2, 2, 400, dtype=torch.float64, requires_grad=True)
        value = kl_estimate(ell, torch.zeros_like(ell), kind)
        slope = torch.autograd.grad(value.sum(), ell)[0]
        left.plot(ell.detach(), value.detach(), style, color=color, label=kind)
        label = "k2 and every “+”: ℓ" if kind == "k2" else kind
        right.plot(ell.detach(), slope, style, color=color, label=label)
    ell = "ℓ = log π_θ − log π_ref, nats"
    left.set(title="value", xlabel=ell, ylabel="nats", ylim=(-2, 4.5))
    right.set(title="gradient", xlabel=ell, ylabel="coefficient of ∇ log π_θ",
              ylim=(-4, 2.5))
    left.legend(fontsize=8)
    right.legend(fontsize=8, loc="lower right")
    return figure


# REPORTED is the k3 per token of other reports, from the table of chapter 7: what, from, to.
REPORTED = (("float16 both sides", 1e-5, 1e-5), ("FP8 rollouts", 3e-4, 3e-4),
            ("bfloat16 both sides", 6e-4, 1e-3), ("bfloat16 rollouts", 2e-3, 2e-3),
            ("DeepSeek V4", 5e-3, 5e-3))


def effective_samples():
    """Draw ESS/N against the k3 of a token, for several lengths, and what runs report as k3."""
    figure, axis = plt.subplots(figsize=(6.4, 3.9))
    k3 = torch.logspace(-5.3, -0.7, 300, dtype=torch.float64)
    for length, color, style in ((1, BLACK, "-"), (9, BLUE, "--"), (100, ORANGE, "-."),
                                 (1000, RED, (0, (3, 1, 1, 1)))):
        axis.plot(k3, (1 + 2 * k3) ** -length, linestyle=style, color=color)
        x, y = ((0.5 ** (-1 / length) - 1) / 2, 0.46) if length > 1 else (0.075, 0.8)
        axis.text(0.8 * x, y, f"{length} token{'s'[:length - 1]}", color=color, fontsize=8,
                  ha="right", backgroundcolor="white")
    late = statistics.median(float(row["k3"]) for rows in runs()["staleness_2"].values()
                             for row in rows.values())
    for name, low, high in (*REPORTED, ("two steps stale", late, late)):
        axis.axvspan(low / 1.015, high * 1.015, color="#bbbbbb", alpha=0.7, linewidth=0, zorder=0)
        axis.text(math.sqrt(low * high), 1.03, name, fontsize=8, rotation=35, ha="left")
    axis.set(xscale="log", xlim=(5e-6, 0.2), ylim=(0, 1.01), xlabel="k3, nats per token",
             ylabel="ESS/N: share of the samples kept")
    return figure


# What others report of models of other classes: what, k3 per token, tokens in a response or None.
ELSEWHERE = (*((name, math.sqrt(low * high), None) for name, low, high in REPORTED),
             ("Qwen3.5-4B", 0.03, None), ("GPT-OSS-120B", 0.05, 2000))
# Colour, name and its place in the figure: tokens, k3. A region lies below its border.
REGIONS = (("#ffffff", "ignore", 1.3, 1e-4), ("#eef6fb", "token weights", 2500, 0.068 / 2500),
           ("#d9ebf7", "sequence weights", 2500, 0.18 / 2500), ("#fbeeec", "repair first", 6, 0.6))


def sizes():
    """Draw k3 of a token against the length, with regions, the tiny models and the real one."""
    figure, axis = plt.subplots(figsize=(7.6, 5.6))
    lengths = torch.logspace(0, 4.3, 200, dtype=torch.float64)
    axis.set(xscale="log", yscale="log", xlim=(1, 2e4), ylim=(1e-6, 2),
             xlabel="tokens in a response", ylabel="k3, nats per token")
    (left, top), (right, bottom) = axis.transData.transform([(1, 1), (10, 0.1)])
    along = math.degrees(math.atan2(bottom - top, right - left))           # the slope of k3 · T

    low = torch.full_like(lengths, 1e-6)
    for (color, name, *place), high in zip(REGIONS, [*size_borders(lengths), 2 * lengths ** 0],
                                           strict=True):
        axis.fill_between(lengths, low, high, color=color, linewidth=0, zorder=0)
        axis.plot(lengths, high, color="#777777", linewidth=0.7, zorder=1)
        axis.text(place[0], place[1], name, fontsize=9, style="italic", color="#555555",
                  va="center", rotation=along if "weights" in name else 0, rotation_mode="anchor")
        low = high

    tiny_points(axis)
    real_points(axis)
    marks = {name: (length, math.log10(k3)) for name, k3, length in ELSEWHERE}
    heights = apart({name: k3 for name, (_, k3) in marks.items()}, 0.2)
    for name, (length, k3) in marks.items():
        axis.plot([length or 1.6e4], [10 ** k3], "D" if length else "_", color=RED, markersize=5)
        axis.plot([length or 1.6e4, 2.4e4], [10 ** k3, 10 ** heights[name]], color=RED,
                  linewidth=0.5, clip_on=False)
        axis.text(2.6e4, 10 ** heights[name], name, fontsize=7.5, color=RED, va="center")
    for color, mark, name in (
            (BLUE, "o", "SmolLM2-135M, one cause each (this chapter)"),
            (BLACK, "s", "tiny models, no correction (chapter 11)"),
            (RED, "D", "reported by others; dashes: length not said")):
        axis.plot([], [], mark, color=color, markersize=4, label=name,
                  markerfacecolor="white" if mark == "s" else color)
    axis.legend(fontsize=8, loc="lower left")
    axis.grid(False)
    return figure


def size_borders(lengths):
    """Return k3 at the three borders: exact up to T = 8, and the same k3·T beyond."""
    exact = {T: borders(T) for T in (2, 4, 8)}
    found = []
    for method in ("no weight", "token"):
        products = torch.tensor([of[method] for of in exact.values()], dtype=torch.float64)
        place = lengths.clamp(2, 8).log2() - 1                      # of T = 2, 4, 8: 0, 1, 2
        left = place.long().clamp(max=1)
        share = place - left
        found.append((products[left].log() * (1 - share) + products[left + 1].log() * share).exp()
                     / lengths)
    return [*found, (2 ** (1 / lengths) - 1) / 2]                   # (1 + 2 k3)^−T = ½


def tiny_points(axis):
    """Show the runs without a correction of the second study, by the length of their answers."""
    regimes = declared()["regimes"]
    for regime, arms in runs("sixty-four").items():
        length = regimes[regime].get("task.length", 64)
        k3 = statistics.median(float(row["k3"]) for row in arms["naive"].values())
        axis.plot(length, k3, "s", color=BLACK, markersize=4, markerfacecolor="white")


def real_points(axis):
    """Show the rows of the real model's table at their mean length, with names beside them."""
    rows = {name: (float(x["tokens"]) / float(x["responses"]), float(x["k3_exact"]))
            for name, x in real.results().items() if float(x["k3_exact"]) > 1e-7}
    if not rows:
        return
    heights = apart({name: math.log10(k3) for name, (_, k3) in rows.items()}, 0.19)
    for name, (length, k3) in rows.items():
        axis.plot(length, k3, "o", color=BLUE, markersize=4)
        axis.plot([length, 300], [k3, 10 ** heights[name]], color=BLUE, linewidth=0.4)
        axis.text(312, 10 ** heights[name], name, fontsize=7, color=BLUE, va="center")


FIELD = {
    "sequence ρ, C = ∞": (Config.bypass_pg_is(torch.inf), GREEN, "-"),
    "decoupled_token_is": (PRESETS["decoupled_token_is"](), SKY, "--"),
    "decoupled_seq_is": (PRESETS["decoupled_seq_is"](), BLUE, "-."),
    "decoupled_seq_is_rs": (PRESETS["decoupled_seq_is_rs"](), RED, (0, (3, 1))),
    "decoupled_token_icepop": (PRESETS["decoupled_token_icepop"](), PINK, (0, (5, 1, 1, 1))),
    "bypass_ppo_clip": (PRESETS["bypass_ppo_clip"](), ORANGE, (0, (1, 1))),
    "disabled": (PRESETS["disabled"](), BLACK, ":")}


def gradient_field():
    """Draw where exact ascent takes a policy of two tokens and two states, by preset.

    Left: its path in the square of its two probabilities, with a fixed μ. Right: how high it ends.
    """
    start, noise, reward = square()
    figure, (plane, ends) = plt.subplots(1, 2, figsize=(7.8, 3.9))
    grid = torch.linspace(0.02, 0.98, 60, dtype=torch.float64)
    lines = plane.contour(grid, grid, heights(grid, start, reward), colors="#bbbbbb",
                          linewidths=0.8, levels=[-1, -0.5, 0, 0.5, 0.8, 0.95])
    plane.clabel(lines, lines.levels[1:5], fmt="%g", fontsize=8, colors=BLACK, manual=[
        (0.9, 0.61), (0.82, 0.66), (0.72, 0.73), (0.7, 0.86)])

    for y, (name, (config, color, style)) in enumerate(FIELD.items()):
        for lagging, fill in ((False, color), (True, "white")):
            path = torch.stack(ascend(config, [start], [noise], reward[None],
                                      torch.tensor([lagging])))
            reached = gain_reached(path[-1], [start], reward[None]).item()
            ends.plot(max(reached, -0.12), -y, "o" if reached > -0.12 else "<", color=color,
                      markerfacecolor=fill, markersize=7)
            if not lagging:
                a, b = in_square(path).unbind(-1)
                plane.plot(a, b, linestyle=style, color=color, label=name)
                plane.plot(a[-1], b[-1], "o", color=color, markersize=4, clip_on=False)

    black = dict(color=BLACK, linestyle="none")
    plane.plot(*optimum(start, reward), "*", ms=11, markerfacecolor="white", **black)
    plane.plot(*in_square(path[0]), "s", markersize=5, **black)
    plane.annotate("optimum π*", optimum(start, reward), (0.62, 0.98), fontsize=8)
    plane.annotate("start", in_square(path[0]), (0.36, 0.37), fontsize=8)
    plane.grid(False)
    plane.set(title="the path with a fixed μ", xlabel="P(go on), after the prompt", xlim=(0, 1),
              ylabel="P(good ending), after going on", ylim=(0, 1.05))
    ends.set(title="how much of the gain it reaches", xlabel="● fixed μ   ○ μ eight steps old",
             yticks=[-y for y in range(len(FIELD))], xlim=(-0.16, 1.05))
    ends.set_yticklabels(FIELD, fontsize=8)
    for label, (_, color, _) in zip(ends.get_yticklabels(), FIELD.values(), strict=True):
        label.set_color(color)
    return figure


def clip_around_mu(error=0.025, rest=0.5):
    """Draw one expected update at one place, divided by the true one, against μ's error."""
    shown = {"decoupled_token_is": ("decoupled_token_is: cap of 2", BLUE, "-", 1.3),
             "bypass_low_open": ("bypass_low_open: lower end open", "#A0527F", (0, (2, 1)), 4),
             "bypass_high_open": ("bypass_high_open: upper end open", "#666666", "-", 5),
             "bypass_ppo_clip": ("bypass_ppo_clip: sign reversed", RED, "-", 1.8)}
    stops, flips = error / 0.8, 1 - (1 - error) / 1.2
    figure, axis = plt.subplots(figsize=(6.6, 3.4))
    axis.axhspan(-0.55, 0, color="#fbeeec", linewidth=0)
    axis.text(0.036, -0.29, "below 0 the update makes\nthe right token rarer", fontsize=8)
    for name in ("bypass_low_open", "decoupled_token_is", "bypass_high_open", "bypass_ppo_clip"):
        _, color, style, width = shown[name]
        for low, high in ((0.005, stops), (stops, flips), (flips, 0.3)):
            at = torch.linspace(low + 1e-6, high - 1e-6, 40, dtype=torch.float64).tolist()
            pushes = [words.push(name, error, of_mu, rest) for of_mu in at]
            axis.plot(at, pushes, linestyle=style, color=color, linewidth=width,
                      alpha=0.5 if width > 2 else 1)
    for of_mu in (error, stops, flips):
        axis.axvline(of_mu, color=BLACK, linestyle=":", linewidth=0.9)
    for x, y, said in ((0.036, -0.48, f"left dotted line: π's own error, {error:g}"),
                       (stops, 1.12, f" lower end acts: {stops:.3f}"),
                       (flips, 1.12, f" upper end acts, too: {flips:.3f}")):
        axis.text(x, y, said, fontsize=8)
    for x, y, name in ((0.193, 0.9, "decoupled_token_is"), (0.193, 0.46, "bypass_low_open"),
                       (0.193, 0.1, "bypass_high_open"), (0.193, -0.31, "bypass_ppo_clip")):
        axis.text(x, y, shown[name][0], fontsize=8, color=shown[name][1])
    axis.set(xlim=(0, 0.3), ylim=(-0.55, 1.22), ylabel="expected update / true update",
             xlabel="probability with which μ errs at this place")
    return figure


def versions_crossing(T=8, update=4, seed=9):
    """Draw a response that crosses a weight update: its two records, and what each makes of ρ."""
    start = versions.Recurrent(V=4, T=T, seed=seed)
    end = start.perturbed(1000 + seed, versions.UPDATE)
    pi = end.perturbed(2000 + seed, versions.UPDATE)
    first, last, trained = (policy.log_probs().detach() for policy in (start, end, pi))
    record = torch.where(torch.arange(T) < update, first, last)
    full = pi.mask.all(-1).nonzero()[:, 0]
    drawn = full[(record + trained)[full].sum(-1).argmax()]         # likely under both
    figure, (above, below) = plt.subplots(2, 1, figsize=(6.5, 4), sharex=True)
    at = range(1, T + 1)
    for axis in (above, below):
        axis.axvspan(0.5, update + 0.5, color=SKY, alpha=0.25, linewidth=0)
        axis.axvline(update + 0.5, color=BLACK, linewidth=1)
    for score, color, marker, style, name in (
            (record, BLUE, "o", "-", "recorded: log μ of the version that drew the token"),
            (last, RED, "x", "--", "recomputed with the end version")):
        above.plot(at, score[drawn], marker, color=color, markersize=8, fillstyle="none",
                   label=name)
        ratio = (trained - score)[drawn].cumsum(0).exp()
        below.plot(at, ratio, style, marker=marker, fillstyle="none", color=color)
        below.text(T + 0.15, ratio[-1], f"{ratio[-1]:.2f}", color=color, va="center")
    figure.legend(loc="outside upper center", ncols=2)
    above.set(ylabel="log-prob of the token", xlim=(0.5, T + 0.7))
    below.set(ylabel="ρ of the tokens so far", xlabel="token of the response", xticks=at,
              ylim=(0.7, 1.8))
    below.text(update + 0.4, 0.72, "drawn by the start version", ha="right", va="bottom")
    below.text(update + 0.6, 0.72, "drawn by the end version", ha="left", va="bottom")
    return figure


def two_ratios():
    """Draw where PPO's clip removes the gradient, in the plane of ρ and r.

    The tokens of a first mini-batch are on the line r = 1: chapter 5's policies, by enumeration.
    """
    old = Policy(V=3, T=3, seed=0)
    mu, R = old.perturbed(seed=1, size=0.5), rewards(old)
    rho = (old.step_log_probs() - mu.step_log_probs()).detach().exp().flatten()
    A = (R - J(old, R)).detach().expand_as(old.mask)
    place, chance = old.states * old.V + old.tokens, mu.probs().detach()[:, None].expand_as(A)
    x = torch.logspace(-2, 2, 200, base=2, dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.8), sharey=True)
    modes = ("decoupled mode: the clip acts on r", torch.ones_like(x), torch.ones_like(rho)), (
        "bypass mode: the clip acts on ρ_θ = ρ r", x, rho)
    for axis, (title, scale, ratio) in zip(axes, modes, strict=True):
        axis.fill_between(x, 1.2 / scale, 4, color=ORANGE, alpha=0.25, linewidth=0)
        axis.fill_between(x, 0.25, 0.8 / scale, color=SKY, alpha=0.25, linewidth=0)
        share = 0.0
        for sign, color, clipped in ((1, RED, ratio > 1.2), (-1, BLUE, ratio < 0.8)):
            triangle = [(-1, 0), (1, 0), (0, 1.5 * sign), (-1, 0)]             # stands, or hangs
            part = old.mask & (A * sign > 0)
            drawn = torch.zeros_like(rho).index_add(0, place[part], chance[part])
            axis.scatter(rho, torch.ones_like(rho), 900 * drawn ** 0.5, linewidth=1, zorder=3,
                         marker=triangle, edgecolor=color,
                         facecolor=["white" if lost else color for lost in clipped])
            share += (drawn[clipped].sum() / chance[old.mask].sum()).item()
        axis.axhline(1, color=BLACK, linewidth=0.8)
        axis.text(0.97, 0.93, "no gradient where A > 0", color=RED, ha="right", fontsize=8,
                  transform=axis.transAxes)
        axis.text(0.03, 0.05, "no gradient where A < 0", color=BLUE, fontsize=8,
                  transform=axis.transAxes)
        axis.set(title=f"{title}\n{100 * share:.0f} % of the tokens have no gradient",
                 xscale="log", yscale="log", xlim=(0.35, 2.8), ylim=(0.35, 2.8),
                 xlabel="ρ = π_old/π_rollout, the mismatch (ratio, log axis)")
        axis.title.set_fontsize(10)
        ticks = [0.5, 0.8, 1, 1.2, 2]
        axis.set_xticks(ticks, map(str, ticks))
        axis.set_yticks(ticks, map(str, ticks))
        axis.minorticks_off()
    axes[0].set_ylabel("r = π_θ/π_old, the update (ratio, log axis)")
    axes[0].text(0.37, 1.24, "▲ token with A > 0", color=RED, fontsize=8)
    axes[0].text(0.37, 0.715, "▼ token with A < 0", color=BLUE, fontsize=8)
    return figure


def tool_branch(seed=18):
    """Draw an agent's responses as a tree, and what weights with the tool's tokens make of them."""
    x = turns.agent(seed, T=3)
    log_rho = (x.acts.log_probs() - x.draws.log_probs()).detach()
    figure, (tree, bars) = plt.subplots(1, 2, figsize=(7.5, 4.6), width_ratios=(1.5, 1))
    listed = [tuple(y[m].tolist()) for y, m in zip(x.pi.tokens, x.mask, strict=True)]
    height = {y: -float(n) for n, y in enumerate(sorted(listed))}
    edges = {y[:t + 1]: (bool(x.written[i, t]), log_rho[i, t].exp())
             for i, y in enumerate(listed) for t in range(len(y))}
    for prefix in sorted({y[:-1] for y in edges}, key=len, reverse=True):
        height[prefix] = statistics.mean(height[(*prefix, v)] for v in range(x.pi.V))
    says = {True: ("timeout", "result 1", "result 2"), False: ("end", "call", "word")}
    for y, (written, ratio) in edges.items():
        color, style, above = (RED, "--", "P/P") if written else (BLUE, "-", f"{ratio:.2f}")
        start, (end, at) = height[y[:-1]], (len(y), height[y])
        tree.plot([end - 1, end - 0.7, end], [start, at, at], style, color=color, linewidth=1)
        tree.text(end - 0.67, at + 0.08, f"{says[written][y[-1]]}  {above}", color=color,
                  fontsize=7.5)
    tree.set_title("solid: the model's token, π/μ\ndashed: the tool's token, P/P = 1", fontsize=9)
    tree.axis("off")
    tree.set(xlim=(-0.05, 3.05), ylim=(-14.6, 0.8))
    at = [height[y] for y in listed]
    bars.barh(at, x.acts.probs().tolist(), 0.7, color="#cccccc", label="π's own chance")
    counted = log_rho + torch.where(x.written, x.lp, 0.0)           # log μ = 0 at the tool's tokens
    for log_w, marker, color, name in ((log_rho, "|", BLUE, "μ's × ρ of the model's tokens"),
                                       (counted, "x", RED, "μ's × ρ with log μ = 0 at the tool's")):
        bars.plot((x.draws.probs().detach() * log_w.sum(-1).exp()).tolist(), at, marker,
                  color=color, markersize=9 if marker == "|" else 5, markeredgewidth=2, label=name)
    bars.set(ylim=(-14.6, 0.8), yticks=[], xlabel="chance of the response", xlim=(0, None))
    bars.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def route_targets():
    """Draw the bias of each use of recorded routes to both targets, against the share of flips.

    On the right it is divided by that of R3 without weights, since all but one nearly agree.
    """
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.5))
    shown = {(routes.GATES, None): ("gates replayed, too", RED, "-."),
             (routes.OWN, None): ("own routes, uncorrected", BLACK, ":"),
             (routes.R3, None): ("R3, uncorrected", BLUE, "-"),
             (routes.R3, "token"): ("R3, token weights", SKY, "--"),
             (routes.R3, "sequence"): ("R3, sequence weights", GREEN, (0, (5, 1, 1, 1)))}
    found = [routes.prices(noise) for noise in routes.NOISES]
    flips = [100 * statistics.mean(of["flips"]) for of in found]
    mean = {row: [[statistics.mean(sizes[aim] for sizes in of[row]) for of in found]
                  for aim in (0, 1)] for row in shown}
    for row, (name, color, style) in shown.items():
        over = [x / of_r3 for x, of_r3 in zip(mean[row][1], mean[routes.R3, None][1], strict=True)]
        for axis, y in zip(axes, (mean[row][0], over), strict=True):
            axis.plot(flips[:-1], y[:-1], linestyle=style, color=color, label=name)
            axis.plot(flips[-1], y[-1], "o", color=color, fillstyle="none")

    for axis in axes:
        axis.set(xlabel="routes that flip, %", xscale="log")
        axis.set_xticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
        axis.minorticks_off()
    axes[0].set(title="to T1: the trainer, by its own routes", yscale="log", ylim=(0.001, 1.3),
                ylabel="bias / |∇J|, mean of the models")
    axes[0].set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    axes[1].set(title="to T2: the sampler, as it is deployed", ylim=(0.8, 1.8),
                ylabel="bias / that of R3, uncorrected")
    axes[0].legend(fontsize=7, loc="lower right")
    return figure


def study():
    """Draw final accuracies at staleness 8, a dot per seed; grey is the best while training."""
    shown = ["on_time", "small_steps_token_is", "token_is_opsm", "small_steps", "bypass_ppo_clip",
             "decoupled_seq_is",
             "decoupled_token_is", "decoupled_seq_is_rs", "bypass_pg_is", "naive",
             "shuffled_weights"]
    cells = {name: runs()["staleness_8"][name] if name != "on_time" else runs()["matched"]["naive"]
             for name in shown}
    figure, axis = plt.subplots(figsize=(5.2, 3.4))
    for y, name in enumerate(reversed(shown)):
        final, best = ([float(row[c]) for row in cells[name].values()]
                       for c in ("final_accuracy", "best_accuracy"))
        color = {"on_time": BLACK, "naive": RED, "shuffled_weights": RED}.get(name, BLUE)
        axis.plot(best, [y] * len(best), "|", color="#999999", markersize=9)
        axis.plot(final, [y] * len(final), "o", color=color, markersize=4, alpha=0.6,
                  markeredgewidth=0)
        axis.plot(sum(final) / len(final), y, "D", color=color, markersize=6)
    labels = [name if name != "on_time" else "naive (on_time)" for name in reversed(shown)]
    axis.set_yticks(range(len(shown)), labels)
    axis.set(xlim=(0, 1), xlabel="held-out accuracy after 60 steps, rollouts 8 steps stale\n"
             "● a seed   ◆ their mean   | the best while training")
    starts = [float(row["first_accuracy"]) for row in cells["naive"].values()]
    axis.axvline(sum(starts) / len(starts), color="#999999", linestyle=":")
    axis.text(0.65, 9.5, "dotted: before training", fontsize=8, ha="right", va="center")
    return figure


ARMS = {"matched": (BLACK, "-"), "decoupled_seq_is": (BLUE, "-"), "decoupled_token_is": (SKY, "--"),
        "naive": (RED, ":"),
        "bypass_ppo_clip": (ORANGE, "-."), "bypass_open": (GREEN, (0, (3, 1))),
        "bypass_low_open": (PINK, (0, (1, 1))),
        "bypass_high_open": ("#999999", "-.")}


def curves(rows, axis=None):
    """Draw held-out accuracy against the step: thin lines are seeds, a thick one an arm's mean."""
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
    axis.set(xlabel="training step", ylabel="held-out accuracy", ylim=(-0.02, 1))
    if figure:
        axis.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


def apart(heights, least):
    """Move {name: height} up or down as little as keeps them `least` from one another."""
    names = sorted(heights, key=lambda name: heights[name])
    groups = [[[name], heights[name]] for name in names]               # names, the middle of them
    while True:
        close = [i for i in range(len(groups) - 1) if groups[i + 1][1] - groups[i][1]
                 < least * (len(groups[i][0]) + len(groups[i + 1][0])) / 2 - 1e-9]
        if not close:
            return {name: middle + least * (i - (len(group) - 1) / 2)
                    for group, middle in groups for i, name in enumerate(group)}
        group = groups[close[0]][0] + groups.pop(close[0] + 1)[0]
        groups[close[0]] = [group, statistics.mean(heights[name] for name in group)]


def study_64():
    """Draw the curves of the second study's three main regimes, each arm with its name."""
    found = runs("sixty-four")
    figure, axes = plt.subplots(1, 3, figsize=(11.1, 3.5), sharey=True)
    for axis, regime in zip(axes, ("int4_fast", "int4_slow", "staleness_4"), strict=True):
        curves([row for of_method in found[regime].values() for row in of_method.values()], axis)
        ends = {line.get_label().split(" (")[0]: line.get_ydata()[-1]
                for line in axis.get_legend_handles_labels()[0]}
        for arm, height in apart(ends, 0.058).items():
            color = DARK.get(arm, ARMS[arm][0])
            axis.plot([40, 42], [ends[arm], height], color=color, linewidth=0.7, clip_on=False)
            axis.text(42.5, height, arm, color=color, fontsize=8, va="center")
        axis.set(xlim=(4, 40), xticks=range(10, 41, 10))
        axis.set_title(f"{regime}\n" + TITLES[regime].replace("\n", " "), loc="left", fontsize=9)
        axis.label_outer()
    return figure


DARK = {"decoupled_token_is": "#1B78AB", "bypass_ppo_clip": "#946300",      # legible as text
        "bypass_low_open": "#A64D82", "bypass_high_open": "#6B6B6B"}


def study_64_forest():
    """Draw every contrast of the second study with its interval, by regime; filled: separable."""
    of_regime = {}
    for x in judged_contrasts():
        of_regime.setdefault(x.regime, []).append(x)
    figure, axes = plt.subplots(1, 2, figsize=(10.2, 5.4), sharex=True)
    half = sum(map(len, of_regime.values())) / 2
    y, seen, ticks = [0.0, 0.0], 0, ([], [])
    for regime, rows in of_regime.items():
        side = int(seen >= half)
        seen += len(rows)
        axis = axes[side]
        words = str(TITLES.get(regime, regime.split("_")[-1] + " tokens")).replace("\n", " ")
        words = words.replace("weights rounded to ", "").replace("weights of ", "")
        axis.text(-0.81, y[side] - 0.35, f"{regime}: {words}", fontsize=7, fontweight="bold",
                  va="center")
        for n, x in enumerate(rows, 1):
            (gap, width), at = x.difference(), y[side] - 0.35 - n
            color = (BLUE if gap > 0 else RED) if x.separable else "#777777"
            axis.plot([gap - width, gap + width], [at, at], color=color, linewidth=1.2)
            axis.plot(gap, at, "o", markersize=5, color=color,
                      markerfacecolor=color if x.separable else "white")
            ticks[side].append((at, f"{x.arm} − {x.other}"))
        y[side] -= len(rows) + 1.35

    for axis, marks in zip(axes, ticks, strict=True):
        axis.axvline(0, color=BLACK, linewidth=0.9)
        axis.set_yticks(*map(list, zip(*marks, strict=True)), fontsize=7)
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
        axis.set(xlim=(-0.83, 0.5), ylim=(min(y), 0.6))
    figure.supxlabel("difference of the area, mean over ten seeds and 95 % interval: right of 0 "
                     "the first arm is better      ● separable after adjustment   ○ not",
                     fontsize=8)
    return figure


CALLED = {"naive": "disabled", "matched": "equal weights\non both sides"}     # in a figure


def study_64_areas():
    """Draw the second study's endpoint in its three main regimes, with a dot per seed."""
    found, shown = runs("sixty-four"), ("naive", "bypass_ppo_clip", "decoupled_token_is",
                                        "decoupled_seq_is", "matched")
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 2.8), sharey=True)
    for axis, regime in zip(axes, ("int4_fast", "int4_slow", "staleness_4"), strict=True):
        for y, arm in enumerate(shown):
            areas = [float(row["area"]) for row in found[regime][arm].values()]
            axis.plot(areas, [y] * len(areas), "o", color=ARMS[arm][0], markersize=4, alpha=0.6,
                      markeredgewidth=0)
            axis.plot(statistics.mean(areas), y, "D", color=ARMS[arm][0], markersize=6)
        starts = [float(row["first_accuracy"]) for row in found[regime]["naive"].values()]
        axis.axvline(sum(starts) / len(starts), color="#999999", linestyle=":")
        axis.set(title=TITLES[regime], xlim=(0, 1), ylim=(-0.5, len(shown) - 0.5),
                 yticks=range(len(shown)), yticklabels=[CALLED.get(arm, arm) for arm in shown])
    figure.supxlabel("area under the held-out accuracy of 40 steps      "
                     "● a seed   ◆ their mean   dotted: before training", fontsize=9)
    return figure


REAL_LOOKS = {"matched": (BLACK, "-"), "disabled": (ORANGE, "--"),
              "decoupled_token_is": (BLUE, "-"), "bypass_ppo_clip": (RED, "-.")}


def real_run():
    """Draw the real model's runs: held-out accuracy, and the reward of what the engine drew."""
    found = {arm: list(rows.values()) for arm, rows in runs("real-card")["coarse"].items()}
    shown = [arm for arm in ("matched", "disabled", "decoupled_token_is", "bypass_ppo_clip")
             if arm in found]
    figure, (policy, engine) = plt.subplots(1, 2, figsize=(7.5, 2.9), sharey=True)
    for arm in shown:
        color, style = REAL_LOOKS[arm]
        curves = [[float(row["first_accuracy"]), *map(float, row["curve"].split())]
                  for row in found[arm]]
        drawn = [[float(row["first_reward"]), float(row["last_reward"])] for row in found[arm]]
        for axis, x, lines in ((policy, range(0, 21, 5), curves), (engine, (1, 18), drawn)):
            for line in lines:
                axis.plot(x, line, style, color=color, linewidth=0.7, alpha=0.5)
            axis.plot(x, [statistics.mean(y) for y in zip(*lines, strict=True)], style,
                      color=color, linewidth=2.4, label=f"{arm} ({len(lines)})")
    policy.set(title="the trainer's policy, in float32", xlabel="step", ylabel="right answers",
               ylim=(0, 0.9))
    engine.set(title="what the six-bit engine drew", xlabel="step", xticks=(1, 18),
               xticklabels=("1", "16 to 20"))
    engine.legend(fontsize=8, loc="upper left", title="arm (seeds)", title_fontsize=8)
    return figure


def merge_losses():
    """Draw what merges in bfloat16 lose of a LoRA: points measured, lines predicted."""
    found = merging.cells()
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.2))
    for (rank, rate), color in zip(merging.CELLS, (BLACK, BLUE, RED, GREEN), strict=True):
        own = {step: found[rank, rate, step] for step in merging.STEPS}
        for axis, name, unit in ((left, "share", 100), (right, "kl", 1)):
            measured = {"share": "share", "kl": "kl_merged"}[name]
            axis.plot([*own], [unit * x[measured] for x in own.values()], "o", color=color,
                      markersize=5, label=f"rank {rank}, η = {rate:g}")
            axis.plot([*own], [unit * x[f"{name}_predicted"] for x in own.values()], "-",
                      color=color, linewidth=1)
    kernels = statistics.mean(x["kl_kernels"] for x in found.values())
    right.axhline(kernels, color="#777777", linestyle=":")
    right.text(1, 1.1 * kernels, "bfloat16 kernels, equal weights", fontsize=8, color="#555555")
    left.set(title="entries that a merge leaves as they were, %", ylim=(0, 100))
    left.legend(fontsize=8)
    right.set(title="KL(engine‖policy) of a token, nats", yscale="log", ylim=(2e-7, 6e-5))
    for axis in (left, right):
        axis.set(xlabel="step", xscale="log", xticks=merging.STEPS, xticklabels=merging.STEPS)
        axis.minorticks_off()
    return figure


def study_64_lengths():
    """Draw ESS/N and areas by the length of an answer, for four-bit weights and large steps.

    The left panel compares ESS/N with what χ² of a token predicts.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3))
    shown = ("decoupled_seq_is", "decoupled_token_is", "naive")
    found = {length: runs("sixty-four").get(regime, {}) for length, regime in LENGTHS.items()}
    found = {length: arms for length, arms in found.items() if arms.keys() >= set(shown)}
    for length, marker, color in zip(found, "o^sD", (SKY, BLUE, GREEN, BLACK), strict=False):
        seeds = found[length]["decoupled_seq_is"].values()
        left.plot([(1 + float(row["chi2_token"])) ** -(length + 1) for row in seeds],
                  [1 / (1 + float(row["chi2_seq"])) for row in seeds], marker, color=color,
                  markersize=4)
        x, y = {16: (0.44, 0.86), 32: (0.6, 0.56), 64: (0.2, 0.7), 128: (0.3, 0.3)}[length]
        left.text(x, y, f"{length} tokens", color=DARK.get(color, color), fontsize=8)
    left.plot([0, 1], [0, 1], color="#999999", linewidth=1)
    left.text(0.72, 0.62, "formula", color="#777777", fontsize=8, rotation=42)
    left.set(xlim=(0, 1), ylim=(0, 1),
             xlabel="predicted from a token: (1 + χ²_token)^(−|y|)",
             ylabel="ESS/N of responses", title="decoupled_seq_is")
    for arm in shown:
        areas = {length: [float(row["area"]) for row in arms[arm].values()]
                 for length, arms in found.items()}
        (color, style), points = ARMS[arm], [(length, x) for length, values in areas.items()
                                             for x in values]
        right.plot(*zip(*points, strict=True), "o", color=color, markersize=3, alpha=0.4,
                   markeredgewidth=0)
        means = [statistics.mean(values) for values in areas.values()]
        right.plot(list(areas), means, linestyle=style, color=color)
        x, y = {"decoupled_seq_is": (17, 0.95), "decoupled_token_is": (17, 0.68),
                "naive": (62, 0.52)}[arm]
        right.text(x, y, arm, color=DARK.get(arm, color), fontsize=8)
    right.set(xscale="log", ylim=(0, 1), xlabel="length of an answer, tokens",
              ylabel="area", title="int4_fast, by length")
    right.set_xticks(list(found), labels=map(str, found))
    right.minorticks_off()
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
    """Draw what `python trainer.py` did: learning, and the distance of the policies."""
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
    """Return a run's name, seed, other settings and {step: {metric: number}}."""
    from three_policies.training.files import read_metrics      # loads transformers
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
    """Return a run's seed, and the settings that stay when it is continued.

    A setting that is left out has its default.
    """
    defaults = {key: of.default for key, _, of in leaves(Settings)
                if of.default is not dataclasses.MISSING}
    given = flat(read_mapping(path))
    if "seed" not in given:
        raise UserError(f"{path} is not the settings of a run: it has no seed")
    own, left = defaults | given, CHANGEABLE - SPLITS | {"run", "seed"}
    return own["seed"], {key: own[key] for key in sorted(own.keys() - left)}


def with_ess(line):
    """Add ESS/N of the tokens, 1/(1 + χ²).

    A run's own effective sample size is that of its weights. These are weights of tokens in one run
    and of sequences in another, which cannot be compared.
    """
    chi2 = line.get("rollout_corr/chi2_token", math.nan)               # nan: nothing was left
    return {**line, "ESS/N_token": 1 / (1 + max(chi2, 0.0))}


def groups_of(found):
    """Return {name: runs}: runs of a group differ in their seed alone; its name sets it apart."""
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
    """Return key=value for those of the keys that the settings have, or say that they have none."""
    values = {key: settings[key] for key in keys if key in settings}
    words = [f"{key}={x if isinstance(x, str) else json.dumps(x)}" for key, x in values.items()]
    return ", ".join(words or [f"no {key}" for key in keys])


def values_of(runs, metric):
    """Return {step: a finite value per run} for the steps at which all runs of a group have one."""
    found = {step: [run.steps.get(step, {}).get(metric, math.nan) for run in runs]
             for step in runs[0].steps}
    return {step: values for step, values in found.items() if all(map(math.isfinite, values))}


def band(values):
    """Return mean, low and high: mean ± standard deviation (n − 1), or both values of two seeds."""
    mean = statistics.mean(values)
    if len(values) < 3:
        return mean, min(values), max(values)
    return mean, mean - statistics.stdev(values), mean + statistics.stdev(values)


def draw_runs(groups, metrics):
    """Draw a panel per metric below the groups' names.

    The view is what the seeds reach. A band may go beyond it.
    """
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
    """Draw the mean of a group's seeds and its band; mark every point where these are few."""
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
    """Put the groups' names above the panels, in as many columns as fit, and enlarge the figure."""
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
    """Return an aligned table, a line per group.

    "Last" is the last step at which all of its runs have a value.
    """
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
    """Return the metrics to draw: the named ones, which must all be there, or those of PANELS."""
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
    """Run the command `runs`; return the exit code, 2 after a sentence that says what is wrong."""
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

# Nine causes: the panel of doctor/panels.py that shows each, by its place, and what to see there.
SIGNED = {"temperature": (0, "a line through 0, but not of slope 1"),
          "raw": (4, "the mean of ρ is not 1"),
          "cut": (0, "μ = 1 (right edge), π below it"),
          "shift": (3, "two tokens after one prefix disagree"),
          "padding": (2, "some prompts, from the first token on"),
          "retokenised": (2, "a few responses, from a token on"),
          "in-flight": (1, "up to a token, in every response"),
          "penalty": (0, "a band: repeated tokens stand apart"),
          "softcap": (0, "a line that bends at the ends")}


def preview(regime="int4_slow"):
    """Draw what a link to the book shows, 1200 × 630 pixels: three arms of the second study."""
    said = {"decoupled_seq_is": "sequence weights", "naive": "no correction",
            "bypass_ppo_clip": "bypass\n(saves a pass)"}
    found = runs("sixty-four")[regime]
    figure, axis = plt.subplots(figsize=(1200 / 110, 630 / 110))
    curves([row for arm in said for row in found[arm].values()], axis)
    for line in axis.get_lines():
        line.set_linewidth(2 * line.get_linewidth())
    for arm, words in said.items():
        rows = found[arm].values()
        end = statistics.mean(float(row["curve"].split()[-1]) for row in rows)
        area = statistics.mean(float(row["area"]) for row in rows)
        axis.text(40.8, end, f"{words}\naverage {area:.2f}", fontsize=16, va="center",
                  color=DARK.get(arm, ARMS[arm][0]))
    axis.set(xlim=(5, 40), xticks=range(10, 41, 10))
    axis.set_xlabel("training step, the sampler's weights at four bits", fontsize=15)
    axis.set_ylabel("held-out accuracy", fontsize=15)
    axis.tick_params(labelsize=13)
    axis.set_title("Your sampler is not your policy.", fontsize=32, weight="bold", loc="left",
                   pad=18)
    cast(Any, figure.get_layout_engine()).set(w_pad=0.35, h_pad=0.3)
    return figure


AXES = (("logit μ", "logit π"), ("token number", "gap in logits"), ("token number", "response"),
        ("Δ log μ", "Δ log π"), ("tokens", "mean of ρ, less 1"))         # of panels.py


def planted():
    """Plant causes in one model, a healthy pair first; return their dumps' tokens by name."""
    with torch.no_grad():
        model = sides.subject(3, "Qwen2")
        dumps = {"healthy, bf16": plants.plant(model, "healthy", 3, variant="bf16-sampler")} | {
            cause: plants.plant(model, cause, seed=3, severity=0.6) for cause in SIGNED}
    return {name: Tokens.of([response(i, row) for i, row in enumerate(rows, 1)])
            for name, rows in dumps.items()}


def signatures():
    """Draw a row of five panels for each cause: what `doctor --figure` puts below one's own."""
    with plt.rc_context({"axes.grid": False}):
        return panels.draw(planted())


def nine_causes():
    """Draw for each cause the one panel that shows it."""
    found = planted()
    with plt.rc_context({"axes.grid": False}):
        figure, axes = plt.subplots(3, 3, figsize=(8.4, 7.6))
        spare = plt.figure().subplots(1, 5)
        for axis, (cause, (place, seen)) in zip(axes.flat, SIGNED.items(), strict=True):
            row = list(spare)
            row[place] = axis
            panels.draw_row(row, found[cause], "")
            axis.set_title(f"{cause}\n", fontsize=9, fontweight="bold")
            axis.text(0.5, 1.03, seen, transform=axis.transAxes, ha="center", fontsize=8)
            axis.set_xlabel(AXES[place][0], fontsize=8)
            axis.set_ylabel(AXES[place][1], fontsize=8)
            axis.tick_params(labelsize=7)
    return figure


# ----------------------------------------------------------------------------- the command line

FIGURES = {"three-policies": three_policies, "gradient-choices": gradient_choices,
           "length-trap": length_trap, "bias-variance": bias_variance,
           "weight-levels": weight_levels, "loss-coefficients": loss_coefficients,
           "kl-estimators": kl_estimators, "effective-samples": effective_samples, "sizes": sizes,
           "two-ratios": two_ratios, "versions-crossing": versions_crossing,
           "gradient-field": gradient_field, "clip-around-mu": clip_around_mu,
           "tool-branch": tool_branch,
           "route-targets": route_targets, "study": study,
           "study-64": study_64, "study-64-forest": study_64_forest,
           "study-64-areas": study_64_areas, "study-64-lengths": study_64_lengths,
           "real-run": real_run,
           "merge-losses": merge_losses, "signatures": signatures,
           "nine-causes": nine_causes, "preview": preview}
# Sites that show a link's picture do not read SVG; the causes' 18 000 points would take a megabyte.
PIXELS = ("preview", "signatures", "nine-causes")


def save_as_png(figure, path):
    """Write a figure with 192 colours, (nearly) all of them: with fewer, two would look alike."""
    image = io.BytesIO()
    figure.savefig(image, dpi=panels.DPI)
    few = Image.open(image).convert("RGB").quantize(192, Image.Quantize.FASTOCTREE,
                                                    dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["runs"]:
        sys.exit(compare_runs(sys.argv[2:]))
    for name in sys.argv[1:] or FIGURES:
        figure, path = (FIGURES | {"demo": demo})[name](), ROOT / "math" / "figures" / name
        if name in PIXELS:
            save_as_png(figure, path.with_suffix(".png"))
        else:
            path.with_suffix(".svg").write_text(as_svg(figure, name, panels.DPI))
        plt.close(figure)
