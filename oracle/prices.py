"""A thousand tokens, counted: what no weights, token weights and sequence weights estimate.

Each of T places has two tokens, 0 and 1. The trainer's policy π prefers one of them, the sampler's
μ the other: π(preferred) = σ(a) and μ(preferred) = σ(−a), so that E_μ[ρ] = 1, log ρ = ±a, and the
k3 of a token is a·tanh(a/2). At the first `up` places π prefers token 1, at the others token 0. A
response is right if it has at least as many ones as π has on average; one logit, common to all
places, moves token 1, and its score at a place is y − π(1).

Reward, score and Πρ then depend on two counts alone, the ones among the first `up` places and the
ones among the rest. So the 2^T responses fall into (up + 1)(T − up + 1) classes of known size, and
each expectation is a sum over these, exact in float64 at T = 1000.

`aligned` is (2·up − T)/T. At 1 every place pushes the reward the same way: the worst mismatch of
its k3. Near 1/√T the places cancel, as they do if rounding knows nothing of the reward.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from three_policies.oracle import f64

COLUMNS = {"no weights": 1.0, "token weights": 2.0, "sequence, at most 2": 2.0,
           "sequence, at most 10": 10.0, "sequence, exact": math.inf}


class Found(NamedTuple):
    """A Found has an estimator's mean and standard deviation, both in units of ∇J."""

    mean: float
    std: float


def step_of(k3: float) -> float:
    """Return a > 0 with a·tanh(a/2) = k3."""
    low, high = 0.0, 10.0
    for _ in range(200):
        a = (low + high) / 2
        low, high = (a, high) if a * math.tanh(a / 2) < k3 else (low, a)
    return a


def binomial(n: int, p: float) -> Tensor:
    """Return the probabilities of 0 to n successes, [n + 1]."""
    k = torch.arange(n + 1, dtype=torch.float64)
    choices = torch.lgamma(f64(n + 1.0)) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (choices + k * math.log(p) + (n - k) * math.log1p(-p)).exp()


class Counted:
    """All responses of T places, by their two counts of ones.

    mu, ratio, score, right [up + 1, T − up + 1]: a class's probability under μ; Πρ; Σ_t of the
    score; 1 where the reward is 1. J: the expected reward under π. grad_J: its derivative.
    """

    def __init__(self, T: int, k3: float, aligned: float):
        self.a, self.up = step_of(k3), round(T * (1 + aligned) / 2)
        self.down, self.likely = T - self.up, 1 / (1 + math.exp(-self.a))
        self.ones = (torch.arange(self.up + 1, dtype=torch.float64)[:, None],
                     torch.arange(self.down + 1, dtype=torch.float64)[None, :])

        first, rest = self.ones
        self.mu = (binomial(self.up, 1 - self.likely)[:, None]
                   * binomial(self.down, self.likely)[None, :])
        self.ratio = (self.a * ((2 * first - self.up) - (2 * rest - self.down))).exp()
        mean = self.up * self.likely + self.down * (1 - self.likely)
        self.score = first + rest - mean
        self.right = (first + rest >= round(mean)).double()

        self.J = self.expectation(self.ratio * self.right)
        self.grad_J = self.expectation(self.ratio * self.right * self.score)

    def expectation(self, values: Tensor) -> Tensor:
        return (self.mu * values).sum()

    def token_weighted(self, cap: float) -> Tensor:
        """Return Σ_t min(ρ_t, cap) (y_t − π(1))."""
        (first, rest), p = self.ones, self.likely
        up, down = min(math.exp(self.a), cap), min(math.exp(-self.a), cap)
        return (first * up * (1 - p) - (self.up - first) * down * p
                + rest * down * p - (self.down - rest) * up * (1 - p))

    def estimate(self, name: str) -> Found:
        """Return mean and standard deviation of an estimator of one response, over ∇J.

        The baseline is the mean reward that the estimator sees: weighted with sequence weights.
        """
        cap = COLUMNS[name]
        weighted = {"no weights": self.score, "token weights": self.token_weighted(cap)}.get(
            name, self.ratio.clamp(max=cap) * self.score)
        baseline = self.J if name.startswith("sequence") else self.expectation(self.right)

        found = (self.right - baseline) * weighted / self.grad_J
        mean = self.expectation(found)
        return Found(mean.item(), (self.expectation(found**2) - mean**2).sqrt().item())


def thousand(lengths=((100, 1e-3), (1000, 1e-4), (1000, 1e-3), (1000, 5e-3))
             ) -> tuple[list[str], list[list[str]]]:
    """Return the table of chapter 14: by length, k3 and alignment, each estimator's mean ± std."""
    lines = []
    for T, k3 in lengths:
        for aligned, name in ((1 / math.sqrt(T), "as chance has it"), (1.0, "all one way")):
            counted = Counted(T, k3, aligned)
            cells = [counted.estimate(column) for column in COLUMNS]
            ess = 1 / counted.expectation(counted.ratio**2).item()
            lines.append([f"{T}", f"{k3:.0e}".replace("e-0", "e-"), f"{k3 * T:.2g}", name,
                          f"{ess:.2g}", *(f"{x.mean:.2f} ± {x.std:.1f}" for x in cells)])
    return ["T", "k3", "k3 · T", "the mismatch moves the reward", "ESS/N", *COLUMNS], lines
