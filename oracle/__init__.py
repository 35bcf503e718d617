"""The oracle: policies small enough that every expectation is a finite sum.

A tabular softmax policy over V tokens (token 0 ends the sequence) of at most T tokens has few
sequences: 15 for V = T = 3. Each is enumerated, so an expectation, a bias, a variance or a gradient
is exact to rounding, in float64, without a seed: "unbiased" means equal, "biased" is a number.

    pi = Policy(3, 3, seed=0); mu = pi.perturbed(seed=1, size=0.5); R = rewards(pi, seed=2)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()                       # [B, T] each
    exact = estimator_moments(pi, mu, lambda i: any_loss(lp[i], mu_lp[i], R[i], pi.mask[i]))
    exact.mean, exact.variance, exact.bias(-grad_J(pi, R))

`i` is a tensor of one index, so that `lp[i]` is a batch [1, T]; with `batch=2` it has two indices,
and all B² pairs are enumerated. Gradients are flat tensors [P] with respect to the logits.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Policy:
    """A tabular policy π(y) = Π_t softmax(logits[prefix])[y_t] has a row of logits per prefix.

    tokens, mask, states [B, T]: all sequences (0 on padding), 1 where there is a token (the end
    token included), and the row of logits that each token was drawn from. logits [S, V]: a leaf.
    """

    def __init__(self, V: int = 3, T: int = 3, seed: int = 0, scale: float = 1.0):
        self.V, self.T = V, T
        generator = torch.Generator().manual_seed(seed)
        prefixes: list[tuple[int, ...]] = [()]
        sequences: list[tuple[int, ...]] = []
        for prefix in prefixes:                                     # grows while it is walked
            for token in range(V):
                longer = (*prefix, token)
                (prefixes if token and len(longer) < T else sequences).append(longer)
        row = {prefix: index for index, prefix in enumerate(prefixes)}
        pad = [0] * T
        self.tokens = torch.tensor([[*y, *pad][:T] for y in sequences])
        self.mask = torch.tensor([[t < len(y) for t in range(T)] for y in sequences])
        self.states = torch.tensor([[row[y[:t]] if t < len(y) else 0 for t in range(T)]
                                    for y in sequences])
        logits = scale * torch.randn(len(prefixes), V, generator=generator, dtype=torch.float64)
        self.logits = logits.requires_grad_()

    def perturbed(self, seed: int = 1, size: float = 0.5) -> "Policy":
        """Return another policy near this one: each logit moves by a normal number times `size`."""
        other = type(self)(self.V, self.T, seed, size)
        other.logits = (self.logits.detach() + other.logits.detach()).requires_grad_()
        return other

    def step_log_probs(self) -> Tensor:
        """Return log π(v | prefix) of every state and token, [S, V], differentiable."""
        return self.logits.log_softmax(-1)

    def log_probs(self) -> Tensor:
        """Return log π(y_t | y_<t) of every sequence, [B, T], differentiable, 0 on padding."""
        return torch.where(self.mask, self.step_log_probs()[self.states, self.tokens], 0.0)

    def probs(self) -> Tensor:
        """Return π(y) of every sequence, [B], differentiable; they add up to 1."""
        return self.log_probs().sum(-1).exp()


def rewards(policy: Policy, seed: int = 2) -> Tensor:
    """Return one arbitrary reward per sequence, [B, 1], to be broadcast over its tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(policy.tokens), 1, generator=generator, dtype=torch.float64)


def expectation(mu: Policy, values: Tensor) -> Tensor:
    """Return E_μ[f] = Σ_y μ(y) f(y): [B, …] → […]. No gradient goes through μ's probabilities."""
    return torch.einsum("n,n...->...", mu.probs().detach(), values)


def exact_gradient(policy: Policy, scalar: Tensor) -> Tensor:
    """Return ∇ of a scalar with respect to the policy's logits, flat [P]."""
    return torch.autograd.grad(scalar, policy.logits, retain_graph=True)[0].flatten()


def scores(policy: Policy) -> Tensor:
    """Return ∇log π(y_t | y_<t) of every token of every sequence, [B, T, P], 0 on padding."""
    flat = policy.log_probs().flatten()
    each = torch.eye(len(flat), dtype=flat.dtype)
    rows = torch.autograd.grad(flat, policy.logits, each, is_grads_batched=True)[0]
    return rows.reshape(*policy.mask.shape, -1)


def J(policy: Policy, reward: Tensor) -> Tensor:
    """Return the objective J = E_π[R], differentiable: the sum itself, not an estimator of it."""
    return (policy.probs() * reward.squeeze(-1)).sum()


def grad_J(policy: Policy, reward: Tensor) -> Tensor:
    return exact_gradient(policy, J(policy, reward))


def kl(p: Policy, q: Policy) -> Tensor:
    """Return KL(p‖q) over sequences, differentiable in both.

    kl(π, ref) is the reverse KL, kl(ref, π) the forward one.
    """
    log_p = p.log_probs()
    return (log_p.sum(-1).exp() * (log_p - q.log_probs()).sum(-1)).sum()


def token_kl(p: Policy, q: Policy, visits: Policy) -> Tensor:
    """Return Σ_t E_visits[KL(p(·|y_<t)‖q(·|y_<t))]: the exact KL of each step, visits frozen.

    token_kl(p, q, p) has the value of kl(p, q). Its gradient ignores that p changes the visits: it
    is the per-token part of the gradient, with the visited states held fixed.
    """
    log_p, log_q = p.step_log_probs(), q.step_log_probs()
    step = (log_p.exp() * (log_p - log_q)).sum(-1)                                     # [S]
    return expectation(visits, torch.where(visits.mask, step[visits.states], 0.0).sum(-1))


class Moments(NamedTuple):
    """Moments of a gradient estimator are its mean [P], its variance (a trace) and every value."""

    mean: Tensor
    variance: Tensor
    gradients: Tensor                                               # [B^batch, P]

    def bias(self, target: Tensor) -> Tensor:
        return self.mean - target


def estimator_moments(policy: Policy, mu: Policy, loss, batch: int = 1) -> Moments:
    """Return mean and variance of ∇loss(i), where μ draws the sequence i (or `batch` of them)."""
    grids = torch.meshgrid(*[torch.arange(len(mu.tokens))] * batch, indexing="ij")
    batches = torch.stack(grids, -1).reshape(-1, batch)                       # [B^batch, batch]
    prob = mu.probs().detach()[batches].prod(-1)
    gradients = torch.stack([exact_gradient(policy, loss(i)) for i in batches])
    mean = prob @ gradients
    return Moments(mean, prob @ (gradients - mean).square().sum(-1), gradients)


def close(value, expected, tolerance: float = 1e-12) -> bool:
    """True if two results agree to rounding, relative to the largest number (or 1)."""
    value, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (value, expected))
    limit = tolerance * max(1.0, expected.abs().max().item())
    return value.shape == expected.shape and bool(((value - expected).abs() <= limit).all())


class MarkovPolicy:
    """A Markov policy has too many sequences to enumerate (16^12), but an exact J.

    The next token depends on the last one alone, and the reward is Σ_t values[y_t], so that J is a
    recursion over T steps. logits [V, V]: row 0 is the start (token 0 ends: it is never the last).
    """

    def __init__(self, V: int = 16, T: int = 12, seed: int = 0, scale: float = 1.0):
        self.V, self.T = V, T
        generator = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(V, V, generator=generator, dtype=torch.float64)
        self.logits = logits.requires_grad_()

    perturbed = Policy.perturbed

    def sample(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Sample n sequences: tokens [n, T] and mask [n, T]."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.zeros(n, self.T + 1, dtype=torch.long)       # the first column is the start
        mask, alive = torch.zeros(n, self.T, dtype=torch.bool), torch.ones(n, dtype=torch.bool)
        for t in range(self.T):
            probs = self.logits.detach().softmax(-1)[tokens[:, t]]
            drawn = probs.multinomial(1, generator=generator)
            tokens[:, t + 1], mask[:, t] = torch.where(alive, drawn.squeeze(-1), 0), alive
            alive = tokens[:, t + 1] > 0
        return tokens[:, 1:], mask

    def log_probs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        previous = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], -1)
        return torch.where(mask, self.logits.log_softmax(-1)[previous, tokens], 0.0)

    def J(self, values: Tensor) -> Tensor:
        """Return E_π[Σ_t values[y_t]], from a last token's value with t steps left, t = 1 … T."""
        p, value = self.logits.softmax(-1), torch.zeros_like(values)
        for _ in range(self.T):
            value = p @ (values + torch.where(torch.arange(self.V) > 0, value, 0.0))
        return value[0]
