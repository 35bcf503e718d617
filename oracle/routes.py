"""Enumerate mixtures of experts so small that every response, route and gradient is exact.

A model has two layers of four experts, and a router takes two of them for each token; before a
layer, a token reads the mean of the tokens so far. Prompt and responses are the nodes of one tree.
Routes are a table [LAYERS, nodes, CHOSEN], since what a router chooses is a function of the prefix.
There is no shared expert, no load balancing and no capacity, except where each expert chooses its
tokens: then a route depends on later tokens, and no table has it (chapter 18).
"""

from functools import cache
from statistics import mean, median, stdev

import torch
from torch.func import grad, jacrev, vmap

from three_policies.correction import importance_weights
from three_policies.oracle import Policy, rewards


TREE, PROMPT = Policy(V=3, T=4), 2                  # 31 responses to a prompt of two tokens
LAYERS, EXPERTS, CHOSEN, WIDTH = 2, 4, 2, 6
WEIGHTS = {"embed": ((PROMPT + TREE.V, WIDTH), 0.5), "mix": ((LAYERS, WIDTH, WIDTH), 0.2),
           "router": ((LAYERS, WIDTH, EXPERTS), 1.0),
           "experts": ((LAYERS, EXPERTS, WIDTH, WIDTH), 2.0), "head": ((WIDTH, TREE.V), 1.0)}


def draw(seed):
    """Return a random model, {name: weights}, with the shapes and scales of WEIGHTS."""
    g = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=g, dtype=torch.float64)
            for name, (shape, scale) in WEIGHTS.items()}


def nearby(model, noise, seed):
    """Return the sampler's weights: the model's plus `noise` times another's, or in float8."""
    if noise == "float8":
        return {name: x.to(torch.float8_e4m3fn).double() for name, x in model.items()}
    return {name: model[name] + noise * x for name, x in draw(seed).items()}


def nodes():
    """Return each node's token, the node before it, and the shares [nodes, nodes] of its mean.

    Nodes 0 and 1 are the prompt. Node s + 1 is the last token before state s of the responses.
    """
    token, before = [0, 1] + [0] * (len(TREE.logits) - 1), [0] * (len(TREE.logits) + 1)
    for y, state, mask in zip(TREE.tokens.tolist(), TREE.states.tolist(), TREE.mask.tolist()):
        for t in range(1, sum(mask)):
            token[state[t] + 1], before[state[t] + 1] = PROMPT + y[t - 1], state[t - 1] + 1
    way = torch.eye(len(token), dtype=torch.float64)
    for node in range(1, len(token)):
        way[node] += way[before[node]]
    return torch.tensor(token), torch.tensor(before), way / way.sum(-1, keepdim=True)


TOKEN, BEFORE, MEAN = nodes()


def live(score, route, layer):
    """Return the gates of R3: the trainer's own scores of the experts on the route."""
    return score.gather(-1, route)


def frozen(gates):
    """Replay the sampler's gates, too: ρ = 1 where only routers differ.  (eq:replay-gates)"""
    return lambda score, route, layer: gates[layer]


def zeroed(score, route, layer):
    """Plant an error: gather from scores that are zero outside the trainer's own choice."""
    own = score.topk(CHOSEN).indices
    return torch.zeros_like(score).scatter(-1, own, score.gather(-1, own)).gather(-1, route)


def forward(model, routes=None, gate=live):
    """Return log π(v | state), [states, V], and the routes and gates taken.  (eq:route-replay)

    `routes`: a table to replay; None: the router's own. `gate`: what multiplies an expert.
    """
    h, taken, gates = model["embed"][TOKEN], [], []
    for layer in range(LAYERS):
        h = h + MEAN @ h @ model["mix"][layer]
        score = (h @ model["router"][layer]).softmax(-1)
        own = score.topk(CHOSEN).indices.sort().values
        taken.append(own if routes is None else routes[layer])
        gates.append(gate(score, taken[-1], layer))
        experts = torch.einsum("nd,nkde->nke", h, model["experts"][layer][taken[-1]]).tanh()
        h = h + (gates[-1][..., None] * experts).sum(1)
    return (h[1:] @ model["head"]).log_softmax(-1), torch.stack(taken), torch.stack(gates)


def ahead(routes):
    """Return a table for each response in which a token replays the next one's.  (eq:route-ahead)

    Such a route has seen the token that it scores. The last token keeps its own route.
    """
    tables = routes.repeat(len(TREE.tokens), 1, 1, 1)
    for table, state, length in zip(tables, TREE.states, TREE.mask.sum(-1)):
        table[:, 0], table[:, state[:length - 1] + 1] = routes[:, 1], routes[:, state[1:length] + 1]
    return tables


EVERY = torch.arange(EXPERTS).expand(LAYERS, len(TOKEN), -1)              # replay all experts


def expert_choice(model, places=2):
    """Return log π(y_t | y_<t) of every response, [B, T], if each expert chooses its best tokens.

    The tokens of a response, later ones included, compete for the expert's places, so that the
    probabilities of the responses do not add up to 1 (eq:route-ahead).
    """
    found = []
    for y, (states, mask) in enumerate(zip(TREE.states, TREE.mask)):
        read = torch.cat([torch.arange(PROMPT), states[mask][1:] + 1])      # the response's nodes

        def chosen(score, route, layer, read=read):
            best = read[score[read].topk(places, dim=0).indices]            # [places, EXPERTS]
            return torch.zeros_like(score).scatter(0, best, score.gather(0, best))

        found.append(log_probs(model, EVERY, chosen)[y])
    return torch.stack(found)


def log_probs(model, routes=None, gate=live):
    """Return log π(y_t | y_<t) of every response, [B, T]; `routes` may have a table for each."""
    if routes is None or routes.dim() == 3:
        steps = forward(model, routes, gate)[0].expand(len(TREE.tokens), -1, -1)
    else:
        steps = vmap(lambda table: forward(model, table, gate)[0])(routes)
    row = torch.arange(len(TREE.tokens))[:, None]
    return torch.where(TREE.mask, steps[row, TREE.states, TREE.tokens], 0.0)


def flat(gradient):
    return torch.cat([x.flatten() for x in gradient.values()])


def J(model, reward, routes=None):
    """Return E_π[R]: differentiable in the weights, of which the routes are a step function."""
    return log_probs(model, routes).sum(-1).exp() @ reward


def targets(theta, sampler, reward):
    """Return T1, ∇J of the trainer with its own routes, and T2, the sampler's, flat [P].

    (eq:replay-targets)
    """
    return [flat(grad(J)(model, reward)) for model in (theta, sampler)]


def coefficients(lp, mu_lp, reward, level=None):
    """Return w_t A of every token, [B, T], detached; A = R − E_μ[R], and weights have no cap."""
    advantage = (reward - mu_lp.sum(-1).exp() @ reward)[:, None] * TREE.mask
    return advantage * (1 if level is None else importance_weights(
        lp - mu_lp, TREE.mask, level, torch.inf))


def expected(theta, mu_lp, reward, level=None, routes=None, gate=live):
    """Return E_μ[Σ_t w_t A ∇log π_t], flat [P].  (eq:replay-gradient)"""
    def surrogate(model):
        lp = log_probs(model, routes, gate)
        return mu_lp.sum(-1).exp() @ (coefficients(lp, mu_lp, reward, level) * lp).sum(-1)
    return flat(grad(surrogate)(theta))


def scores(model, routes=None, gate=live):
    """Return ∇log π(y_t | y_<t) of every token, [B, T, P]."""
    steps = jacrev(lambda weights: forward(weights, routes, gate)[0])(model)
    return torch.cat([x.flatten(2) for x in steps.values()], -1)[TREE.states, TREE.tokens]


# ----------------------------------------------------------------------- tables over random models

MODELS, NOISES, PLANTED_AT = 64, (0.003, 0.03, 0.1, "float8"), 0.03     # a figure has all
OWN, R3, GATES = "own routes", "R3", "R3, gates replayed too"
ROWS = [(OWN, None), (OWN, "token"), (OWN, "sequence"), (R3, None), (R3, "token"), (R3, "sequence"),
        (GATES, None)]
PLANTED = {R3: (lambda routes: routes, live),                        # what is replayed, its gates
           "prompt filled with expert 0":
               (lambda routes: torch.cat([0 * routes[:, :PROMPT], routes[:, PROMPT:]], 1), live),
           "scores zeroed first": (lambda routes: routes, zeroed),
           "layers exchanged": (lambda routes: routes.flip(0), live),
           "one token late": (lambda routes: routes[:, BEFORE], live),
           "one token early: it has seen what it scores": (ahead, live)}


@cache
def pair(noise, seed):
    """Return a trainer, rewards, the routes, gates and log μ of a sampler near it, T1 and T2."""
    theta, sampler, reward = draw(seed), nearby(draw(seed), noise, 1000 + seed), rewards(TREE, seed)
    _, routes, gates = forward(sampler)
    return (theta, reward[:, 0], routes, gates, log_probs(sampler),
            *targets(theta, sampler, reward[:, 0]))


def tokens(prob):
    """Return E_μ[|y|]."""
    return prob @ TREE.mask.double().sum(-1)


def distances(gradient, *aims):
    return [((gradient - aim).norm() / aims[0].norm()).item() for aim in aims]


@cache
def prices(noise):
    """Return what each of MODELS has: {row: [distance from T1, from T2, std]}, flips, χ²."""
    found = {key: [] for key in (*ROWS, "flips", "χ², own routes", "χ², R3")}
    for seed in range(MODELS):
        theta, reward, routes, gates, mu_lp, *aims = pair(noise, seed)
        prob = mu_lp.sum(-1).exp()
        found["flips"].append((forward(theta)[1] != routes).any(-1).double().mean().item())
        for name, table, gate in ((OWN, None, live), (R3, routes, live),
                                  (GATES, routes, frozen(gates))):
            lp, score = log_probs(theta, table, gate), scores(theta, table, gate)
            if name != GATES:
                squares = ((lp - mu_lp).exp() - 1).square().sum(-1)
                found[f"χ², {name}"].append((prob @ squares / tokens(prob)).item())
            for level in [level for row, level in ROWS if row == name]:
                each = torch.einsum("bt,btp->bp", coefficients(lp, mu_lp, reward, level), score)
                std = (prob @ (each - prob @ each).square().sum(-1)).sqrt() / aims[0].norm()
                found[name, level].append([*distances(prob @ each, *aims), std.item()])
    return found


def written(values):
    """Write a mean over models and its standard error."""
    error = stdev(values) / len(values) ** 0.5
    return f"{mean(values):.3f} ± {error:.3f}" if mean(values) > 1e-10 else "**0**"


def nearer(found, one, other, aim):
    """Count models in which row `one` is nearer to T1 (aim 0) or T2 (1), and those that differ.

    Where no route flips, R3 and own routes have the same gradient.
    """
    pairs = [(a[aim], b[aim]) for a, b in zip(found[one], found[other])
             if abs(a[aim] - b[aim]) > 1e-12]
    return sum(a < b for a, b in pairs), len(pairs)


def lower(found):
    """Count models whose χ² of a token R3 lowers, and those in which it moves it by over 1e-5."""
    moved = [own > replayed for own, replayed in zip(found[f"χ², {OWN}"], found[f"χ², {R3}"])
             if abs(own - replayed) > 1e-5]
    return sum(moved), len(moved)


def sizes():
    """Return header and rows: what each choice costs, by the size of the sampler's noise."""
    found = {"float8" if noise == "float8" else f"noise {noise}": prices(noise)
             for noise in NOISES if noise != 0.1}
    rows = [[f"{name}, {f'{level} weights' if level else 'uncorrected'}", *(
        f"{written(t1)} / {written(t2)} / {median(std):.1f}"
        for t1, t2, std in (zip(*of[name, level]) for of in found.values()))]
        for name, level in ROWS]
    rows.append(["χ² a token, own routes → R3", *(
        " → ".join(f"{mean(of[f'χ², {name}']):.4f}" for name in (OWN, R3))
        + ", lower in {} of {}".format(*lower(of)) for of in found.values())])
    for said, one, other in (("uncorrected R3 is nearer than own routes", (R3, None), (OWN, None)),
                             ("token weights bring R3 nearer", (R3, "token"), (R3, None))):
        rows.append([f"{said}: to T1 / to T2", *(
            " / ".join("{} of {}".format(*nearer(of, one, other, aim)) for aim in (0, 1))
            for of in found.values())])
    return ["bias to T1 / to T2 / std", *(
        f"{name}: {100 * mean(of['flips']):.1f} % flips" for name, of in found.items())], rows


def answer(noise="float8"):
    """Return header and rows: what weights on top of R3 do, by the model that will be run."""
    rows, levels = [], (None, "token", "sequence")
    for aim, (run, target) in enumerate((("the checkpoint, by its own routes", "T1"),
                                         ("what the engine runs", "T2"))):
        bias = [f"{mean(sizes[aim] for sizes in prices(noise)[R3, level]):.3f}" for level in levels]
        of = nearer(prices(noise), (R3, "token"), (R3, None), aim)
        bias[1] += ", nearer in {} of {} models".format(*of)
        rows.append([run, target, *bias])
    return ["you will run", "target", "R3, uncorrected", "token weights", "sequence weights"], rows


def planted():
    """Return header and rows: what E[ρ], the KL and the gradient show of each planted error."""
    rows = []
    for name, (replay, gate) in {OWN: (lambda routes: None, live), **PLANTED}.items():
        ratios, kl, biases = [], [], []
        for seed in range(MODELS):
            theta, reward, routes, _, mu_lp, *aims = pair(PLANTED_AT, seed)
            prob, log_rho = mu_lp.sum(-1).exp(), log_probs(theta, replay(routes), gate) - mu_lp
            ratios.append((prob @ (log_rho.exp() * TREE.mask).sum(-1) / tokens(prob)).item())
            kl.append((-prob @ log_rho.sum(-1) / tokens(prob)).item())
            biases.append(distances(expected(theta, mu_lp, reward, None, replay(routes), gate),
                                    *aims))
        low, high = min(ratios), max(ratios)
        rows.append([name, "1" if high - low < 1e-9 else f"**{low:.2f} to {high:.2f}**",
                     f"{mean(kl):.3f}", *map(written, zip(*biases))])
    return ["what is replayed", "mean of ρ", "KL a token", "bias to T1", "bias to T2"], rows
