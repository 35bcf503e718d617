"""Compute the numbers of the figures that explain: the tree, the clip and the square.

All are enumerated. The quiz's dumps are recorded (book/record_quiz.py).
"""

import json
import math
from pathlib import Path

import torch

from three_policies.book.tables import ascend, gain_reached
from three_policies.correction import importance_weights
from three_policies.oracle import J, Policy, expectation, grad_J, rewards, scores, words
from three_policies.presets import PRESETS
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import masked_log_ratio

ROOT = Path(__file__).resolve().parent.parent


def digits(values, places=4):
    """Round a tensor or list of numbers, for a file that a reader's browser loads."""
    return [round(x, places) + 0.0 for x in torch.as_tensor(values).tolist()]


def tree_data():
    """Weigh chapter 3's fifteen responses at each level and cap, and add up their gradients.

    An estimate is a component along ∇J, one across it, its error (all in units of |∇J|), and the
    variance of the gradient from one response.
    """
    pi, caps = Policy(V=3, T=3, seed=0), ["∞", "5", "3", "2", "1.5", "1.25", "1"]
    mu, R = pi.perturbed(seed=1, size=0.5), rewards(pi)
    A, G, wanted = R - J(pi, R).detach(), scores(pi), grad_J(pi, R)
    log_rho = masked_log_ratio(pi.log_probs(), mu.log_probs(), pi.mask)

    def weighed(level, cap):
        w = pi.mask.double() if level == "none" else importance_weights(
            log_rho, pi.mask, level, float(cap.replace("∞", "inf"))).expand_as(log_rho)
        each = torch.einsum("nt,ntp->np", w * A, G)
        mean = expectation(mu, each)
        along, size = mean @ wanted / wanted.square().sum(), wanted.norm()
        spread = expectation(mu, (each - mean).square().sum(-1))
        return {"bars": [digits((x * p)[m]) for x, p, m in zip(w, mu.probs().detach(), pi.mask)],
                "numbers": digits([along, (mean - along * wanted).norm() / size,
                                   (mean - wanted).norm() / size, spread])}

    return {"C": caps, "y": [y[m].tolist() for y, m in zip(pi.tokens, pi.mask)],
            "mu": digits(mu.probs()), "pi": digits(pi.probs()),
            "levels": {level: [weighed(level, cap) for cap in caps]
                       for level in ("none", "geometric", "token", "sequence")}}


def push_data():
    """Return what each case of one place adds to an update, by μ's error and by clip."""
    arms = ["bypass_ppo_clip", "bypass_low_open", "bypass_high_open", "bypass_open",
            "decoupled_token_is"]
    errors = [x / 1000 for x in (*range(5, 60), *range(60, 185, 5), *range(185, 195),
                                 *range(195, 301, 5))]
    return {"m": errors, "p": 0.025, "clips": {
        name: [digits(words.push_of_each(name, 0.025, m)) for m in errors] for name in arms}}


def square():
    """Return the start of chapter 15's picture, the noise on its μ, and the rewards."""
    def logits(first, second):
        return torch.tensor([[0.0, first], [0.0, second]], dtype=torch.float64)

    start = Policy(V=2, T=2)
    start.logits = logits(-0.7, -0.4).requires_grad_()
    # of "0", "10" and "11"
    return start, logits(0.1, -1.0), torch.tensor([[0.45], [0.0], [1.0]], dtype=torch.float64)


def in_square(logits):
    """Return P(go on) and P(good ending): [..., 2 states, 2 tokens] → [..., 2]."""
    return torch.sigmoid(logits[..., 1] - logits[..., 0])


def heights(grid, start, reward):
    """Return the share of the gain at each point of the square: [P(good ending), P(go on)]."""
    rows = torch.zeros(len(grid), len(grid), 2, 2, dtype=torch.float64)
    rows[..., 0, 1], rows[..., 1, 1] = grid.logit(), grid.logit()[:, None]
    return torch.stack([gain_reached(row.flatten(0, 1), [start] * len(grid),
                                     reward.expand(len(grid), -1, -1)) for row in rows])


def optimum(start, reward, beta=0.3):
    """Return π* ∝ start·exp(R/β) of the two-token policy, as a point in the square."""
    stop, ten, eleven = (start.probs().detach() * (reward[:, 0] / beta).exp()).tolist()
    return (ten + eleven) / (stop + ten + eleven), eleven / (ten + eleven)


SQUARE = ("decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs", "decoupled_token_icepop",
          "bypass_ppo_clip", "disabled")
STEPS = [*range(40), *range(40, 401, 6)]                # the first steps are the longest


def square_data():
    """Follow the presets' expected gradients for 400 steps: P(go on), P(good ending) and the end's
    share of the possible gain, for a fixed and for a lagging μ. Levels of J_β are drawn, too."""
    import contourpy
    start, noise, reward = square()
    both, grid = torch.stack([reward, reward]), torch.linspace(0.02, 0.98, 40, dtype=torch.float64)

    def path(config):
        steps = torch.stack(ascend(config, [start] * 2, [noise] * 2, both,
                                   torch.tensor([False, True]))).reshape(-1, 2, 2, 2)
        gains = gain_reached(steps[-1].flatten(0, 1), [start] * 2, both)
        return {mu: {"path": [digits(x) for x in in_square(steps[STEPS, i])],
                     "gain": round(gains[i].item(), 2)}
                for i, mu in enumerate(("fixed", "lagging"))}

    lines = contourpy.contour_generator(grid, grid, heights(grid, start, reward))
    return {"steps": STEPS,
            "star": digits(optimum(start, reward)),
            "levels": [[level, [digits(p, 3) for p in line[::2]]]
                       for level in (-1, -0.5, 0, 0.5, 0.8, 0.95) for line in lines.lines(level)],
            "presets": {"sequence ρ, C = ∞": path(Config.bypass_pg_is(math.inf))}
            | {name: path(PRESETS[name]()) for name in SQUARE}}


def quiz_data():
    """Read the recorded dumps."""
    dumps = json.loads((ROOT / "book" / "assets" / "quiz.json").read_text())
    return {"causes": sorted(dump["cause"] for dump in dumps), "dumps": dumps}


DATA = {"tree": tree_data, "push": push_data, "square": square_data, "quiz": quiz_data}
