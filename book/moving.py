"""Compute the numbers of the figures that move: by the oracle, by losses.py, and from the studies.

A function returns what one figure of book/assets/figures.js shows, as JSON. Nothing is typed here.
"""

import html
import json
from pathlib import Path

import torch

from three_policies.book import moving_exact
from three_policies.book.record_response import SIZES
from three_policies.book.tables import (POLICIES, RolloutCorrectionConfig, bias_and_std, mean_of,
                                        priced, runs)
from three_policies.correction import correct
from three_policies.losses import policy_loss
from three_policies.presets import PRESETS
from three_policies.ratios import aggregate_log_ratio, exp_ratio
from three_policies.rejection import rejection_mask
from three_policies.surrogates import (cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss,
                                       sapo_loss)

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "book" / "assets"


def cap_data():
    """Return bias, its standard error, standard deviation, and the cell of chapter 14's table."""
    caps, noises, limits = [1, 1.25, 1.5, 2, 3, 5, 10], [0.05, 0.2, 0.5], [1, 2, 4, 8]
    methods = {"token, at most C": lambda c: RolloutCorrectionConfig("token", float(c)),
               "sequence, at most C": lambda c: RolloutCorrectionConfig("sequence", float(c)),
               "sequence, 0 outside [1/C, C]": lambda c: RolloutCorrectionConfig(
                   "sequence", (1 / c, float(c))),
               "no weight": lambda c: RolloutCorrectionConfig()}

    def point(config, T, noise):
        found = bias_and_std(config, T, noise)
        return [*(round(x, 4) for x in found[:3]), priced(found).replace("*", "")]

    values = {name: [[[point(of(c), T, noise) for c in (caps if name != "no weight" else caps[:1])]
                      for T in limits] for noise in noises] for name, of in methods.items()}
    return {"C": caps, "noise": noises, "T": limits, "policies": POLICIES, "values": values}


def trap_data():
    """Return product and geometric mean of one ratio on every token, and if two presets keep it."""
    ratios = [0.9, 0.99, 0.999, 1.0, 1.001, 1.01, 1.1]
    lengths = sorted({round(2 ** (i / 3)) for i in range(37)})
    bounds = [PRESETS[name]().rollout_rs for name in ("decoupled_seq_is_rs", "decoupled_geo_rs")]

    def point(ratio, L):
        log_ratio, mask = torch.full((1, L), ratio, dtype=torch.float64).log(), torch.ones(1, L)
        levels = [aggregate_log_ratio(log_ratio, mask, level)[0, 0].exp().item()
                  for level in ("sequence", "geometric")]
        return [*levels, *(bool(rejection_mask(log_ratio, mask, bound).all()) for bound in bounds)]

    return {"ratio": ratios, "lengths": lengths,
            "bounds": [next(iter(bound.items())) for bound in bounds],
            "values": [[point(ratio, L) for L in lengths] for ratio in ratios]}


def curves_data():
    """Return ∂L/∂log π_θ of one token by autograd, at every r and for both signs of A."""
    ratios = torch.arange(1, 401) / 100

    def of_four(new, old, A):
        """Apply GSPO with its own interval, where one of four tokens has r and the others 1."""
        others = torch.zeros(len(new), 3)
        new, old = (torch.cat([x, others], -1) for x in (new, old))
        return gspo_loss(new, old, A.expand(-1, 4), torch.ones(len(new), 4))[:, :1]

    losses = {"REINFORCE": (lambda new, old, A: reinforce_loss(new, A), "eq:reinforce"),
              "PPO": (ppo_clip_loss, "eq:ppo-clip"),
              "PPO, dual clip 3": (lambda *x: ppo_clip_loss(*x, dual_clip=3.0), "eq:dual-clip"),
              "GSPO, one token of four": (of_four, "eq:gspo"),
              "CISPO": (cispo_loss, "eq:cispo"), "SAPO": (sapo_loss, "eq:sapo")}

    def slopes(loss, A):
        old = torch.full((len(ratios), 1), -5.0)
        new = (old + ratios[:, None].log()).requires_grad_()
        total = loss(new, old, torch.full_like(old, A)).sum()
        (gradient,) = torch.autograd.grad(total, new)
        return [round(x, 3) + 0.0 for x in gradient[:, 0].tolist()]

    return {"r": [round(r, 2) for r in ratios.tolist()], "values": [
        {"name": name, "label": label, "plus": slopes(loss, 1.0),
         "minus": slopes(loss, -1)}
        for name, (loss, label) in losses.items()]}


def batch_data():
    """Put six recorded responses through `correct` and `policy_loss`, a preset at a time."""
    recorded = json.loads((HERE / "batch.json").read_text())
    mask = torch.tensor([[token is not None for token in row] for row in recorded["tokens"]])
    mu, old, theta = (torch.tensor(recorded[name]).double()
                      for name in ("rollout", "old", "current"))
    A = torch.tensor(recorded["advantages"]).double()[:, None].expand_as(mu)
    presets = ["disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_k3_rs",
               "decoupled_k3_rs_seq_tis"]

    def rows(x):
        return [[round(v, 3) + 0.0 if m else None for v, m in zip(*pair)]
                for pair in zip(x.tolist(), mask.tolist())]

    def of(preset):
        correction = correct(old, mu, mask, PRESETS[preset](), A)
        lp = theta.clone().requires_grad_()
        loss, _ = policy_loss(lp, old, mu, A, mask, PRESETS[preset](), correction=correction)
        (gradient,) = torch.autograd.grad(loss, lp)
        weights = torch.ones_like(mu) if correction.weights is None else correction.weights
        return {"weights": rows(weights), "kept": rows(correction.mask.double()),
                "gradient": rows(-mask.sum() * gradient), "loss": round(loss.item(), 4)}

    return {**{name: recorded[name] for name in ("prompts", "tokens", "advantages", "how")},
            "rollout": rows(mu), "old": rows(old), "rho": rows(exp_ratio(old - mu)),
            "r": rows(exp_ratio(theta - old)),
            "presets": {preset: of(preset) for preset in presets}}


def sampler_data():
    """Return a real model's response, and the second study's curves, by k3 per token.

    All of these arms have one learning rate.
    """
    recorded, study = json.loads((HERE / "response.json").read_text()), runs("sixty-four")

    def of_arm(rows):
        """Return each seed's accuracy before training and at every fifth step, and their mean."""
        seeds = [[float(x) for x in [row["first_accuracy"], *row["curve"].split()]]
                 for row in rows.values()]
        return {"seeds": seeds, "area": mean_of(rows, "area"),
                "mean": [round(sum(at) / len(seeds), 4) for at in zip(*seeds, strict=True)]}

    def of_size(size, regime, arm):
        response = recorded["sizes"][size]
        log_ratio = torch.tensor(response["old"]).double() - torch.tensor(response["rollout"])
        arms = [arm] if arm == "matched" else [arm, "decoupled_seq_is", "bypass_ppo_clip"]
        return {**response, "regime": regime, "tokens": [*map(html.escape, response["tokens"])],
                "rho": [round(x, 3) for x in exp_ratio(log_ratio).tolist()],
                "weight": round(exp_ratio(log_ratio.sum()).item(), 3),
                "arms": {name: of_arm(study[regime][name]) for name in arms
                         if name in study[regime]}}

    return {"how": recorded["how"], "sizes": {
        size: of_size(size, regime, arm) for size, (regime, arm, *_) in SIZES.items()}}


DATA = {"sampler": sampler_data, "cap": cap_data, "trap": trap_data, "curves": curves_data,
        "batch": batch_data, **moving_exact.DATA}
