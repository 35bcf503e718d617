"""Weights change in the middle of a response: what each practice estimates, by enumeration.

Version `start` draws the first SWITCH tokens, `end` the rest, and the trainer is at `pi`, an update
further. A response is `long` if the update finds it unfinished. A process is a list of runs: the
chance [B] that a launched prompt yields each response that way, and the log μ(y) [B] by which the
weight ρ divides. It is exact if each response y counts π(y) in all (chapter 16).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from three_policies.losses import LossConfig, policy_loss
from three_policies.oracle import J, Policy, exact_gradient, grad_J, rewards
from three_policies.presets import RolloutCorrectionConfig
from three_policies.ratios import exp_ratio


SWITCH, MODELS, UPDATE = 2, 30, 0.3         # tokens before the update; its size, for each weight
Runs = list[tuple[Tensor, Tensor]]


class Recurrent(Policy):
    """A policy with shared weights has a state, its cache, for the next state and the logits."""

    def __init__(self, V: int = 4, T: int = 4, seed: int = 0, scale: float = 1.0):
        super().__init__(V, T, seed, scale)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(2, V, V, generator=generator, dtype=torch.float64)
        self.logits = (scale * noise).requires_grad_()

    def log_probs(self, before: "Recurrent | None" = None) -> Tensor:
        """Return log π of every token; `before` draws the first SWITCH, and its cache is kept."""
        state, found = torch.zeros(len(self.tokens), self.V, dtype=torch.float64), []
        for t in range(self.T):
            token, logits = (before if before and t < SWITCH else self).logits
            state = (state + token[self.tokens[:, t - 1] if t else 0]).tanh()
            found.append((state @ logits).log_softmax(-1).gather(1, self.tokens[:, t:t + 1]))
        return torch.where(self.mask, torch.cat(found, -1), 0.0)


def counts(pi: Tensor, runs: Runs) -> Tensor:
    """Return how often a launched prompt counts each response: Σ_runs chance · π/μ, [B]."""
    return torch.stack([chance * (pi - mu).exp() for chance, mu in runs]).sum(0)


def rescored(record: Tensor, score: Tensor) -> Runs:
    """Return the process whose weights divide by another score than the record (eq:rescored).

    It is exact if the score is the record, Σ_t log π_{v(t)} (eq:recorded).
    """
    return [(record.exp(), score)]


def delayed(launched: list[Tensor], delay: Tensor) -> Runs:
    """Return the process that trains, of the launch j steps ago, all with delay j (eq:delayed)."""
    return [(mu.exp() * (delay == j), mu) for j, mu in enumerate(launched)]


def restarted(first: Tensor, again: Tensor, long: Tensor) -> Runs:
    """Return the process that draws long responses again, every log μ right (eq:restarted)."""
    return [(first.exp() * ~long, first), ((first.exp() * long).sum() * again.exp(), again)]


def mixture(runs: Runs) -> Runs:
    """Return the process scored by the chance of a response in any run."""
    chance = torch.stack([chance for chance, _ in runs]).sum(0)
    return [(chance, chance.log())]


def kept(record: Tensor, keep: Tensor, repaired: bool = False) -> Runs:
    """Return the process that keeps a response with the chance `keep` (eq:discarded).

    Repaired, it divides ρ by this chance as well (eq:kept-weight).
    """
    return [(record.exp() * keep, record + (keep.log() if repaired else 0))]


class Practice(NamedTuple):
    """The counts of tokens, [B, T], the mean ρ per launched prompt, and the baseline."""

    count: Tensor
    rho: float
    baseline: float

    def gradient(self, pi: Policy, R: Tensor) -> Tensor:
        """Return the mean gradient [P] of a launched prompt, Σ_y Σ_t count (R − b) ∇log π."""
        return exact_gradient(pi, (self.count * (R - self.baseline) * pi.log_probs()).sum())


def survivors(pi: Policy, R: Tensor, count: Tensor) -> Practice:
    """Return the practice per kept response, with their mean as baseline (eq:survivors)."""
    share = count / count.sum()
    return Practice(share[:, None] * pi.mask, count.sum().item(), (share @ R[:, 0]).item())


def plain(pi: Policy, R: Tensor, processes: dict[str, Runs]) -> dict[str, Practice]:
    """Return the practices that give all tokens of a response its weight; the baseline is J."""
    count = {name: counts(pi.log_probs().detach().sum(-1), x) for name, x in processes.items()}
    b = J(pi, R).item()
    return {name: Practice(c[:, None] * pi.mask, c.sum().item(), b) for name, c in count.items()}


def crossing(pi: Policy, start: Policy, end: Policy, R: Tensor) -> dict[str, Practice]:
    """Return what is done with the log μ of a response that crosses the update, by name.

    To mask the old tokens is to leave out E_π[Σ_old A ∇log π] (eq:old-masked).
    """
    lp, first, last = (policy.log_probs().detach() for policy in (pi, start, end))
    old, b = torch.arange(pi.T) < SWITCH, J(pi, R).item()
    record, new = torch.where(old, first, last), ~(old & pi.mask[:, [SWITCH]]) & pi.mask
    drawn, rest = record.sum(-1), (record + (lp - record) * new).sum(-1).exp()
    runs = {"recorded, sequence weights": rescored(drawn, drawn),
            "recomputed with the start version": rescored(drawn, first.sum(-1)),
            "recomputed with the end version": rescored(drawn, last.sum(-1)),
            "ρ := 1": rescored(drawn, lp.sum(-1))}
    if isinstance(start, Recurrent) and isinstance(end, Recurrent):
        cached = end.log_probs(start).detach().sum(-1)
        runs |= {"cache kept, recorded": rescored(cached, cached),
                 "cache kept, recomputed by version": rescored(cached, drawn)}
    tokens = drawn.exp()[:, None] * (lp - record).exp()
    exact = counts(lp.sum(-1), rescored(drawn, drawn))
    return plain(pi, R, runs) | {
        "recorded, token weights": Practice(tokens * pi.mask, 1.0, b),
        "old tokens masked, ρ of all": Practice(exact[:, None] * new, exact.sum().item(), b),
        "old tokens masked, ρ of the rest": Practice(rest[:, None] * new, rest.sum().item(), b)}


def overlong(pi: Policy, start: Policy, end: Policy, R: Tensor) -> dict[str, Practice]:
    """Return what is done with the responses that the update finds unfinished, by name."""
    first, last = (policy.log_probs().detach() for policy in (start, end))
    long, once, again = pi.mask[:, SWITCH], first.sum(-1), last.sum(-1)
    drawn = torch.where(torch.arange(pi.T) < SWITCH, first, last).sum(-1)
    half, restarts = torch.where(long, 0.5, 1.0).double(), restarted(once, again, long)
    found = plain(pi, R, {
        "continued": rescored(drawn, drawn), "delayed a step": delayed([again, drawn], long.long()),
        "restarted, each by its version": restarts, "restarted, by the mixture": mixture(restarts),
        "discarded, fixed baseline": kept(once, (~long).double()),
        "half discarded, weight ρ": kept(drawn, half),
        "half discarded, weight ρ/q": kept(drawn, half, repaired=True)})
    of_kept = counts(pi.log_probs().detach().sum(-1), kept(once, (~long).double()))
    return found | {"discarded, survivors' mean": survivors(pi, R, of_kept)}


def model(kind: type[Policy], seed: int) -> tuple[Policy, Policy, Policy, Tensor]:
    """Return a random π, the start and the end version of its sampler, and rewards."""
    end = (start := kind(4, 4, seed)).perturbed(1000 + seed, UPDATE)
    return (pi := end.perturbed(2000 + seed, UPDATE)), start, end, rewards(pi, 3000 + seed)


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the distance of two gradients, relative to the length of the second."""
    return ((found - wanted).norm() / wanted.norm()).item()


def trained(pi: Policy, R: Tensor, record: Tensor, score: Tensor) -> str:
    """Write bias and E[ρ] of `policy_loss` with sequence weights.  (eq:recorded, eq:rescored)

    record, score [B, T]: log μ of what was drawn, −∞ where μ cannot draw, and what divides π.
    """
    lp, A = pi.log_probs(), (R - J(pi, R).detach()).expand(-1, pi.T)
    exact = RolloutCorrectionConfig.bypass_pg_is(threshold=math.inf)
    how = LossConfig(aggregation="seq-mean-token-sum")
    loss = torch.stack([policy_loss(lp[[i]], lp[[i]], score[[i]], A[[i]], pi.mask[[i]], exact,
                                    how)[0] for i in range(len(R))])

    chance = record.sum(-1).exp()
    found, rho = -exact_gradient(pi, chance @ loss), chance @ exp_ratio((lp - score).sum(-1))
    return f"{off(found, grad_J(pi, R)):.3f}, {rho:.3f}"


def in_groups(pi: Policy, R: Tensor, q: Tensor, advantages: Callable[[Tensor, Tensor], Tensor],
              n: int = 2) -> Tensor:
    """Return the mean gradient [P] of a response in groups of n, kept with the chance q [B].

    The advantages, a function of rewards and groups, are from all n rewards.  (eq:discarded)
    """
    groups = torch.cartesian_prod(*[torch.arange(len(R))] * n)                    # [Bⁿ, n]
    prompt = torch.arange(len(groups)).repeat_interleave(n)
    A = advantages(R[groups, 0].flatten(), prompt).reshape(groups.shape)
    each = pi.probs().detach()[groups].prod(-1, keepdim=True) * A / n

    count = torch.zeros_like(q).index_add(0, groups.flatten(), each.flatten())
    return exact_gradient(pi, (count * q) @ pi.log_probs().sum(-1))


def unpaid(seed: int, advantages: Callable[[Tensor, Tensor], Tensor], zero_one: bool) -> float:
    """Return the share of a group's gradient that is no multiple of any ∇E_π[q R + (1 − q) b].

    Responses of T tokens are discarded; the rewards are normal, or 1 where that is above 0.
    """
    pi, _, _, R = model(Policy, seed)
    R, q, p = ((R > 0).double() if zero_one else R), (~pi.mask[:, -1]).double(), pi.probs()
    found = in_groups(pi, R, q, advantages)
    pays = torch.stack([exact_gradient(pi, p @ x) for x in (q * R[:, 0], 1 - q)], -1)
    return off((pays @ torch.linalg.lstsq(pays, found[:, None]).solution)[:, 0], found)


def correlated(pi: Policy, noise: Tensor, correlation: float) -> Tensor:
    """Return rewards [B, 1] of mean 0 and deviation 1, so correlated with the response's length."""
    p = pi.probs().detach()

    def standard(x: Tensor) -> Tensor:
        return (x - p @ x) / (p @ (x - p @ x).square()).sqrt()

    z, noise = standard(pi.mask.sum(-1).double()), noise[:, 0]
    rest = standard(noise - (p * noise) @ z * z)
    return (correlation * z + (1 - correlation ** 2) ** 0.5 * rest)[:, None]


def shortest(pi: Policy, share: float | None) -> Tensor:
    """Return the chance to be kept, [B], if this share is dropped, the longest responses first.

    None drops all of T tokens.
    """
    p, length = pi.probs().detach(), pi.mask.sum(-1)
    shorter, equal = ((p * which).sum(-1) for which in (
        length < length[:, None], length == length[:, None]))
    return (length < pi.T).double() if share is None else (
        (1 - share - shorter) / equal).clamp(0, 1)


def selected(seed: int, correlation: float, share: float | None) -> tuple[float, float]:
    """Return what dropping the longest share does: the bias of E[R], and that of ∇J."""
    pi = Policy(4, 4, seed)
    R, lp = correlated(pi, rewards(pi, 3000 + seed), correlation), pi.log_probs().detach().sum(-1)
    found = survivors(pi, R, counts(lp, kept(lp, shortest(pi, share))))
    return found.baseline, off(found.gradient(pi, R), grad_J(pi, R))


# ------------------------------------------------------------------------------ chapter 16's tables

def cell(values: Sequence[float], exact: float = 0.0) -> str:
    """Write a mean and its standard error; what is exact in every model is bold."""
    if max(abs(x - exact) for x in values) < 1e-12:
        return f"**{exact:g}**"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


@cache
def sizes(of, kind: type[Policy]) -> dict[str, tuple[list[float], list[float]]]:
    """Return practice → its bias and its mean ρ, of every random model."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for pi, start, end, R in (model(kind, seed) for seed in range(MODELS)):
        wanted = grad_J(pi, R)
        for name, practice in of(pi, start, end, R).items():
            bias, rho = found.setdefault(name, ([], []))
            bias.append(off(practice.gradient(pi, R), wanted))
            rho.append(practice.rho)
    return found


def table(of):
    """Tabulate `crossing` or `overlong`: bias and mean ρ of each practice, for both models."""
    both = [sizes(of, Policy), sizes(of, Recurrent)]
    rows = [[name, *(cell(x[name][0]) if name in x else "–" for x in both),
             cell(both[1][name][1], exact=1.0)] for name in both[1]]
    return ["practice", "bias, tabular", "bias, shared weights", "E[ρ], shared weights"], rows


def selection(shares=(0.02, 0.05, 0.1, 0.2, None)):
    """Tabulate what dropping the longest does to the mean reward and to the gradient."""
    rows = []
    for correlation in (-0.6, 0.0, 0.6):
        found = [[*zip(*(selected(seed, correlation, share) for seed in range(MODELS)))]
                 for share in shares]
        rows += [[f"{correlation:g}", what, *(cell(x[i]) for x in found)]
                 for i, what in enumerate(("E[R], in standard deviations", "∇J, relative"))]
    return ["correlation of R and length", "bias of", *(
        "all of length T" if share is None else f"{100 * share:g} % dropped" for share in shares)
        ], rows
