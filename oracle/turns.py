"""Enumerate what an agent with a tool is trained on, and one whose text is encoded again.

A tool's tokens stand in the policy's own tree: after the model writes CALL, the next token is the
tool's, whatever logits a policy has there. For spellings, tokens 1 to 4 are "a", "bc", "ab", "c":
1 2 and 3 4 both say "abc", and the encoder writes 3 4. A practice is (sampler, each response's
gradient, upwards [N, P], ρ of its first token [N]). Sizes are means over MODELS random models.
"""

import copy
from functools import cache
from math import nan
from types import SimpleNamespace

import torch

from three_policies.correction import Correction, importance_weights
from three_policies.kl import kl_estimate
from three_policies.losses import Counts, LossConfig, policy_loss
from three_policies.oracle import J, Policy, exact_gradient, expectation, rewards, scores
from three_policies.oracle.versions import cell, off
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import masked_log_ratio


CALL, MODELS, ONE = 1, 20, torch.ones(())
REINFORCE = Config(bypass_mode=True, loss_type="reinforce")


def with_logits(policy, logits):
    other = copy.copy(policy)
    other.logits = logits
    return other


def study(pi, acts, R, **more):
    """Return what a practice needs of π, whose rewards R come when it acts as `acts` does."""
    value = J(acts, R)
    return SimpleNamespace(pi=pi, acts=acts, R=R, mask=pi.mask, g=scores(pi), **more,
                           lp=pi.log_probs().detach(), A=R - value.detach(),
                           target=exact_gradient(pi, value))


def rho(lp, mu_lp, counted, level="sequence", cap=torch.inf):
    """Return the weights made of the counted tokens, 0 on all others: [N, T]."""
    return importance_weights(masked_log_ratio(lp, mu_lp, counted), counted, level, cap)


def trained(lp, A, mask, g, weights, how="seq-mean-token-sum"):
    """Return each response's gradient of `policy_loss` with this mask and these weights: [N, P].

    (eq:trajectory, eq:tool-mask, eq:tool-ratio, eq:tool-length, eq:context, eq:respelled)
    """
    lp = lp.detach().requires_grad_()
    loss, _ = policy_loss(lp, None, lp.detach(), A, mask, REINFORCE, LossConfig(aggregation=how),
                          correction=Correction(weights, mask), counts=Counts(ONE, ONE))
    return torch.einsum("nt,ntp->np", -torch.autograd.grad(loss, lp)[0], g)


def tool_tokens(policy):
    """Find the tokens that the tool wrote, one after each CALL of the model: [N, T]."""
    tool = torch.zeros_like(policy.mask)
    for t in range(1, policy.T):
        tool[:, t] = (policy.tokens[:, t - 1] == CALL) & ~tool[:, t - 1] & policy.mask[:, t]
    return tool


@cache
def agent(seed, V=3, T=5, certain=False):
    """Return π, μ and π_ref, alone and with the tool P in their tree (`acts`, `draws`, `aims`).

    A `certain` tool has one output for each history, the likeliest of P.
    """
    pi, tool = Policy(V, T, seed), Policy(V, T, seed + 500).logits.detach()
    if certain:
        tool = torch.where(tool == tool.max(-1, keepdim=True).values, tool, -torch.inf)
    mu, ref = (pi.perturbed(seed + step, 0.5) for step in (100, 200))
    written = tool_tokens(pi)
    rows = pi.states[written].unique()
    acts, draws, aims = (with_logits(p, p.logits.index_put((rows,), tool[rows]))
                         for p in (pi, mu, ref))
    return study(pi, acts, rewards(pi, seed + 300), mu=mu, draws=draws, aims=aims,
                 written=written, own=pi.mask & ~written, ref=ref.log_probs().detach())


def tool_practices(x):
    """Return by name what is done about the tokens of an agent's tool."""
    mu_lp, turn, found = x.draws.log_probs().detach(), x.written.cumsum(-1), {}
    stands = {"log μ = 0": torch.zeros_like(mu_lp), "ρ = 1": x.lp, "log P": mu_lp,
              "μ's own score": x.mu.log_probs().detach()}
    stands = {name: torch.where(x.written, there, mu_lp) for name, there in stands.items()}
    found["model tokens alone, sequence ρ"] = x.own, rho(x.lp, mu_lp, x.own)
    found["model tokens alone, ρ of each turn"] = x.own, sum(
        rho(x.lp, mu_lp, x.own & (turn == k)) for k in range(x.pi.T))
    found["model tokens alone, token ρ"] = x.own, rho(x.lp, mu_lp, x.own, "token")
    found["model tokens alone, ρ := 1"] = x.own, x.own.double()
    for name in ("ρ = 1", "log μ = 0"):
        found[f"in the mask, {name} there"] = x.mask, rho(x.lp, stands[name], x.mask)
    for name in ("log μ = 0", "μ's own score", "log P"):
        found[f"in ρ alone, {name} there"] = x.own, rho(x.lp, stands[name], x.mask) * x.own
    return {name: (x.draws, trained(x.lp, x.A, mask, x.g, w), w[:, 0])
            for name, (mask, w) in found.items()}


def log_p_in_rho(x):
    """Return the gradient if ρ counts the tool's tokens with log P, and its E[ρ].

    Between them stand the gradients where π plays the tool, E_π[1[P(o) > 0] f] and E_π[f]: the
    first is what is found for any P, the second if P > 0 wherever π is.  (eq:tool-ratio)
    """
    weights = rho(x.lp, x.draws.log_probs(), x.mask)[:, :1]
    found, of_pi = (trained(x.lp, x.A, x.own, x.g, w * x.own) for w in (weights, x.own.double()))
    comes = (x.acts.probs() > 0)[:, None]
    return (expectation(x.draws, found), expectation(x.pi, of_pi * comes),
            expectation(x.pi, of_pi), expectation(x.draws, weights).item())


def tool_changes(x):
    """Return by name (counted, left out): what it changes to count the tool's tokens.

    (eq:tool-length, eq:tool-kl)
    """
    mu_lp, counts = x.draws.log_probs().detach(), (x.mask, x.own)

    def mean(sampler, values):                                   # over the tokens that are counted
        return [(expectation(sampler, (values * m).sum(-1))
                 / expectation(sampler, m.double().sum(-1))) for m in counts]

    of_mean, geometric, k2 = (
        [trained(x.lp, x.A, m, x.g, x.own.double(), "seq-mean-token-mean") for m in counts],
        [trained(x.lp, x.A, x.own, x.g, x.own * rho(x.acts.log_probs(), mu_lp, m, "geometric"))
         for m in counts],                                       # ρ = 1 at the tool's tokens
        [torch.einsum("nt,ntp->np", (x.lp - x.ref) * m, x.g) for m in counts])
    k3, logged = (kl_estimate(*pair, "k3") for pair in (
        (x.lp, x.ref), (torch.where(x.written, 0.0, mu_lp), x.lp)))
    return {"in the 1/|y| of a mean (GSPO at r = 1)": [expectation(x.draws, g) for g in of_mean],
            "in the 1/|y| of a geometric ρ": [expectation(x.draws, g) for g in geometric],
            "in k3 to π_ref, its gradient": [expectation(x.acts, g) for g in k2],
            "in k3 to π_ref, its mean": mean(x.acts, k3),
            "in the logged k3 of μ and π, log μ = 0": mean(x.draws, logged)}


def spell(y):
    """Encode the text of tokens again: each "a" "bc" becomes "ab" "c"."""
    pairs = [t for t in range(len(y) - 1) if y[t:t + 2] == (1, 2)]
    return tuple(3 if t in pairs else 4 if t - 1 in pairs else v for t, v in enumerate(y))


def writer(seed, rare, V=5, T=3):
    """Return π, μ, z and `again`; the smaller `rare`, the fewer responses are not spelled so.

    z [N]: for each response, the one that its text is encoded as, which has its reward. `again`
    [S]: for each row of logits, that of its history encoded again.
    """
    pi = Policy(V, T, seed)
    y = [tuple(tokens[m].tolist()) for tokens, m in zip(pi.tokens, pi.mask)]
    row = {whole[:t]: at[t] for whole, at in zip(y, pi.states.tolist()) for t in range(len(whole))}
    after_a, after_ab = ([s for h, s in row.items() if h[-1:] == (v,)] for v in (1, 3))
    with torch.no_grad():
        pi.logits[:, 3] += 1
        pi.logits[after_ab, 4] += 2                              # many texts have "abc"
        pi.logits[after_a, 2] += rare
    z = torch.tensor([y.index(spell(whole)) for whole in y])
    again = torch.tensor([row[spell(h)] for h in sorted(row, key=row.__getitem__)])
    return study(pi, pi, rewards(pi, seed + 300)[z], mu=pi.perturbed(seed + 100, 0.5), z=z,
                 again=again, same=(z == torch.arange(len(z)))[:, None])


def spelling_practices(x):
    """Return by name what is done when histories or responses are encoded again."""
    fed, z, mu_lp = with_logits(x.mu, x.mu.logits[x.again]), x.z, x.mu.log_probs().detach()

    def scored(sampler, lp, recorded, at=..., mask=x.mask, cap=torch.inf):
        w = rho(lp, recorded, mask, cap=cap)
        return sampler, trained(lp, x.A[at], mask, x.g[at], w), w[:, 0]

    return {"context, log μ as it was drawn": scored(fed, x.lp, fed.log_probs().detach()),
            "context, log μ scored on the kept ids": scored(fed, x.lp, mu_lp),
            "response, π and μ scored anew": scored(x.mu, x.lp[z], mu_lp[z], z),
            "response, log μ as it was drawn": scored(x.mu, x.lp[z], mu_lp, z),
            "the same, truncated at 2": scored(x.mu, x.lp[z], mu_lp, z, cap=2.0),
            "such responses dropped": scored(x.mu, x.lp, mu_lp, mask=x.mask & x.same)}


# ------------------------------------------------------------------------------ chapter 17's tables

def sizes(x, practice):
    """Return bias and standard deviation of a practice, in units of |∇J|, and E[ρ]."""
    sampler, gradients, weight = practice
    mean = expectation(sampler, gradients)
    variance = expectation(sampler, (gradients - mean).square().sum(-1))
    return (off(mean, x.target), (variance.sqrt() / x.target.norm()).item(),
            expectation(sampler, weight).item())


def columns(studies, practices):
    """Return practice → cells: bias ± standard error, standard deviation, E[ρ]; all are means."""
    found = [{name: sizes(x, each) for name, each in practices(x).items()} for x in studies]
    return {name: [cell(values, exact).split(" ±")[0] if i else cell(values, exact)
                   for i, (values, exact) in enumerate(zip(
                       zip(*(one[name] for one in found)), (0, nan, 1)))] for name in found[0]}


def of_tools():
    """Tabulate what is done about a tool's tokens."""
    found = columns(map(agent, range(MODELS)), tool_practices)
    return ["practice", "bias", "std", "E[ρ]"], [[name, *row] for name, row in found.items()]


def of_lengths():
    """Tabulate what a tool's tokens change in a length and in a KL."""
    found = [tool_changes(agent(seed)) for seed in range(MODELS)]
    values = {name: [off(*one[name]) if one[name][0].ndim else (one[name][0] / one[name][1]).item()
                     for one in found] for name in found[0]}
    return ["the tool's tokens counted", "change"], [
        [name, ("× " if found[0][name][0].ndim == 0 else "") + cell(x)]
        for name, x in values.items()]


def of_spelling(rare=(-2.4, 1.0)):
    """Tabulate what is done about text encoded again, by the share of responses that it changes."""
    header, found = ["encoded again"], []
    for each in rare:
        studies = [writer(seed, each) for seed in range(MODELS)]
        share = sum(x.mu.probs().detach() @ (~x.same[:, 0]).double() for x in studies) / MODELS
        header += [f"{name}, {100 * share:.0f} %" for name in ("bias", "std", "E[ρ]")]
        found.append(columns(studies, spelling_practices))
    return header, [[name, *found[0][name], *found[1][name]] for name in found[0]]
