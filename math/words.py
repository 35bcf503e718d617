"""The second study's task in the oracle's world: all strings of eight brackets, exactly.

A tabular policy over brackets has one row of logits for each beginning; 256 strings are all there
are, 13 of them words within depth 3. Where one bracket is possible it errs with one small chance,
else it throws a coin: the state after the warm start. Nothing is sampled: what an arm's update is
in expectation over μ, and where forty of them end, are finite sums in float64.

    python math/words.py       # the prediction that was committed with study-64.yaml
"""

import copy
import itertools
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

import torch
import yaml
from oracle import Policy, exact_gradient

from adapters.dialects import from_dialect
from correction import correct
from losses import LossConfig, policy_loss
from plumbing.tasks import balanced, next_brackets

LENGTH, DEPTH = 8, 3                                   # brackets; most open at once
PREDICTED, SHOWN = 8, 16  # damaged policies that the prediction, the chapter averages over


class Words(Policy):
    """`copies` policies side by side over all strings of brackets, "(" being token 0."""

    def __init__(self, copies=1, error=0.17):
        self.V, self.T, self.copies = 2, LENGTH, copies
        strings = ["".join(x) for x in itertools.product("()", repeat=LENGTH)]
        row = {string[:t]: 0 for t in range(LENGTH) for string in strings}
        row = {beginning: i for i, beginning in enumerate(row)}
        states = torch.tensor([[row[s[:t]] for t in range(LENGTH)] for s in strings])
        self.tokens = torch.tensor([[int(b == ")") for b in s] for s in strings]).repeat(copies, 1)
        self.states = torch.cat([states + i * len(row) for i in range(copies)])
        self.mask = torch.ones_like(self.tokens, dtype=torch.bool)
        right = [float(balanced(s, DEPTH)) for s in strings]
        self.reward = torch.tensor(right, dtype=torch.float64).repeat(copies)
        # of "(", where these brackets are possible
        chance = {"(": 1 - error, ")": error, "()": 0.5}
        chances = [chance.get(next_brackets(b, LENGTH - len(b), DEPTH), 0.5) for b in row]
        first = torch.tensor(chances, dtype=torch.float64).repeat(copies)
        self.logits = torch.stack([first.log(), (1 - first).log()], -1).requires_grad_()

    def moved(self, by):
        other = copy.copy(self)
        other.logits = (self.logits + by).detach().requires_grad_()
        return other

    def value(self):
        """P(right) of each copy: [copies]"""
        return (self.probs() * self.reward).reshape(self.copies, -1).sum(-1)


@cache
def start(copies):
    return Words(copies)


@cache
def damage(copies):
    """What rounding adds to the logits, for a size of 1: normal, one draw for each row and copy."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(start(copies).logits.shape, generator=generator, dtype=torch.float64)


def chi2(pi, mu):
    """Of whole strings: E_μ[(π/μ)²] − 1, mean over the copies."""
    square = mu.probs() * (pi.log_probs().sum(-1) - mu.log_probs().sum(-1)).exp().square()
    return square.reshape(pi.copies, -1).sum(-1).mean().item() - 1


@cache
def damage_with(wanted, copies):
    """The size at which χ² of whole strings is what was measured."""
    (low, high), pi = (0.0, 2.0), start(copies)
    for _ in range(30):
        middle = (low + high) / 2
        found = chi2(pi, pi.moved(middle * damage(copies)))
        low, high = (middle, high) if found < wanted else (low, middle)
    return high


def expected(config, theta, old, mu, **clip):
    """E_μ of an arm's gradient (ascent) [copies, P], and the standard deviation
    of one response's [copies]."""
    chances, lp = mu.probs().detach(), theta.log_probs()
    old_lp, mu_lp = old.log_probs().detach(), mu.log_probs().detach()

    def of_each(values):
        return (chances * values).reshape(theta.copies, -1).sum(-1)

    mean_reward = of_each(theta.reward)
    advantages = theta.reward - mean_reward.repeat_interleave(len(chances) // theta.copies)
    advantages = advantages[:, None].expand(-1, LENGTH)
    correction = correct(lp if config.bypass_mode else old_lp, mu_lp, theta.mask, config,
                         advantages)
    loss, _ = policy_loss(lp, old_lp, mu_lp, advantages, theta.mask, config,
                          LossConfig(aggregation="seq-mean-token-sum", **clip),
                          correction=correction)
    # B·loss: a sum over rows
    per_token = -len(lp) * torch.autograd.grad(loss, lp, retain_graph=True)[0]
    (mean,) = torch.autograd.grad(lp, theta.logits, per_token * chances[:, None])
    mean = mean.reshape(theta.copies, -1)
    score_norm = 2 * (1 - lp.detach().exp()).square()  # |onehot − p|², V = 2
    variance = of_each((per_token.square() * score_norm).sum(-1)) - mean.square().sum(-1)
    return mean, variance.sqrt()


def true_gradient(theta):
    return exact_gradient(theta, theta.value().sum()).reshape(theta.copies, -1)


def ascend(config, copies, size=0.0, lag=0, updates=40, rate=4.0, **clip):
    """P(right) of each copy after every step of two updates; μ = π of
    `lag` steps ago + size·damage."""
    theta, path, values = start(copies), [], []
    for _ in range(updates // 2):
        path.append(theta.logits.detach())
        values.append(theta.value().detach())
        old, mu = theta, theta.moved(path[max(0, len(path) - 1 - lag)] - path[-1] + size
                                     * damage(copies))
        for _ in range(2):
            mean = expected(config, theta, old, mu, **clip)[0]
            theta = theta.moved(rate * mean.reshape(theta.logits.shape))
    return torch.stack([*values, theta.value().detach()])


def arm(name):
    """The configuration and the clip of an arm of study-64.yaml."""
    methods = yaml.safe_load((ROOT / "math" / "study-64.yaml").read_text())["methods"]
    given = methods.get(name, {"correction.preset": name})
    correction = {key.removeprefix("correction."): yaml.safe_load(str(value))
                  for key, value in given.items()
                  if key.startswith("correction.")}
    clip: dict[str, Any] = {key.removeprefix("loss."): float(value) for key, value in given.items()
            if key.startswith("loss.clip")}
    return from_dialect(correction), clip


ARMS = ["matched", "naive", "decoupled_token_is", "decoupled_seq_is", "token_is_opsm",
        "decoupled_k3_rs",
        "bypass_pg_is", "bypass_ppo_clip", "bypass_low_open", "bypass_high_open", "bypass_open"]
# χ² of a response at int4: a token's on seed 0 without training, for 65 tokens
MEASURED = 1.0185 ** 65 - 1


def first_step(name, size):
    """Return what one update with μ damaged by `size` leaves of ∇J, its bias and deviation.

    All three are in units of |∇J|; the deviation is that of a single response.
    """
    (config, clip), pi = arm(name), start(PREDICTED)
    target = true_gradient(pi)
    found, deviation = expected(config, pi, pi, pi.moved(size * damage(PREDICTED)), **clip)
    along = (found * target).sum() / target.square().sum()
    size = target.norm()
    return along.item(), ((found - target).norm() / size).item(), (deviation.norm() / size).item()


def prediction():
    """Each arm where μ is a damaged π and where it is an old one: its first
    update, and where forty end."""
    rows = []
    for name in ARMS:
        config, clip = arm(name)
        size, lag = (0.0, 0) if name == "matched" else (damage_with(MEASURED, PREDICTED), 4)
        left, bias, deviation = first_step(name, size)
        ends = [ascend(config, PREDICTED, size, **clip)[-1],
                ascend(config, PREDICTED, lag=lag, **clip)[-1]]
        rows.append([f"`{name}`", f"{left:+.2f}", f"{bias:.2f}", f"{deviation:.1f}",
                     f"{(bias ** 2 + deviation ** 2 / 256) ** 0.5:.2f}",
                     *(f"{x.mean():.2f}" for x in ends)])
    return ["arm", "damaged μ: of ∇J left", "bias", "deviation", "error of 256",
            "P(right) in the end",
            "late μ: P(right) in the end"], rows


# ------------------------------------------------------------------- why bypass dies on a damaged μ

CLIPS = {"`bypass_ppo_clip`": ("bypass_ppo_clip", {}), "`bypass_low_open`": ("bypass_low_open", {}),
         "`bypass_high_open`": ("bypass_high_open", {}), "`bypass_open`": ("bypass_open", {}),
         "`bypass_ppo_clip`, dual clip 3": ("bypass_ppo_clip", {"dual_clip": 3.0}),
         "`naive`": ("naive", {}),
         "`decoupled_token_is`": ("decoupled_token_is", {})}


def push(name, error, of_mu, rest=0.5, **more):
    """d(log-odds of the right bracket) at one forced place, by its true value: π
    errs by `error`, μ by `of_mu`.

    Three cases are all there are: wrong; right, and the rest of the word right (with chance
    `rest`); right, but the rest wrong. π_old = π_θ.
    """
    config, clip = arm(name)
    odds = torch.tensor(1 / error - 1, dtype=torch.float64).log().requires_grad_()
    right, reward = torch.tensor([False, True, True]), torch.tensor([0.0, 1.0, 0.0],
                                                                    dtype=torch.float64)
    lp = torch.where(right, odds, -odds).sigmoid().log()[:, None]
    mu = torch.tensor([of_mu, 1 - of_mu, 1 - of_mu], dtype=torch.float64)
    chances = mu * torch.tensor([1, rest, 1 - rest], dtype=torch.float64)
    # the loss is homogeneous in A: 3 rows' mean
    advantages = (3 * chances * (reward - chances @ reward))[:, None]
    how = LossConfig(aggregation="seq-mean-token-sum", **clip, **more)
    loss, _ = policy_loss(lp, lp.detach(), mu.log()[:, None], advantages, torch.ones(3, 1), config,
                          how)
    return -torch.autograd.grad(loss, odds)[0].item() / (rest * error * (1 - error))


def pushes(error=0.025):
    """Write how hard an update pushes towards the one bracket that is right.

    A row is a chance with which μ errs there.
    """
    rows = [[f"{of_mu:g}", *(f"{push(name, error, of_mu, **more):+.2f}"
                             for name, more in CLIPS.values())]
            for of_mu in (0.005, 0.02, 0.025, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3)]
    return [f"μ errs by (π: {error:g})", *CLIPS], rows


def ends():
    """Exact ascent with either end of the clip: mean P(right), and how many of the
    policies end below their start."""
    rows = []
    for what, (name, more) in CLIPS.items():
        config, clip = arm(name)
        found = [ascend(config, SHOWN, size, lag, **clip, **more)
                 for size, lag in ((0.3, 0), (0.6, 0), (0.9, 0), (0.0, 4))]
        rows.append([what, *(f"{v[-1].mean():.2f}, {(v[-1] < v[0]).sum()}" for v in found)])
    return ["", *(f"Δ = {size:g}" for size in (0.3, 0.6, 0.9)), "four steps late"], rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in [prediction()[0], *prediction()[1]]:
        print(" | ".join(line))
