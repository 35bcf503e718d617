"""Run the whole method on one page: three policies, four corrections, one loop.

A response has T = 3 tokens out of V = 3. All 27 can be listed, so that every expectation is a
finite sum. A policy is a table with a row of logits for each prefix. The sampler has the trainer's
table plus a fixed error on each logit, as an engine with rounded weights has. For each way of
treating that error this prints the exact bias of the first gradient, and the exact reward after
training on samples.

    python tiny.py                                                # torch alone; seconds
"""

import torch
from torch import Tensor

V, T = 3, 3
CLIP, CAP = 0.2, 2.0                                        # PPO's ε, and C of min(ρ, C)
CORRECTIONS = ("none", "token", "sequence", "bypass")
RESPONSES = torch.cartesian_prod(*[torch.arange(V)] * T)                               # [27, T]
REWARDS = ((RESPONSES[:, 0] + RESPONSES[:, 1]) % V == RESPONSES[:, 2]).double()        # a + b = c


# ---------------------------------------------------------------------------------- the policies

def rows_of(tokens: Tensor) -> Tensor:
    """Return the row of the table from which each token is drawn, one for each prefix: [B, T]."""
    rows = [torch.zeros_like(tokens[:, 0])]
    for t in range(1, T):
        rows.append(rows[-1] * V + tokens[:, t - 1] + 1)
    return torch.stack(rows, 1)


def log_probs(table: Tensor, tokens: Tensor) -> Tensor:
    """Return log π(y_t | y_<t) of each token: [B, T]."""
    return table[rows_of(tokens)].log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def probabilities(table: Tensor) -> Tensor:
    """Return π(y) of every response: [27]."""
    return log_probs(table, RESPONSES).sum(1).exp()


# -------------------------------------------------------------------------------- the correction

def importance_weights(old: Tensor, mu: Tensor, level: str) -> Tensor:
    """Return min(ρ, C), where ρ = π_old/μ of each token or of its whole response: [B, T]."""
    log_rho = old - mu
    if level == "none":
        return torch.ones_like(log_rho)
    if level == "sequence":
        log_rho = log_rho.sum(1, keepdim=True).expand_as(log_rho)
    return log_rho.exp().clamp(max=CAP)


def ppo(log_prob: Tensor, anchor: Tensor, advantages: Tensor) -> Tensor:
    """Return −min(rA, clip(r)A) of each token, with r = π_θ/anchor: [B, T]."""
    ratio = (log_prob - anchor).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def loss_of(log_prob: Tensor, old: Tensor, mu: Tensor, advantages: Tensor,
            correction: str) -> Tensor:
    """Return the loss of each response: [B].

    Decoupled PPO multiplies the terms by weights. Bypass mode takes μ for π_old instead.
    """
    if correction == "bypass":
        return ppo(log_prob, mu, advantages).sum(1)
    return (importance_weights(old, mu, correction) * ppo(log_prob, old, advantages)).sum(1)


# ---------------------------------------------------------------------- what is exact, and the loop

def bias(correction: str, error: Tensor) -> float:
    """Return ‖E_μ[gradient] − ∇J‖ / ‖∇J‖ for the first step, by listing every response."""
    table = torch.zeros_like(error, requires_grad=True)
    log_prob, mu = log_probs(table, RESPONSES), log_probs(error, RESPONSES)
    losses = loss_of(log_prob, log_prob.detach(), mu, REWARDS[:, None], correction)
    [found] = torch.autograd.grad(-(probabilities(error) * losses).sum(), table)
    [exact] = torch.autograd.grad((probabilities(table) * REWARDS).sum(), table)
    return ((found - exact).norm() / exact.norm()).item()


def train(correction: str, error: Tensor, steps: int = 100, samples: int = 128) -> Tensor:
    """Return the table after `steps` batches, with two updates on each, so that r leaves 1."""
    torch.manual_seed(0)
    table = torch.zeros_like(error, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=1.0)
    for _ in range(steps):
        sampler = table.detach() + error                                    # π_rollout = μ
        drawn = probabilities(sampler).multinomial(samples, replacement=True)
        tokens, rewards = RESPONSES[drawn], REWARDS[drawn]
        mu, old = log_probs(sampler, tokens), log_probs(table, tokens).detach()    # μ, π_old
        advantages = (rewards - rewards.mean())[:, None]

        for _ in range(2):
            log_prob = log_probs(table, tokens)                             # π_θ
            loss = loss_of(log_prob, old, mu, advantages, correction).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return table.detach()


def k3(error: Tensor) -> float:
    """Return the first policy's exact k3 per token from its sampler, E_μ[ρ − 1 − log ρ]."""
    log_rho = log_probs(torch.zeros_like(error), RESPONSES) - log_probs(error, RESPONSES)
    return (probabilities(error)[:, None] * (log_rho.expm1() - log_rho)).sum().item() / T


def main() -> None:
    noise = torch.randn(13, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for size in (0.1, 0.7):
        error = size * noise
        print(f"k3 = {k3(error):.4f} a token   gradient's bias   reward")
        for correction in CORRECTIONS:
            reward = (probabilities(train(correction, error)) * REWARDS).sum()
            print(f"  {correction:20} {bias(correction, error):16.3f} {reward:8.3f}")


if __name__ == "__main__":
    main()
