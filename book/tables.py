"""Write the generated tables between their markers, in README.md and in math/.

Each table stands between <!-- begin: NAME --> and <!-- end: NAME -->; a file without a
marker is left alone. No number is typed: all come from the presets, from the public
functions, and from exact enumeration.

    python book/tables.py            # write, about a minute
    python book/tables.py --check    # exit 1 when stale
"""

import contextlib
import copy
import csv
import itertools
import json
import math
import re
import shlex
import statistics
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml

from three_policies.book import paths
from three_policies.checks import UserError
from three_policies.checks import interval as read_interval
from three_policies.correction import correct
from three_policies.doctor.health import HEALTHY, NO_LESSON, SEVERE, UNCORRECTED, diagnose
from three_policies.interop.dialects import from_dialect
from three_policies.kl import kl_estimate
from three_policies.losses import LossConfig, kl_loss, policy_loss
from three_policies.oracle import prices as prices_of
from three_policies.oracle import (J, Policy, exact_gradient, expectation, kl, rewards, routes,
                                   token_kl, turns, versions, words)
from three_policies.presets import PRESETS, RolloutCorrectionConfig
from three_policies.ratios import LEVELS, masked_log_ratio
from three_policies.rejection import CRITERIA
from three_policies.studies import merging, sizes
from three_policies.studies.contrasts import CORRECTIONS, holm, judge, mcnemar, paired
from three_policies.surrogates import LOSSES, reinforce_loss
from three_policies.tests.support import certified
from three_policies.training.capacity import (GIB, Sizes, host_bytes, memory, require_room,
                                              smallest_engine)
from three_policies.training.models import add_lora
from three_policies.training.settings import PolicyConfig, documented, load_config

ROOT = Path(__file__).resolve().parent.parent

SUM = "seq-mean-token-sum"
TODAY = [name for name in PRESETS if name.startswith(("decoupled", "bypass", "disabled"))]


def markdown(header, rows):
    """Write a table; a cell that begins with a negative number has a minus, not a hyphen."""
    lines = [[str(cell).replace("|", "\\|") for cell in line]
             for line in (header, ["---"] * len(header), *rows)]
    return re.sub(r"(?<=\| )-(?=\d)", "−",
                  "\n".join("| " + " | ".join(line) + " |" for line in lines))


def number(x, digits=2):
    """Write a number; what is 0 to rounding is a bold 0."""
    return "**0**" if abs(x) < 1e-10 else "< 0.01" if abs(x) < 0.005 else f"{x:.{digits}f}"


# ------------------------------------------------------------------------------------------ presets

def interval(bound):
    lo, hi = bound
    return f"≥ {lo:g}" if hi is None else f"≤ {hi:g}" if lo is None else f"in [{lo:g}, {hi:g}]"


def weights_in_words(config):
    if config.rollout_is is None:
        return "–"
    bound = config.rollout_is_threshold
    limit = f"0 unless {interval(bound)}" if isinstance(bound, tuple) else f"at most {bound:g}"
    return f"{config.rollout_is} ρ, {limit}"


def rejection_in_words(config):
    return " and ".join(
        f"{CRITERIA[name].statistic} "
        + (f"≤ {bound:g}" if isinstance(bound, float) else interval(bound))
        for name, bound in config.rollout_rs.items()) or "–"


def criteria():
    """List the rows of CRITERIA: what each keeps, and what it needs to judge."""
    rows = [[f"`{name}`", row.of, row.statistic,
             "[lo, hi]" if row.read is read_interval else "upper bound",
             ", ".join(f"`{needed}`" for needed in row.needs) or "–"]
            for name, row in CRITERIA.items()]
    return markdown(["criterion", "of each", "keeps while this is within", "bound", "also needs"],
                    rows)


def losses():
    """List the rows of LOSSES: the settings that only they have, and their ratio."""
    ratio = {"token": "r of the token", "geometric": "geometric mean of r", None: "none"}
    rows = [[f"`{name}`", row.meaning, ratio[row.level], ", ".join(
        f"`{key}` {'null' if own is None else f'{own:g}'}" for key, own in row.own.items()) or "–"]
        for name, row in LOSSES.items()]
    return markdown(["loss", "what it does", "ratio", "its own numbers"], rows)


def presets():
    rows = []
    for name in TODAY:
        config = PRESETS[name]()
        mode = "bypass" if config.bypass_mode else "decoupled"
        rows.append([f"`{name}`", mode, weights_in_words(config), rejection_in_words(config),
                     config.loss_type])
    return markdown(["preset", "mode", "weights", "kept only if", "loss"], rows)


# ---------------------------------------------------------------------------------------------- KL

def kl_estimators(lp, ref_lp, mask):
    """List (name, "loss" or "reward", function of the ratios [N, T] → [N]) of every estimator."""
    ell = torch.where(mask, lp - ref_lp, 0.0)

    def loss(kind, ratio=None):
        def per_response(ratios):  # each response as a batch of one: [N]
            weight = {None: None, "graph": ratios, "sg": ratios.detach(),
                      "prefix": ratios.cumprod(-1),
                      "sg prefix": ratios.cumprod(-1).detach()}[ratio]
            return torch.stack([kl_loss(lp[[i]], ref_lp[[i]], mask[[i]], kind, SUM,
                                        ratio=None if weight is None else weight[[i]])
                                for i in range(len(lp))])

        return per_response

    def reward(kind, to_go=True, weighted=False):
        def per_response(ratios):  # REINFORCE on −k, summed from t on
            values = torch.where(mask, kl_estimate(lp, ref_lp, kind), 0.0).detach()
            values = values * ratios.detach() if weighted else values
            returns = values.flip(-1).cumsum(-1).flip(-1) if to_go else values
            return reinforce_loss(lp, -returns).sum(-1)

        return per_response

    def square(whole_ratio):
        def value(ratios):
            weight = ratios.detach().prod(-1) if whole_ratio else 1
            return weight * ell.sum(-1).square() / 2
        return value

    def prefix(ratios):
        to_go = (ratios.cumprod(-1) * ell).detach().flip(-1).cumsum(-1).flip(-1)
        return reinforce_loss(lp, -to_go).sum(-1)

    return [
        ("k1", "loss", loss("k1")),
        ("k2", "loss", loss("k2")),
        ("k3", "loss", loss("k3")),
        ("abs", "loss", loss("abs")),
        ("k1+", "loss", loss("k1+")),
        ("k3+", "loss", loss("k3+")),
        ("abs+", "loss", loss("abs+")),
        ("sg(ρ)·k2", "loss", loss("k2", "sg")),
        ("sg(ρ)·k3+", "loss", loss("k3+", "sg")),
        ("sg(ρ)·k3", "loss", loss("k3", "sg")),
        ("ρ·k3", "loss", loss("k3", "graph")),
        ("ρ·k1", "loss", loss("k1", "graph")),
        ("ρ·k2", "loss", loss("k2", "graph")),
        ("sg(ρ_{1:t})·k3+", "loss", loss("k3+", "sg prefix")),
        ("ρ_{1:t}·k3", "loss", loss("k3", "prefix")),
        ("ρ_{1:t}·k1", "loss", loss("k1", "prefix")),
        ("k1, the token's own", "reward", reward("k1", to_go=False)),
        ("ρ·k1, the token's own", "reward", reward("k1", to_go=False, weighted=True)),
        ("k1, to the end", "reward", reward("k1")),
        ("k3, to the end", "reward", reward("k3")),
        ("ρ_{1:t}·k1, to the end", "reward", prefix),
        ("½(Σk1)²", "loss", square(False)),
        ("sg(ρ(y))·½(Σk1)²", "loss", square(True)),
    ]


def kl_table():
    """List every estimator's mean value and expected gradient, on- and off-policy."""
    pi = Policy(V=3, T=3, seed=0)
    ref, off = pi.perturbed(seed=3, size=0.5), pi.perturbed(seed=1, size=0.5)
    lp, ref_lp, mask = pi.log_probs(), ref.log_probs().detach(), pi.mask
    full, true = exact_gradient(pi, kl(pi, ref)), kl(pi, ref).item()
    lines = []
    for name, place, estimator in kl_estimators(lp, ref_lp, mask):
        line = [f"`{name}`", place]
        for sampler in (pi, off):
            ratios = torch.where(mask, lp - sampler.log_probs().detach(), 0.0).exp()
            values = estimator(ratios)
            gradient = exact_gradient(pi, expectation(sampler, values))
            per_token = [exact_gradient(pi, token_kl(p, q, sampler))
                         for p, q in ((pi, ref), (ref, pi))]
            value = number(expectation(sampler, values).item() / true) if place == "loss" else "–"
            distances = [((gradient - target).norm() / full.norm()).item()
                         for target in (full, *per_token)]
            line += [value, *map(number, distances)]
        lines.append(line)
    gradients = ["distance from ∇KL", "from per-token ∇KL", "from per-token ∇KL(π_ref‖π)"]
    header = ["estimator", "in the", "on-policy: value", *gradients,
              "off-policy: value", *gradients]
    return markdown(header, lines)


# -------------------------------------------------------------------------------- bias and variance

def long_policy(T, seed):
    """Return a policy that seldom ends before T, so that most responses have T tokens."""
    policy = Policy(V=3, T=T, seed=seed)
    with torch.no_grad():
        policy.logits[:, 0] -= 2.0
    return policy


def without_end(config, train_lp, mu_lp, mask, advantages, visits, policies):
    """Decide as `correct` does for a batch that contains each response `visits` [B, 1] times.

    Only the decision of second_moment depends on that: it rejects the worst tokens until the mean
    under μ meets the bound. Each of the `policies` side by side has a batch of its own.
    """
    others = {name: x for name, x in config.rollout_rs.items() if name != "second_moment"}
    decided = correct(train_lp, mu_lp, mask, replace(config, rollout_rs=others), advantages)
    if others == config.rollout_rs:
        return decided
    squares, kept = masked_log_ratio(train_lp.detach(), mu_lp, mask).square(), []
    for square, on, visit in zip(*(x.chunk(policies) for x in (squares, mask, visits * mask))):
        ordered, order = square[on].sort()
        share, last = visit[on][order], ordered.diff(append=ordered.new_full((1,), torch.inf)) > 0
        bound = config.rollout_rs["second_moment"] * share.cumsum(0)
        fits = last & ((ordered * share).cumsum(0) <= bound)           # equal ones stay or go
        kept.append(square <= torch.where(fits, ordered, -1.0).amax())
    return replace(decided, mask=decided.mask & torch.cat(kept))


def field(config, theta, old, mu, advantages, policies=1):
    """Return each response's gradient by the logits of its states, the correction and the mean.

    The gradient is that of the response's objective, [N, T, V]. With N rows, N·loss is the sum of
    the rows' losses. A token contributes d/d log π(v) of it, for the token itself and for all other
    v that score centering subtracts.
    """
    states, tokens, mask = theta.states, theta.tokens[..., None], theta.mask
    # every and mu_every are log-probs of all tokens: [N, T, V]
    every, mu_every = theta.step_log_probs()[states], mu.step_log_probs().detach()[states]
    lp = every.gather(-1, tokens)[..., 0] * mask
    old_lp, mu_lp = old.log_probs().detach(), mu_every.gather(-1, tokens)[..., 0] * mask
    visits = mu_lp.sum(-1, keepdim=True).exp()  # μ(y), [N, 1]
    correction = without_end(config, lp if config.bypass_mode else old_lp, mu_lp, mask, advantages,
                             visits, policies)
    loss, _ = policy_loss(lp, old_lp, mu_lp, advantages, mask, config, LossConfig(aggregation=SUM),
                          correction=correction, candidates=(every, mu_every))
    of_logs = -len(lp) * torch.autograd.grad(loss, every)[0]
    by_logits = of_logs - every.detach().exp() * of_logs.sum(-1, keepdim=True)
    mean = torch.zeros_like(theta.logits).index_add(0, states.flatten(),
                                                    (by_logits * visits[..., None]).flatten(0, 1))
    return by_logits, correction, mean.flatten().detach()


def side_by_side(policies):
    """Join independent policies as blocks of one, so that one call computes all of them."""
    whole = Policy(policies[0].V, policies[0].T)
    whole.tokens, whole.mask = (torch.cat([getattr(p, x) for p in policies])
                                for x in ("tokens", "mask"))
    whole.states = torch.cat([p.states + i * len(p.logits) for i, p in enumerate(policies)])
    whole.logits = torch.cat([p.logits.detach() for p in policies]).requires_grad_()
    return whole


def moments(config, theta, old, mu, advantages, policies=1):
    """Return mean and variance of the gradient from one response, and the share of tokens kept.

    Each has a value per policy side by side: [policies, P], [policies] (the trace), [policies].
    """
    chances = mu.probs().detach()

    def of_each(values):
        return (chances * values).reshape(policies, -1).sum(-1)

    by_logits, correction, mean = field(config, theta, old, mu, advantages, policies)
    mean = mean.reshape(policies, -1)
    second = of_each(by_logits.square().sum((-1, -2)))  # each token has its own row of logits
    counts = correction.mask.bool() & (True if correction.weights is None
                                       else correction.weights > 0)
    kept = of_each(counts.double().sum(-1)) / of_each(theta.mask.double().sum(-1))
    return mean, second - mean.square().sum(-1), kept


POLICIES = 64  # random ones that an average is over


def root_mean_square(values, units):
    """Return √(Σ values / Σ units) and its jackknife standard error over the policies."""
    total = (values.sum() / units.sum()).sqrt().item()
    without = ((values.sum() - values) / (units.sum() - units)).sqrt()
    n = len(values)
    return total, ((n - 1) / n * (without - without.mean()).square().sum()).sqrt().item()


@cache
def crowd(T):
    """Return random policies side by side, noise for two policies near them, and rewards."""
    alone = [long_policy(T, seed) for seed in range(POLICIES)]
    noise = [torch.cat([Policy(3, T, seed + first).logits.detach() for seed in range(POLICIES)])
             for first in (100, 200)]
    return side_by_side(alone), noise, torch.cat([rewards(p, seed + 300)
                                                  for seed, p in enumerate(alone)])


def near(policy, noise, size):
    other = copy.copy(policy)
    other.logits = (policy.logits.detach() + size * noise).requires_grad_()
    return other


@cache
def studies(T, size, update):
    """Return π_old, μ with noise of this size, π_θ, the advantages, and each ∇J: [policies, P]."""
    old, noise, reward = crowd(T)
    mu, theta = near(old, noise[0], size), near(old, noise[1], update)
    value = (old.probs().detach() * reward[:, 0]).reshape(POLICIES, -1).sum(-1)  # J of each
    advantages = (reward - value.repeat_interleave(len(reward) // POLICIES)[:, None]).expand(-1, T)
    return old, mu, theta, advantages, exact_gradient(theta, J(theta, reward)).reshape(POLICIES, -1)


def bias_and_std(config, T, size, update=0.0):
    """Return bias, its standard error, standard deviation and the share of tokens kept.

    The first three are root mean squares over random policies, divided by that of |∇J|.
    """
    old, mu, theta, advantages, target = studies(T, size, update)
    mean, variance, kept = moments(config, theta, old, mu, advantages, POLICIES)
    scale = target.square().sum(-1)
    bias, error = root_mean_square((mean - target).square().sum(-1), scale)
    return bias, error, root_mean_square(variance, scale)[0], kept.mean().item()


def priced(found):
    """Write a cell: bias ± its standard error / standard deviation."""
    bias, error, std, _ = found
    return f"{number(bias)}{'' if error < 0.005 else f' ± {error:.2f}'} / {std:.2f}"


REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
IDEAS_OF_2026 = {
    "`rollout_is: prefix`, C = 2": RolloutCorrectionConfig("prefix", **REINFORCE),
    "`score_centering`": RolloutCorrectionConfig(score_centering=True, **REINFORCE),
    "`score_centering`, token ρ, C = 2": RolloutCorrectionConfig("token", score_centering=True,
                                                                 **REINFORCE),
    "`token_tv: 0.3`, token ρ (IPO)": from_dialect({"loss": {"type": "ipo"}}),
    "`token_tv_outward: 0.2`, token ρ (DPPO)": from_dialect({"loss": {"type": "default"}}),
    **{f"`{name}: {bound}`, token ρ{source}": RolloutCorrectionConfig(
        "token", torch.inf, rollout_rs={name: bound}, **REINFORCE) for name, bound, source in (
            ("token_binary_kl", 0.05, " (KPop)"),
            ("seq_mean_binary_kl", 0.005, " (FlashREINFORCE)"), ("seq_mean_tv", 0.05, ""),
            ("vaco", 0.2, " (VACO)"))},
    "`second_moment: 0.04` (M2PO)": RolloutCorrectionConfig(rollout_rs={"second_moment": 0.04})}


def exact_and_presets():
    """Return the configurations of the exact weight and of the presets."""
    return {"sequence ρ, C = ∞": RolloutCorrectionConfig.bypass_pg_is(torch.inf),
            **{f"`{name}`": PRESETS[name]() for name in TODAY}}


# These presets have bounds that short responses can meet.
WIDER = {"`decoupled_geo_rs`, 0.8–1.25": RolloutCorrectionConfig.decoupled_geo_rs((0.8, 1.25)),
         "`decoupled_k3_rs`, 0.1": RolloutCorrectionConfig.decoupled_k3_rs(0.1)}
# All methods of 2026 but the last are in bypass mode with `loss_type: reinforce`.
METHODS_IN_BYPASS = {name: x for name, x in IDEAS_OF_2026.items() if x.bypass_mode}
METHODS_DECOUPLED = {name: x for name, x in IDEAS_OF_2026.items() if not x.bypass_mode} | WIDER


def studied():
    """Return the presets, the ideas of 2026, and two with bounds that short responses can meet."""
    return exact_and_presets() | IDEAS_OF_2026 | WIDER


def collapsed(rows, later=None, bypass=()):
    """Join the rows that have the same numbers into one row that names all of them.

    Rows that differ only in the column `later` are joined, too. That cell gives the number of the
    decoupled methods, then that of the bypass methods.
    """
    groups = {}
    for name, *figures in rows:
        key = tuple(x for i, x in enumerate(figures) if i != later)
        groups.setdefault(key, []).append((name, figures))
    lines = []
    for same in groups.values():
        figures = list(same[0][1])
        if later is not None:
            of_mode = {name in bypass: f[later] for name, f in same}
            assert all(of_mode[name in bypass] == f[later] for name, f in same), same
            figures[later] = "; bypass ".join(dict.fromkeys(of_mode.values()))
        lines.append([", ".join(name for name, _ in same), *figures])
    return lines


def prices(methods):
    """Tabulate bias and standard deviation of a response's gradient for each of the methods.

    A column is for T = 4 and Δ = 0.2 unless it says otherwise.
    """
    settings = [(4, 0.05, 0), (4, 0.2, 0), (4, 0.5, 0), (2, 0.2, 0), (8, 0.2, 0), (4, 0.2, 0.2)]
    names = ["later" if update else f"Δ = {size:g}" if T == 4 else f"T = {T}"
             for T, size, update in settings]
    rows = []
    bypass = [name for name, config in methods.items() if config.bypass_mode]
    for name, config in methods.items():
        found = [bias_and_std(config, *setting) for setting in settings]
        rows.append([name, *map(priced, found), f"{found[1][3]:.2f}"])
    lines = collapsed(rows, 5, bypass)
    return markdown(["method", *names, "kept"], lines).replace(" --- |", "---|")


# ----------------------------------------------------------------------------------------- metrics

FORMULAS = {
    "kl": "mean −log ρ: KL(μ‖π) by k1",
    "kl_z": "Σ(−log ρ)/√Σ(log ρ)²: how many standard errors `kl` is above 0",
    "bitwise_frac": "share of tokens with log ρ ≠ 0: in float32 their log-probs differ in a bit",
    "k3_kl": "mean ρ − 1 − log ρ: KL(μ‖π) by k3",
    "chi2_token": "mean ρ_t² − 1",
    "chi2_seq": "mean (Πρ)² − 1",
    "is_ratio_mean": "mean ρ_t, 1 in expectation if μ can draw whatever π can",
    "is_ratio_z": "Σ(ρ_t − 1)/√Σ(ρ_t − 1)²: how many standard errors `is_ratio_mean` is from 1",
    "is_ratio_std": "standard deviation of ρ_t (N − 1)",
    "is_ratio_max": "largest ρ_t",
    "is_ratio_min": "smallest ρ_t",
    "training_ppl": "mean of ppl(π) = exp(−(1/|y|) Σ_t log π(y_t))",
    "training_log_ppl": "mean of log ppl(π)",
    "rollout_ppl": "mean of ppl(μ)",
    "rollout_log_ppl": "mean of log ppl(μ)",
    "log_ppl_diff": "mean of log ppl(π) − log ppl(μ)",
    "log_ppl_diff_max": "largest log ppl(π) − log ppl(μ)",
    "log_ppl_diff_min": "smallest log ppl(π) − log ppl(μ)",
    "log_ppl_abs_diff": "mean of |log ppl(π) − log ppl(μ)|",
    "ppl_ratio": "mean of ppl(π)/ppl(μ) = (Πρ)^{−1/|y|}",
    "PREFIX_mean": "mean of w over tokens",
    "PREFIX_std": "standard deviation of w over tokens (N)",
    "PREFIX_eff_sample_size": "(Σw)²/(NΣw²) over tokens",
    "PREFIX_max": "largest w",
    "PREFIX_min": "smallest w",
    "PREFIX_seq_mean": "mean over responses of w̄, a response's mean w",
    "PREFIX_seq_std": "standard deviation of w̄ (N − 1)",
    "PREFIX_seq_eff_sample_size": "(Σw̄)²/(NΣw̄²) over responses",
    "PREFIX_seq_max": "largest w̄",
    "PREFIX_seq_min": "smallest w̄",
    "PREFIX_seq_max_deviation": "largest |w̄ − 1|",
    "PREFIX_ratio_fraction_high": "share of ρ above hi (C); of responses at sequence level",
    "PREFIX_ratio_fraction_low": "share of ρ below lo (1/C): of tokens; of responses at sequence "
                                "level and for a criterion of sequences",
    "PREFIX_seq_fraction_high": "share of responses whose mean ρ is above hi (C)",
    "PREFIX_seq_fraction_low": "share of responses whose mean ρ is below lo (1/C)",
    "rollout_is_masked_fraction": "share of tokens with w = 0, outside [lo, hi]",
    "rollout_is_per_sequence": "1 where a response has one weight, 0 where its tokens have",
    "rollout_is_seq_masked_fraction": "share of responses with a token of w = 0",
    "rollout_is_batch_norm_factor":
        "what the weights were divided by: their mean, by token or response; by none below 1e-8",
    "rollout_is_catastrophic_token_fraction":
        "share of tokens with ρ_t < lo, the veto: the lower bound of seq_max_k1",
    "rollout_is_veto_fraction": "share of responses with a token of ρ_t below the veto",
    "CRITERION_mean": "mean of its statistic s over tokens: k1, k2 or k3 per token, or its sum, "
                      "mean or maximum; |π − μ|, for token_tv_outward sign(A)(π − μ); binary_kl: "
                      "the larger KL or the mean; |ρ − 1| for vaco; (log ρ)² for second_moment",
    "CRITERION_max": "largest s",
    "CRITERION_min": "smallest s",
    "CRITERION_std": "standard deviation of s limited to its bounds (N)",
    "CRITERION_seq_mean": "mean over responses of s̄, a response's mean s",
    "CRITERION_seq_std": "standard deviation of s̄ (N − 1)",
    "CRITERION_seq_max": "largest s̄",
    "CRITERION_seq_min": "smallest s̄",
    "CRITERION_seq_max_deviation": "largest |s̄|",
    "CRITERION_fraction_high":
        "share of tokens, or responses, with s above its bounds: ρ too low for k1",
    "CRITERION_fraction_low":
        "share of tokens, or responses, with s below its bounds: ρ too high for k1",
    "CRITERION_seq_fraction_high": "share of responses with s̄ (seq: s) above its bounds",
    "CRITERION_seq_fraction_low": "share of responses with s̄ (seq: s) below its bounds",
    "CRITERION_masked_fraction": "share of tokens that it rejects",
    "CRITERION_seq_masked_fraction": "share of responses that lose a token to it",
    "rollout_rs_masked_fraction": "share of tokens that any criterion rejects",
    "rollout_rs_seq_masked_fraction": "share of responses that lose a token",
    "all_rejected": "1 when no token is left",
}


def every_metric():
    """Return the names of all metrics that any configuration reports."""
    pi, names = Policy(V=3, T=3, seed=0), {}
    bounds = {name: (0.5, 2.0) if row.read is read_interval else 0.1
              for name, row in CRITERIA.items()}
    for level in LEVELS:
        config = RolloutCorrectionConfig(level, (0.5, 2.0), True, bounds)
        names |= correct(pi.log_probs(), pi.log_probs(), pi.mask, config, -pi.mask.double()).metrics
    return [name.removeprefix("rollout_corr/") for name in names]


def family(name):
    """Return the row of FORMULAS that a metric belongs to."""
    if name in FORMULAS:
        return name
    criterion = f"rollout_rs_(?:{'|'.join(sorted(CRITERIA, key=len)[::-1])})"
    for pattern, stands_for in ((f"rollout_is_raw|rollout_is|{criterion}_rho", "PREFIX"),
                                (criterion, "CRITERION")):
        if found := re.fullmatch(f"(?:{pattern})_(.*)", name):
            return f"{stands_for}_{found[1]}"
    return name


def healthy():
    """List the ranges by which `diagnose` judges, then the reasons why a step may teach nothing."""
    judged = [[f"`{name}`", f"{low:g}" if low == high else f"{low:g} to {high:g}", meaning, remedy]
              for name, low, high, meaning, remedy in HEALTHY]
    judged.insert(0, ["`k3_kl`, with nothing that corrects it", f"0 to {UNCORRECTED:g}",
                      "the step is that of another objective",
                      "take weights: correction.preset=decoupled_token_is"])
    judged += [[f"`{name}`", f"below {limit:g}", meaning, remedy]
               for name, (limit, meaning, remedy) in SEVERE.items()]
    lessons = [[", ".join(f"`{name}` = {value}" for name, value in values.items()), meaning, remedy]
               for values, meaning, remedy in NO_LESSON]
    return (markdown(["metric", "healthy", "outside it", "what to turn"], judged)
            + "\n\nWhere a step teaches nothing, `diagnose` names the first reason that holds:\n\n"
            + markdown(["where", "why", "what to turn"], lessons))


def metrics():
    """List every metric that a correction reports; one without a formula is a sentence."""
    names = every_metric()
    rows = [*dict.fromkeys(map(family, names))]
    if lacking := [row for row in rows if row not in FORMULAS]:
        raise SystemExit(f"FORMULAS in book/tables.py has no row for {', '.join(lacking)}")
    formulas = [[f"`{row}`", FORMULAS[row]] for row in rows]
    return (f"The table has all {len(names)} metrics of a correction, without their prefix "
            "`rollout_corr/`. N counts tokens or responses.\n\n"
            "* PREFIX stands for one of: `rollout_is`, the weights before they are normalised; "
            "`rollout_is_raw`, ρ at the level of\n  the weights; CRITERION`_rho`, ρ at the level "
            "of a criterion that bounds ρ.\n"
            "* CRITERION stands for `rollout_rs_` and the name of a criterion.\n"
            "* w is what PREFIX says; ρ a token's, or a sequence's product or geometric mean.\n\n"
            + markdown(["metric", "formula"], formulas))


# ---------------------------------------------------------------------------------------- settings

def settings():
    """List every setting of the trainer: its default, what it may be, what it means."""
    rows = [[f"`{key}`", f"`{default}`", meaning, may_be]
            for key, default, meaning, may_be in documented()]
    return markdown(["setting", "default", "meaning", "may be"], rows)


# -------------------------------------------------------------------------------------------- GPUs

# Of Qwen/Qwen2.5-…, by size: vocabulary, hidden, MLP, layers, heads, heads of the cache.
QWEN = {
    "0.5B": (151_936, 896, 4864, 24, 14, 2), "1.5B": (151_936, 1536, 8960, 28, 12, 2),
    "3B": (151_936, 2048, 11_008, 36, 16, 2), "7B": (152_064, 3584, 18_944, 28, 28, 4),
    "14B": (152_064, 5120, 13_824, 48, 40, 8), "32B": (152_064, 5120, 27_648, 64, 40, 8)}
FREE = 0.92                # of a GPU, after its error correction and CUDA's context: assumed


def qwen(size, policy=None):
    """Return the sizes of a Qwen2.5, counted on the meta device, with the LoRA of a policy."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    vocabulary, hidden, inner, layers, heads, of_cache = QWEN[size]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=of_cache,
            tie_word_embeddings=size in ("0.5B", "1.5B", "3B")))
        return Sizes.of(add_lora(model, policy or PolicyConfig(), 0))


def gpus():
    """List, by arithmetic, what models take of a GPU, and on which GPUs they fit."""
    config, length = load_config([str(ROOT / "configs/gsm8k.yaml")]), 768

    def fits(model, total):
        share = max(0.4, 0.05 + smallest_engine(model, config, length) / total)
        config.rollout.gpu_memory_utilization, found = share, {}
        for config.policy.cpu_offload, ranks in ((False, 8), (False, 1), (True, 8), (True, 1)):
            with contextlib.suppress(UserError):
                if not require_room(model, config, ranks, length, FREE * total, total, True):
                    found[config.policy.cpu_offload] = ranks
        whole, offloaded = found.get(False), found.get(True)
        return " or ".join([f"{whole}"] * bool(whole) + [f"{offloaded} offloaded"] * bool(
            offloaded and offloaded != whole)) or "none"

    rows = []
    for size in QWEN:
        model, updates = qwen(size), []
        for config.policy.cpu_offload, ranks in ((False, 1), (False, 8), (True, 1)):
            updates.append(sum(memory(model, config, ranks, length, 1)[0].values()))
        of = [*updates, smallest_engine(model, config, length), host_bytes(model, config)]
        rows.append([f"Qwen2.5-{size}", f"{model.parameters / 1e9:.2f}",
                     *(f"{x / GIB:.1f}" for x in of),
                     *(fits(model, x * GIB) for x in (24, 48, 80))])
    return markdown(["model", "10⁹ parameters", "update, one GPU", "update, each of 8",
                     "update, offloaded", "smallest engine", "host, offloaded", "24 GiB", "48 GiB",
                     "80 GiB"], rows)


# ----------------------------------------------------------------------------------- gradient field

def ascend(config, start, noise, reward, lagging, beta=0.3, steps=400, rate=0.1, lag=8):
    """Return the logits of every step of exact ascent on E[R] − β KL(π‖start), without noise.

    The gradient of E[R] is the preset's, in expectation over μ. That of the KL is the true one,
    for all presets. start, noise: lists of policies, and of what is added to the sampler's logits.
    reward: [policies, N, 1]. lagging [policies]: whether μ follows `lag` steps behind, or stays at
    the start.

    Every step sets π_old := π_θ and is a step of Adam, whose learning rate falls linearly to 0.
    Adam works on each logit alone, so the studies do not affect one another. After the step the
    logits are rounded to multiples of 2⁻²². Where a bound rejects, the ascent is chaotic: without
    rounding, the last bit of a sum, which depends on the processor, would decide what is rejected
    400 steps later.
    """
    origin, theta, old, mu = (side_by_side(start) for _ in range(4))
    noise, shape = torch.cat(noise), reward.shape
    follows = lagging.repeat_interleave(len(noise) // len(lagging))[:, None]
    optimizer, path = torch.optim.Adam([theta.logits], lr=rate, fused=True), []
    for step in range(steps):
        path.append(theta.logits.detach().clone())
        old.logits = path[-1]
        mu.logits = noise + torch.where(follows, path[max(0, step - lag)], path[0])
        value = (old.probs().reshape(shape) * reward).sum(1, keepdim=True)  # J, [policies, 1, 1]
        advantages = (reward - value).reshape(-1, 1).expand(-1, theta.T)
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        gradient = field(config, theta, old, mu, advantages, len(start))[2]
        gradient = gradient - beta * exact_gradient(theta, kl(theta, origin))
        theta.logits.grad = -gradient.reshape(theta.logits.shape)
        optimizer.step()
        theta.logits.data.mul_(2 ** 22).round_().div_(2 ** 22)
    return [*path, theta.logits.detach()]


def gain_reached(logits, start, reward, beta=0.3):
    """Return the share of the possible gain in J = E[R] − β KL(π‖start) that each policy reached.

    The optimum is known: π* ∝ start·exp(R/β), with J* = β log E_start[exp(R/β)].
    """
    origin, end = side_by_side(start), side_by_side(start)
    end.logits = logits
    log_p, log_q = (x.log_probs().detach().sum(-1).reshape(reward.shape) for x in (end, origin))
    before = (log_q.exp() * reward).sum((1, 2))
    best = beta * (log_q + reward / beta).logsumexp((1, 2))
    value = (log_p.exp() * (reward - beta * (log_p - log_q))).sum((1, 2))
    return (value - before) / (best - before)


def gradient_field(studies=10, size=0.5):
    start = [Policy(V=3, T=3, seed=seed) for seed in range(studies)] * 2
    reward = torch.stack([rewards(p, seed % studies + 300) for seed, p in enumerate(start)])
    noise = [(p.perturbed(i % studies + 100, size).logits - p.logits).detach()
             for i, p in enumerate(start)]
    lagging = torch.arange(2 * studies) >= studies
    rows, ends = [], {}
    for name, config in studied().items():
        # At π_θ = π_old, decoupled PPO and weighted REINFORCE have the same gradient.
        clips = config.bypass_mode and config.loss_type == "ppo_clip"
        key = weights_in_words(config), rejection_in_words(config), clips, config.score_centering
        if key not in ends:
            ends[key] = gain_reached(ascend(config, start, noise, reward, lagging)[-1], start,
                                     reward)
        parts = ends[key][~lagging], ends[key][lagging]
        figures = [x.item() for part in parts for x in (part.mean(), part.min())]
        rows.append([name, *(f"{round(x, 2) + 0.0:.2f}" for x in figures)])
    return markdown(["preset", "fixed μ: mean", "worst", "lagging μ: mean", "worst"],
                    collapsed(rows))


# ------------------------------------------------------------------------- batch-size invariance

def consume(config, start, reward, parts, oldest, shares=8, rounds=20, rate=1.0):
    """Return the logits after exact ascent on data of mixed age, used in `parts` updates a round.

    Each of the `rounds` has eight shares of data. Their samplers are the policies of 0 … `oldest`
    rounds ago, evenly spaced, and π_old is the policy at the start of the round. An update sums the
    shares it takes, so the step per share is always the same.
    """
    theta, old, mu = (side_by_side(start) for _ in range(3))
    ages, path = [round(share * oldest / (shares - 1)) for share in range(shares)], []
    for _ in range(rounds):
        path.append(theta.logits.detach().clone())
        old.logits = path[-1]
        for part in range(parts):
            total: Any = 0.0
            for age in ages[part::parts]:
                mu.logits = path[max(0, len(path) - 1 - age)]
                value = (mu.probs().reshape(reward.shape) * reward).sum(1, keepdim=True)
                advantages = (reward - value).reshape(-1, 1).expand(-1, theta.T)
                total = total + field(config, theta, old, mu, advantages)[2]
            theta.logits = theta.logits.detach() + rate / shares * total.reshape(theta.logits.shape)
            theta.logits.requires_grad_()
    return theta.logits.detach()


def batch_size():
    """Tabulate the share of the gain in E[R] that is reached, a mean of ten policies."""
    start, parts = [Policy(V=3, T=3, seed=seed) for seed in range(10)], (1, 2, 4, 8)
    reward, rows = torch.stack([rewards(p, seed + 300) for seed, p in enumerate(start)]), []

    def value(logits):
        policy = side_by_side(start)
        policy.logits = logits
        return (policy.probs().detach().reshape(reward.shape) * reward).sum((1, 2))

    before = value(side_by_side(start).logits.detach())
    for name, preset in (("decoupled", "decoupled_token_is"), ("coupled", "bypass_ppo_clip")):
        for age in (0, 4, 8, 16):
            gains = [(value(consume(PRESETS[preset](), start, reward, n, age)) - before)
                     / (reward.amax((1, 2)) - before) for n in parts]
            rows.append([f"{name} (`{preset}`)", age, *(f"{x.mean().item():.2f}" for x in gains)])
    return markdown(["objective", "oldest data, rounds", *(f"{n} update{'s' * (n > 1)}"
                                                           for n in parts)], rows)


# ----------------------------------------------------------------------------- the study's results

@cache
def runs(study="nine", table="results"):
    """Read a study's table as {regime: {method: {seed: row}}}."""
    found = {}
    for row in csv.DictReader((ROOT / "studies" / study / f"{table}.csv").open()):
        of_method = found.setdefault(row["regime"], {}).setdefault(row["method"], {})
        of_method[int(row["seed"])] = row
    return found


def called(regime):
    """Return a regime's name in the text: `matched` is an arm of the second study there."""
    return "on_time" if regime == "matched" else regime


AGAIN = "_again"               # of a method that differs by its rounding alone


def mean_of(rows, name="final_accuracy"):
    return statistics.mean(float(row[name]) for row in rows.values())


def spread(rows, name="final_accuracy", digits=2):
    """Write mean and standard deviation of a column."""
    deviation = statistics.stdev(float(row[name]) for row in rows.values())
    return f"{mean_of(rows, name):.{digits}f} ± {deviation:.{digits}f}"


def difference(rows, other):
    """Write the difference of two methods; a method has none from itself."""
    if rows is other:
        return "–"
    gap, width = paired(rows, other)
    # + 0 turns −0.00 into 0.00
    return f"{round(gap, 2) + 0:+.2f} ± {width:.2f}" + ("" if abs(gap) > width
                                                        else ", not separable")


def study(regime):
    """Tabulate means over seeds by final accuracy, for methods with at least three seeds."""
    lines, methods = [], {m: rows for m, rows in runs()[regime].items()
                          if len(rows) > 2 and not m.endswith(AGAIN)}
    against = ("naive", "decoupled_token_is")
    for method, rows in sorted(methods.items(), key=lambda item: -mean_of(item[1])):
        final = [float(row["final_accuracy"]) for row in rows.values()]
        lines.append([
            f"`{method}`", len(rows), spread(rows), f"{min(final):.2f} to {max(final):.2f}",
            *(difference(rows, methods[other]) for other in against),
            f"{mean_of(rows, 'best_accuracy'):.2f}",
            f"{mean_of(rows, 'max_grad_norm'):.1f}", f"{mean_of(rows, 'ess_raw'):.2f}",
            f"{mean_of(rows, 'k3'):.3f}",
            f"{100 * mean_of(rows, 'kept'):.0f} %"])
    return markdown(["method", "seeds", "final accuracy",
                     "lowest to highest", *(f"minus `{other}`" for other in against),
                     "best", "max ‖∇‖", "ESS/N", "k3", "kept"], lines)


def late_runs(method):
    """Return {(seed, other rounding?): row} of a method eight steps stale."""
    return {(seed, again): row for again in (False, True)
            for seed, row in runs()["staleness_8"][method + again * AGAIN].items()}


FRONTIER = {"seeds 1 to 5, which singled it out": lambda seed, again: seed <= 5 and not again,
            "seeds 6 to 10": lambda seed, again: seed > 5 and not again,
            "seeds 1 to 10, other rounding": lambda seed, again: again,
            "all": lambda *_: True,
            "all that had no part in choosing it": lambda seed, again: seed > 5 or again}


def study_frontier(method="token_is_opsm", against="bypass_ppo_clip"):
    """Compare the method with the best mean at the full learning rate with the best preset.

    A line is a set of runs; sets differ in what part the runs had in choosing the method.
    """
    lines = []
    for name, chosen in FRONTIER.items():
        one, two = ({key: row for key, row in late_runs(m).items() if chosen(*key)}
                    for m in (method, against))
        lines.append([name, len(one), spread(one), spread(two),
                      "{:+.2f} ± {:.2f}".format(*paired(one, two))])
    return markdown(["runs", "number", f"`{method}`", f"`{against}`", "difference, paired, 95 %"],
                    lines)


def study_rounding(name="nine", column="final_accuracy"):
    """Compare what another rounding does to a run with what another seed does."""
    lines = []
    for regime, methods in runs(name).items():
        for method in [m for m in methods if m + AGAIN in methods]:
            one, two = ({seed: float(row[column]) for seed, row in methods[m].items()}
                        for m in (method, method + AGAIN))
            moved = [abs(one[seed] - two[seed]) for seed in two]
            between = [abs(one[a] - one[b]) for a, b in itertools.combinations(two, 2)]
            lines.append([f"`{called(regime)}`", f"`{method}`", f"{statistics.mean(moved):.3f}",
                          f"{max(moved):.3f}",
                          f"{statistics.mean(between):.3f}"])
    return markdown(["regime", "method", "same seed, other rounding: mean difference", "largest",
                     "other seed, same rounding: mean difference"], lines)


def per_token_k3(size, T):
    """Return E_μ of a token's k3 between `old` and `mu`, which is `old` with noise of this size."""
    old, noise, _ = crowd(T)
    mu_lp = near(old, noise[0], size).log_probs().detach()
    k3 = torch.where(old.mask, kl_estimate(mu_lp, old.log_probs().detach(), "k3"), 0.0)
    of, tokens = ((mu_lp.sum(-1).exp() * x.double().sum(-1)).reshape(POLICIES, -1).sum(-1)
                  for x in (k3, old.mask))
    return (of / tokens).mean().item()


@cache
def noise_with_k3(k3, T):
    low, high = 0.0, 4.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if per_token_k3(middle, T) < k3 else (low, middle)
    return high


SIMPLE = {"no weight": RolloutCorrectionConfig(), "token": RolloutCorrectionConfig("token", 2.0),
          "sequence": RolloutCorrectionConfig("sequence", 2.0)}


@cache
def borders(T, most=0.2):
    """Return k3·T from which on each method's exact gradient misses ∇J by more than `most`.

    Between sizes of the noise, in steps of 1.5, the bias is taken for a power of it.
    """
    sizes = [0.03 * 1.5 ** i for i in range(10)]
    found, k3 = {name: [] for name in SIMPLE}, [per_token_k3(size, T) * T for size in sizes]
    for size in sizes:
        for name, config in SIMPLE.items():
            found[name].append(bias_and_std(config, T, size)[0])
        studies.cache_clear()              # of T = 8 it holds hundreds of megabytes a size
    last = {name: max(i for i, x in enumerate(biases) if x < most)
            for name, biases in found.items()}
    return {name: between(k3[i:i + 2], found[name][i:i + 2], most) for name, i in last.items()}


def between(x, y, at):
    """Return where the power of x that meets both points has the value `at`."""
    share = math.log(at / y[0]) / math.log(y[1] / y[0])
    return x[0] * (x[1] / x[0]) ** share


IN_SHORT = ("float32", "fp16", "head-bf16", "bf16", "bf16-head-bf16", "vllm-bf16", "stale-1",
            "int8", "float8-e4m3", "int6", "top-p", "temperature", "layer-left-out", "int4")


def sizes_in_short():
    """Write the causes of studies/sizes.py that a reader may have, by k3, with their ESS/N."""
    header, rows = sizes.table()
    columns = [i for i, name in enumerate(header)
               if name in ("row", "between sampler and trainer", "k3") or name.startswith("ESS/N")]
    k3 = {f"`{name}`": float(row["k3_exact"]) for name, row in sizes.results().items()
          if name in IN_SHORT}
    shown = sorted((row for row in rows if row[0] in k3), key=lambda row: k3[row[0]])
    return markdown([header[i] for i in columns], [[row[i] for i in columns] for row in shown])


def size_borders():
    """Write, for three limits T, the k3·T up to which a method misses ∇J by at most a fifth."""
    lines = [[f"{T}", *(f"{x:.3f}" for x in borders(T).values()),
              f"{T * (2 ** (1 / T) - 1) / 2:.3f}"] for T in (2, 4, 8)]
    return markdown(["T", "no weight", "token weights, C = 2", "sequence weights, C = 2",
                     "sequence weights, C = ∞, ESS/N ≥ ½"], lines)


REPAIRS = (             # what is done, and the rows of studies/sizes.py before and after it
    ("one temperature on both sides", "temperature", "float32"),
    ("no top-p, or its replay", "top-p", "float32"),
    ("no top-k, or its replay", "top-k", "float32"),
    ("all layers reach the engine", "layer-left-out", "float32"),
    ("this step's weights, not eight steps old", "stale-8", "float32"),
    ("this step's weights, not one step old", "stale-1", "float32"),
    ("an engine in float32, whose grid holds the update", "below-the-grid", "float32"),
    ("the LoRA apart, not merged in bfloat16", "lora-merged", "float32"),
    ("16 bits, not 4 bits per channel", "int4", "bf16"),
    ("groups of 32, not whole channels", "int4", "int4-group-32"),
    ("float8 with a scale per channel, not per matrix", "float8-e4m3-tensor", "float8-e4m3"),
    ("16 bits, not 8 bits per channel", "int8", "bf16"),
    ("the head in float32, layers in bfloat16", "bf16-head-bf16", "bf16"),
    ("layers in float16, not bfloat16", "bf16", "fp16"))


def repairs(border=0.05):
    """Write k3 with a cause and without it, and the longest responses that need no correction.

    The repair that removes the largest k3 stands first.
    """
    found = {name: float(row["k3_exact"]) for name, row in sizes.results().items()}

    def longest(k3):
        return "none" if k3 > border else f"{border / k3:.2g}" if k3 > border / 100 else (
            f"{round(border / k3, -1):.0f}" if k3 > 1e-7 else "any")
    measured = [row for row in REPAIRS if found.keys() >= {*row[1:]}]
    measured.sort(key=lambda row: found[row[2]] - found[row[1]])           # most is removed first
    lines = [[what, f"`{before}`", sizes.brief(found[before]), sizes.brief(found[after]),
              longest(found[before]), longest(found[after])] for what, before, after in measured]
    return markdown(["repair", "row", "k3", "after it", "tokens without a correction", "after it"],
                    lines)


def ranks(values):
    return [sorted(values).index(x) for x in values]


def predictions(common=0.1, samples=512):
    """Compare what the oracle says of each method's gradient with how the method's runs ended.

    Bias and standard deviation are those of `bias_and_std`. The error is that of a mean over
    `samples` responses.
    """
    study = yaml.safe_load((ROOT / "studies/nine/declared.yaml").read_text())
    lines, errors, outcomes = [], {}, {}
    for method in ("naive", "decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs",
                   "bypass_ppo_clip", "bypass_pg_is", "geo_rs_wide", "seq_is_cap_5",
                   "token_is_worst_token", "token_is_opsm"):
        k3, final = (mean_of(runs()["staleness_8"][method], name)
                     for name in ("k3", "final_accuracy"))
        given = study["methods"].get(method, {"correction.preset": method})
        given = {key.removeprefix("correction."): value for key, value in given.items()}
        if "rollout_rs" in given:
            given["rollout_rs"] = yaml.safe_load(given["rollout_rs"])
        config = from_dialect(given)
        cells = [bias_and_std(config, T, noise_with_k3(common, T)) for T in (2, 4, 8)]
        own = bias_and_std(config, 8, noise_with_k3(round(k3, 4), 8))
        error = (own[0] ** 2 + own[2] ** 2 / samples) ** 0.5
        errors[method], outcomes[method] = error, final
        lines.append([f"`{method}`", *map(priced, cells), f"{k3:.3f}", priced(own), f"{error:.2f}",
                      f"{final:.2f}"])

    def correlation(but=None):
        return "{:+.2f}".format(statistics.correlation(
            *(ranks([x for method, x in of.items() if method != but])
              for of in (errors, outcomes)))).replace("-", "−")

    header = ["method", *(f"k3 = {common}, T = {T}" for T in (2, 4, 8)), "its own k3",
              "at that, T = 8",
              f"error of {samples}", "final accuracy"]
    return markdown(header, lines) + (
        f"\n\nRank correlation of predicted error and final accuracy: {correlation()}; "
        f"without `bypass_ppo_clip`: {correlation('bypass_ppo_clip')}.")


def warnings():
    """Count how often a metric crossed its line before the mean reward fell, and false alarms.

    The reward is a mean of five steps, and it fell if it is 0.1 below its best.
    """
    rows = [row for of_regime in runs().values() for found in of_regime.values()
            for row in found.values()]
    fell = [row for row in rows if row["drop_step"]]
    lines = []
    for name, line in (("ess", "ESS/N below 0.5"), ("k3", "k3 above 0.02"),
                       ("grad_norm", "gradient norm above 2")):
        ahead = [int(row["drop_step"]) - int(row[f"warned_{name}"]) for row in fell
                 if row[f"warned_{name}"]]
        ahead = [steps for steps in ahead if steps > 0]
        vain = sum(bool(row[f"warned_{name}"]) for row in rows if not row["drop_step"])
        lines.append([line, f"{len(ahead)} of {len(fell)}", f"{statistics.median(ahead):.0f}",
                      f"{vain} of {len(rows) - len(fell)}"])
    return markdown(["limit", "crossed before a decline", "steps ahead, median", "false alarms"],
                    lines)


# ---------------------------------------------------------------------- the second study's results

@cache
def declared():
    """Read studies/sixty-four/declared.yaml."""
    return yaml.safe_load((ROOT / "studies/sixty-four/declared.yaml").read_text())


def ended_at_0(row):
    return float(row["final_accuracy"]) == 0


def below_start(row):
    return float(row["area"]) < float(row["first_accuracy"])


def families():
    """Return the contrasts of the second study's two families, judged."""
    seeds = declared()["judged"]["seeds"]
    return [judge(blocks, runs("sixty-four"), seeds)
            for blocks in ([declared()["judged"]], declared()["judged_later"])]


def judged_contrasts():
    """Return the contrasts of both families that have all their seeds."""
    return [x for family in families() for x in family if x.p is not None]


def of_contrasts(*wanted):
    """Return both mean areas, the difference and the verdict of each (regime, arm, other)."""
    found = {(x.regime, x.arm, x.other): x for x in judged_contrasts()}
    cells = []
    for one, other, separable in ((*found[key].rows, found[key].separable) for key in wanted):
        gap = "{:+.3f} ± {:.3f}".format(*paired(one, other, "area"))
        cells.append((*(f"{mean_of(rows, 'area'):.2f}" for rows in (one, other)), gap,
                      "yes" if separable else "no"))
    return cells


def study_64_findings():
    """Write the six findings of the second study: one contrast each, or one for each length."""
    _, seq, bypass = CORRECTIONS
    lengths = ("int4_fast_length_16", "int4_fast_length_32", "int4_fast")
    rows = {
        "Weights help": [("int4_fast", seq, "naive")],
        "Sequence weights give back most": [("int4_fast", "matched", seq)],
        "Bypass PPO fails on rounded weights": [("int4_fast", bypass, "naive")],
        "Bypass PPO works on stale weights": [("staleness_4", bypass, "naive")],
        "The gain is largest at 64 tokens": [(r, seq, "naive") for r in lengths],
        "Rejection alone helps, too": [("int4_fast", "decoupled_k3_rs", "naive")]}
    lines = []
    for n, (name, keys) in enumerate(rows.items(), 1):
        _, one, other = keys[0]
        found = [(f"`{key[0]}`", f"{a} against {b}", *rest)
                 for key, (a, b, *rest) in zip(keys, of_contrasts(*keys), strict=True)]
        lines.append([f"{n}. {name}", f"`{one}` against `{other}`",
                      *map(", ".join, zip(*found, strict=True))])
    return markdown(["finding", "compared", "regime", "mean areas", "difference, 95 %",
                     "separable"], lines)


def study_64_negatives():
    """Write what was tried beside the two weights, each against its own control."""
    token, seq, _ = CORRECTIONS
    tried = {"sequence instead of token weights": ("int4_fast", seq, token),
             "OPSM on top of token weights": ("int4_fast", "token_is_opsm", token),
             "prefix products instead of token weights": ("int4_fast", "prefix", token),
             "centered scores on top of token weights, bypass mode":
                 ("int4_fast", "score_centering", "bypass_pg_token_is"),
             "a bound on |π − μ|, no weights": ("int4_fast", "token_tv", "naive"),
             "a bound on the second moment, no weights":
                 ("int4_fast", "second_moment", "naive")}
    lines = [[name, f"`{one}`", f"`{other}`", *cells[2:]] for (name, (_, one, other)), cells
             in zip(tried.items(), of_contrasts(*tried.values()), strict=True)]
    return markdown(["tried", "arm", "compared with", "difference, 95 %", "separable"], lines)


def study_64_contrasts(family):
    """List every contrast of a family, run or not; a verdict needs all its seeds."""
    lines = []
    for x in family:
        n = len(x.rows[0]) if len(x.rows) == 2 else 0
        line = [f"`{x.regime}`", f"`{x.arm}` − {f'`{x.other}`' if x.other else 'best'}", n,
                "{:+.3f} ± {:.3f}".format(*x.difference()) if n > 1 else "",
                " : ".join(str(sum(map(ended_at_0, of.values()))) for of in x.rows) if n else ""]
        if x.p is not None:
            line += [f"{x.p:.4f}", f"{x.adjusted:.3f}",
                     "separable" if x.separable else "not separable"]
        else:
            line += ["", "", "not run to the end" if n else "not run"]
        lines.append(line)
    return markdown(["regime", "contrast", "seeds", "area, difference, 95 %", "ended at 0",
                     "p, signs", "Holm",
                     "verdict"], lines)


def adjusted_mcnemar(family):
    """Return the exact, adjusted p that both arms of a contrast end at 0 equally often."""
    return holm({i: mcnemar(*([ended_at_0(row) for row in rows.values()] for rows in x.rows))
                 for i, x in enumerate(family)})


def study_64_arms():
    """List every arm that has been run, by regime and area."""
    lines = []
    for regime, arms in runs("sixty-four").items():
        for arm, rows in sorted(arms.items(), key=lambda item: -mean_of(item[1], "area")):
            areas = [float(row["area"]) for row in rows.values()]
            deviation = f" ± {statistics.stdev(areas):.3f}" if areas[1:] else ""
            lines.append([f"`{regime}`", f"`{arm}`", len(rows),
                          f"{statistics.mean(areas):.3f}{deviation}",
                          f"{min(areas):.3f} to {max(areas):.3f}", f"{mean_of(rows):.2f}",
                          sum(map(below_start, rows.values())),
                          sum(map(ended_at_0, rows.values())), f"{mean_of(rows, 'ess_raw'):.2f}",
                          f"{mean_of(rows, 'k3'):.4f}", f"{100 * mean_of(rows, 'kept'):.0f} %",
                          f"{100 * mean_of(rows, 'clip_fraction'):.1f} %"])
    return markdown(["regime", "arm", "seeds", "area", "lowest to highest", "final", "below start",
                     "ended at 0", "ESS/N",
                     "k3", "kept", "clipped"], lines)


def study_64_empty():
    """Tabulate the control of mini-batches of which nothing is kept: three arms, two contrasts."""
    arms, lines = runs("sixty-four-empty")["int4_fast"], []
    declaration = yaml.safe_load(
        (ROOT / "studies/sixty-four-empty/declared.yaml").read_text())["judged"]
    for arm in dict.fromkeys(arm for pair in declaration["contrasts"] for arm in reversed(pair)):
        rows = arms[arm]
        empty = [int(row["empty_updates"]) for row in rows.values()]
        lines.append([f"`{arm}`", len(rows), spread(rows, "area", 3),
                      sum(map(below_start, rows.values())), sum(map(ended_at_0, rows.values())),
                      f"{100 * mean_of(rows, 'kept'):.0f} %", sum(map(bool, empty)), sum(empty)])
    return (markdown(["arm", "seeds", "area", "below start", "ended at 0", "kept",
                      "runs with an empty mini-batch", "such mini-batches"],
                     lines)
            + "\n\n" + judged_areas(runs("sixty-four-empty"), declaration))


def judged_areas(found, block):
    """Tabulate the contrasts of areas of one block of a declaration."""
    lines = [[f"`{x.arm}` − `{x.other}`",
              "{:+.3f} ± {:.3f}".format(*x.difference()), f"{x.p:.4f}",
              f"{x.adjusted:.3f}", "separable" if x.separable else "not separable"]
             for x in judge([block], found, block["seeds"]) if x.p is not None]
    return markdown(["contrast", "area, difference, 95 %", "p, signs", "Holm", "verdict"], lines)


def study_crossing():
    """Tabulate the study of responses that cross a weight update: four records, three contrasts."""
    study = yaml.safe_load((ROOT / "studies/crossing/declared.yaml").read_text())
    arms, lines = runs("crossing")["crossing"], []
    found = sorted(study["predicted"], key=lambda arm: -mean_of(arms[arm], "area"))
    for place, arm in enumerate(study["predicted"], 1):
        rows = arms[arm]
        lines.append([f"`{arm}`", place, found.index(arm) + 1, len(rows),
                      spread(rows, "area", 3), spread(rows, digits=3),
                      sum(map(below_start, rows.values())),
                      f"{mean_of(rows, 'ess_raw'):.2f}", f"{mean_of(rows, 'k3'):.1e}"])
    return (markdown(["arm", "predicted place", "place found", "seeds", "area",
                      "accuracy at the end", "below start", "ESS/N", "k3"], lines)
            + "\n\n" + judged_areas(runs("crossing"), study["judged"]))


REAL_ENDPOINTS = {"area": "area under the held-out accuracy",
                  "last_reward": "reward of the last five steps' rollouts"}


def papers():
    """Tabulate math/papers.yaml: each paper's equation, settings, and the tests of the equation."""
    named = {entry["id"]: entry for entry in yaml.safe_load(
        (ROOT / "math/references.yaml").read_text())}
    chapter_of = {label: path for path in sorted((ROOT / "math").glob("[0-9]*.md"))
                  for label in certified.DEFINED.findall(path.read_text())}
    proved = certified.statements()
    lines = []
    for row in yaml.safe_load((ROOT / "math/papers.yaml").read_text()):
        entry, chapter = named[row["paper"]], chapter_of[row["equation"]]
        first, _, others = entry["authors"].partition(",")
        who = first.split()[-1] if others else first
        tests = [x for x in proved if row["equation"] in x.labels]
        who += " et al." if others and "et al." not in who else ""
        lines.append([f"[{entry['title']}]({entry['link']}), {who}, {entry['year']}", row["adds"],
                      f"[{row['equation']}]({chapter.name})",
                      f"`{shlex.join(row['settings'])}`" if row["settings"] else "",
                      f"[`{tests[0].test}`](../tests/{tests[0].file})"
                      + (f" and {len(tests) - 1} more" if tests[1:] else "")])
    return markdown(["paper", "what it adds", "equation", "settings", "proved by"], lines)


def study_real():
    """Tabulate the study of a real model: the endpoints of each arm with three seeds or more."""
    lines = []
    for regime, arms in runs("real-card").items():
        ended = {arm: rows for arm, rows in arms.items() if len(rows) >= 3}
        for arm, rows in sorted(ended.items(), key=lambda item: -mean_of(item[1], "area")):
            lines.append([f"`{regime}`", f"`{arm}`", len(rows),
                          f"{mean_of(rows, 'first_accuracy'):.2f}",
                          *(spread(rows, name) for name in REAL_ENDPOINTS),
                          number(mean_of(rows, "k3")), f"{mean_of(rows, 'ess_raw'):.2f}"])
    return markdown(["regime", "arm", "seeds", "accuracy at the start",
                     *REAL_ENDPOINTS.values(), "k3", "ESS/N"], lines)


def study_real_contrasts():
    """Tabulate the declared contrasts of the real model that have three seeds or more."""
    study = yaml.safe_load((ROOT / "studies/real/declared.yaml").read_text())["judged"]
    lines = []
    for x in judge([study], runs("real-card"), study["seeds"]):
        if len(x.rows) == 2 and len(x.rows[0]) >= 3:
            verdict = "not all seeds yet" if x.p is None else (
                f"{'separable' if x.separable else 'not separable'}, {x.adjusted:.3f}")
            lines.append([f"`{x.regime}`", f"`{x.arm}` − `{x.other}`", len(x.rows[0]),
                          *("{:+.3f} ± {:.3f}".format(*x.difference(name))
                            for name in REAL_ENDPOINTS), verdict])
    return markdown(["regime", "contrast", "seeds",
                     *(f"{name}, difference, 95 %" for name in ("area", "rollouts' reward")),
                     "verdict on the area, Holm's p"], lines)


def study_lora():
    """Tabulate the study of a LoRA against full weights: three arms, two contrasts a regime."""
    study = yaml.safe_load((ROOT / "studies/lora/declared.yaml").read_text())
    regimes, lines, judged = runs("lora"), [], []
    for item in study["judged"]:
        regime, = item["regimes"]
        for arm, rows in sorted(regimes[regime].items()):
            lines.append([f"`{regime}`", f"`{arm}`", len(rows),
                          f"{mean_of(rows, 'first_accuracy'):.3f}",
                          spread(rows, "area", 3), spread(rows, digits=3),
                          sum(map(below_start, rows.values())), f"{mean_of(rows, 'k3'):.1e}"])
        judged.append(f"`{regime}`:\n\n" + judged_areas(regimes, item))
    head = ["regime", "arm", "seeds", "accuracy at the start", "area", "accuracy at the end",
            "below start", "k3"]
    return "\n\n".join([markdown(head, lines), *judged])


def study_lora_rates():
    """Tabulate the areas from which the learning rates of the LoRA's study were taken."""
    regimes = runs("lora-rates")
    areas = {regime: {arm: mean_of(rows, "area") for arm, rows in arms.items()}
             for regime, arms in regimes.items()}
    rates = sorted({arm.rpartition("_")[2] for arms in areas.values() for arm in arms}, key=float)
    lines = []
    for regime, found in areas.items():
        for kind in ("full", "lora", "lora_all"):
            best = max(found[arm] for arm in found if arm.rpartition("_")[0] == kind)
            cells = [found.get(f"{kind}_{rate}") for rate in rates]
            lines.append([f"`{regime}`", f"`{kind}`",
                          *("" if area is None else f"**{area:.3f}**" if area == best
                            else f"{area:.3f}" for area in cells)])
    return markdown(["regime", "arm", *rates], lines)


def said(steps):
    """Return what `diagnose` says on a run's first steps, by the metric that a sentence names."""
    sentences = [sentence for step in steps for sentence in diagnose(step)]
    return {sentence.split()[0] + (", uncorrected" if "nothing corrects it" in sentence else "")
            for sentence in sentences}


def study_64_warned():
    """Count the runs in which `diagnose` said a sentence by step 10, by how the run ended."""
    below, above, between, recorded = [], [], [], set[str]()
    names = ["is_ratio_mean", "kl", "k3_kl, uncorrected", *(row[0] for row in HEALTHY)]
    with (ROOT / "studies/sixty-four-warnings/results.csv").open() as file:
        for row in csv.DictReader(file):
            gain = float(row["final_accuracy"]) - float(row["first_accuracy"])
            group = below if gain < 0 else above if gain >= 0.1 else between
            steps = json.loads(row["steps"])
            group.append(said(steps))
            recorded |= {name.removeprefix("rollout_corr/") for step in steps for name in step}
    lines = []
    counted = {name: [sum(name in found for found in group) for group in (below, between, above)]
               for name in names}
    for name, counts in counted.items():
        if any(counts):
            lines.append([f"`{name}`" if "," not in name
                          else "`k3_kl`, with nothing that corrects it", *counts])
    silent = [name for name, counts in counted.items() if not any(counts)]
    for known, cell in ((True, 0), (False, "not recorded")):
        if group := [f"`{name}`" for name in silent if (name in recorded) == known]:
            lines.append([", ".join(group), cell, cell, cell])
    lines.append(["any sentence",
                  *(f"{sum(map(bool, group))}" for group in (below, between, above))])
    lines.append(["runs", *map(len, (below, between, above))])
    return markdown(["sentence about", "ended below their start", "up to 0.1 above",
                     "at least 0.1 above"], lines)


def study_64_score():
    """Compare the oracle's prediction, committed with the declaration, with what was found.

    The rows are those of the seeds that all arms have.
    """
    predicted = declared()["predicted"]
    arms = runs("sixty-four")["int4_fast"]
    there = [arm for arm in predicted["int4_order"] if arm in arms]
    unplaced = [arm for arm in predicted["int4_fail"] if arm in arms and arm not in there]
    seeds = set.intersection(*(set(arms[arm]) for arm in there + unplaced))
    rows = {arm: {seed: arms[arm][seed] for seed in seeds} for arm in there + unplaced}
    found = sorted(there, key=lambda arm: -mean_of(rows[arm], "area"))
    lines, fails = [], ["no", "yes"]
    for arm in there + unplaced:
        places = [order.index(arm) + 1 if arm in order else "" for order in (there, found)]
        start = mean_of(rows[arm], "first_accuracy")
        rises = [mean_of(rows[arm], what) - start for what in ("area", "final_accuracy")]
        lines.append([f"`{arm}`", len(seeds), *places, fails[arm in predicted["int4_fail"]],
                      fails[rises[1] < 0],
                      *(f"{rise:+.3f}" for rise in rises)])
    return markdown(["arm", "seeds", "place predicted", "found", "to end below its start", "found",
                     "area − start",
                     "final − start"], lines)


def study_64_shares():
    """Write the shares of the first update's tokens beyond either end of the clip, by A's sign.

    No arm has moved before that update, so its ratio is what μ makes of a token.
    """
    merged = {}  # regimes that differ by what comes later have the same first update
    for regime, arms in runs("sixty-four").items():
        if "rollout.quantize_bits" in declared()["regimes"][regime] and "bypass_ppo_clip" in arms:
            # This arm alone is taken: `_again` counts only the first of its two micro-batches.
            seeds = arms["bypass_ppo_clip"]
            shares = [100 * mean_of(seeds, f"{end}_{sign}")
                      for end in ("below", "above") for sign in ("negative", "positive")]
            merged.setdefault((len(seeds), *(f"{x:.2f} %"
                                             for x in shares)), []).append(f"`{regime}`")
    lines = []
    for (seeds, *four), names in merged.items():
        low_neg, low_pos, high_neg, high_pos = four
        lines += [[f"{', '.join(names)}: {seeds} seeds", "below 0.8", f"**{low_neg}, dropped**",
                   low_pos],
                  ["", "above 1.2", high_neg, f"**{high_pos}, dropped**"]]
    return markdown(["regimes", "ratio π_θ/μ", "A < 0", "A > 0"], lines)


def study_64_ends():
    """Compare arms by how much of the clip around μ they have, seed by seed."""
    arms, against = runs("sixty-four")["int4_fast"], ("bypass_ppo_clip", "decoupled_token_is")
    lines = [[f"`{arm}`", spread(arms[arm], "area"),
              *("" if arm == other
                else "{:+.3f} ± {:.3f}".format(*paired(arms[arm], arms[other], "area"))
                for other in against),
              sum(map(below_start, arms[arm].values())),
              sum(map(ended_at_0, arms[arm].values()))]
             for arm in ("bypass_ppo_clip", "bypass_high_open", "bypass_low_open", "bypass_open",
                         "bypass_pg_is", "decoupled_token_is", "decoupled_seq_is")]
    return markdown(["arm", "area", *(f"minus `{other}`, 95 %" for other in against),
                     "area below the start", "ends at 0"], lines)


def real_run_summary():
    """Return the caption of the README's figure."""
    arms = runs("real-card")["coarse"]
    ends = {arm: f"{mean_of(rows, 'last_reward'):.2f}" for arm, rows in arms.items()}
    first = mean_of(arms["disabled"], "first_reward")
    float8 = float(sizes.results()["float8-e4m3"]["k3_exact"])
    return f"""\
*SmolLM2-135M learns to add; its engine's weights have six bits (k3 {mean_of(arms["disabled"], "k3"):.2f} a token; float8: {float8:.2f}). The engine's answers
earn {first:.2f} in the first step and, over the last five of twenty, {ends["matched"]} without rounding, {ends["disabled"]} uncorrected, {ends["decoupled_token_is"]}
with token weights, and {ends["bypass_ppo_clip"]} with `bypass_ppo_clip`, verl's default in bypass mode. Means over {min(map(len, arms.values()))} seeds ([12]).*"""  # noqa: E501


def mean_area(regime, arm):
    """Write the mean area of an arm of the second study, nothing where it was not run."""
    rows = runs("sixty-four").get(regime, {}).get(arm)
    return f"{mean_of(rows, 'area'):.2f}" if rows else ""


def mean_final(regime, arm):
    """Write the mean final accuracy of a method of the first study, nothing where not run."""
    rows = runs().get(regime, {}).get(arm)
    return f"{mean_of(rows):.2f}" if rows else ""


def two_k3(arms, names=("naive", "decoupled_token_is")):
    """Write k3 per token of two arms: the median over the seeds of a run's mean."""
    return " → ".join(f"{statistics.median(float(row['k3']) for row in arms[name].values()):.2g}"
                      for name in names)


def advice():
    """Tabulate the means behind what the two studies recommend, and the k3 of each regime."""
    arms = ("naive", *CORRECTIONS, "bypass_pg_is")
    regimes = {
        "four bits, larger learning rate": "int4_fast",
        "four bits, a third of that rate": "int4_slow", "five bits": "int5", "six bits": "int6",
        "four bits, 128 tokens": "int4_fast_length_128", "four steps stale": "staleness_4",
        "four bits and four steps stale": "int4_staleness_4"}
    lines = [[name, f"`{regime}`", two_k3(runs("sixty-four")[regime]),
              *(mean_area(regime, arm) for arm in arms)] for name, regime in regimes.items()]
    nine = {"eight steps stale": "staleness_8", "four bits and four steps stale":
            "int4_staleness_4", "six bits, on time": "matched"}
    for name, regime in nine.items():
        lines.append([f"nine tokens: {name}", f"`{called(regime)}`", two_k3(runs()[regime]),
                      *(mean_final(regime, arm) if len(runs()[regime].get(arm, ())) > 2 else ""
                        for arm in arms)])
        if regime == "staleness_8":
            lines.append(["nine tokens: the same at 3/10 of the learning rate", f"`{regime}`",
                          two_k3(runs()[regime], ("small_steps", "small_steps_token_is")),
                          mean_final(regime, "small_steps"),
                          *(mean_final(regime, f"small_steps_{name}")
                            for name in ("token_is", "seq_is", "bypass_ppo_clip")), ""])
    return markdown(["situation", "regime", "k3 per token", *(f"`{arm}`" for arm in arms)], lines)


def advice_rows():
    """Write the README's short form of the advice: five situations, numbers of the same runs."""
    token, seq, bypass = CORRECTIONS
    small = [float(mean_final("staleness_8", f"small_steps_{name}"))
             for name in ("token_is", "seq_is", bypass)]
    both, late = "int4_staleness_4", "staleness_4"
    rows = [
        ["coarse weights in the engine", f"`{seq}`, not `{bypass}`",
         f"four bits: {mean_area('int4_fast', seq)} against {mean_area('int4_fast', 'naive')}"],
        ["a few steps stale, small learning rate", f"`{bypass}`, the cheapest",
         f"four steps: {mean_area(late, bypass)} against {mean_area(late, 'naive')}"],
        ["many steps stale", "a smaller learning rate, and any of these presets",
         f"eight steps, at that rate: {min(small):.2f} against "
         f"{mean_final('staleness_8', 'small_steps')}"],
        ["coarse and stale", f"`{seq}`",
         f"four bits, four steps: {mean_area(both, seq)} against {mean_area(both, 'naive')}"],
        ["on time and finely rounded", f"`{token}`, a small gain",
         f"six bits: {mean_area('int6', token)} against {mean_area('int6', 'naive')}"]]
    headers = ["your situation", "take", "accuracy, against no correction (`disabled`)"]
    return markdown(headers, rows) + (
        "\n\nAccuracy is averaged over training, on answers of 64 tokens; for eight steps it is "
        "the final one, on nine tokens.")


def rates(name, which=0):
    """Copy a table of rates, which takes hours to make, from the file that its script has written.

    `which`: the first, second … table of the file.
    """
    text = (ROOT / "doctor" / name).read_text()
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return found[which].rstrip()


TABLES = {"doctor-rates": lambda: rates("rates.txt", 0),
          "doctor-sizes": lambda: rates("rates.txt", 1),
          "real-rates": lambda: rates("real-rates.txt", 0),
          "real-rates-trained": lambda: rates("real-rates.txt", 1),
          "rescore-rates": lambda: rates("rescore-rates.txt"),
          "real-run-summary": real_run_summary, "advice": advice,
          "advice-rows": advice_rows, "study-64-findings": study_64_findings,
          "study-64-negatives": study_64_negatives,
          "study-64-contrasts": lambda: study_64_contrasts(families()[0]),
          "study-64-later": lambda: study_64_contrasts(families()[1]),
          "study-64-arms": study_64_arms,
          "study-64-warned": study_64_warned, "study-64-empty": study_64_empty,
          "study-crossing": study_crossing,
          "study-lora": study_lora, "study-lora-rates": study_lora_rates,
          "study-64-rounding": lambda: study_rounding("sixty-four", "area"),
          "study-64-score": study_64_score,
          "study-64-shares": study_64_shares,
          "study-64-ends": study_64_ends,
          "versions-crossing": lambda: markdown(*versions.table(versions.crossing)),
          "versions-overlong": lambda: markdown(*versions.table(versions.overlong)),
          "versions-selection": lambda: markdown(*versions.selection()),
          "words-prediction": lambda: markdown(*words.prediction()),
          "words-place": lambda: markdown(*words.pushes()),
          "words-ends": lambda: markdown(*words.ends()),
          "merging": lambda: markdown(*merging.table()),
          "sizes": sizes_in_short, "sizes-whole": lambda: markdown(*sizes.table()),
          "size-borders": size_borders,
          "repairs": repairs,
          "turns-tools": lambda: markdown(*turns.of_tools()),
          "turns-lengths": lambda: markdown(*turns.of_lengths()),
          "turns-spelling": lambda: markdown(*turns.of_spelling()),
          "route-prices": lambda: markdown(*routes.sizes()),
          "route-answer": lambda: markdown(*routes.answer()),
          "route-errors": lambda: markdown(*routes.planted()),
          "study-on-time": lambda: study("matched"),
          "study-staleness-8": lambda: study("staleness_8"),
          "study-int4": lambda: study("int4_staleness_4"),
          "study-vllm": lambda: study("vllm_bf16_staleness_8"), "study-rounding": study_rounding,
          "study-frontier": study_frontier,
          "study-predictions": predictions, "study-warnings": warnings,
          "certified": lambda: markdown(*certified.table()),
          "batch-size": batch_size, "presets": presets, "criteria": criteria,
          "losses": losses, "kl-table": kl_table,
          "prices-presets": lambda: prices(exact_and_presets()),
          "prices-bypass": lambda: prices(METHODS_IN_BYPASS),
          "prices-decoupled": lambda: prices(METHODS_DECOUPLED),
          "healthy": healthy, "metrics": metrics, "settings": settings, "gpus": gpus,
          "papers": papers, "thousand": lambda: markdown(*prices_of.thousand()),
          "study-real": study_real, "study-real-contrasts": study_real_contrasts,
          "gradient-field": gradient_field}
TABLES |= {f"path-{n}": partial(paths.foot, n) for stops in paths.PATHS.values() for n in stops}


# Each takes the processor three seconds or more; `--check --quick` looks at the others alone.
SLOW = ("gradient-field", "batch-size", "words-ends", "words-prediction", "route-prices",
        "route-errors", "study-predictions")


@cache
def block(name):
    return f"<!-- begin: {name} -->\n{TABLES[name]()}\n<!-- end: {name} -->"


def main(arguments):
    stale, names = {}, [x for x in TABLES if "--quick" not in arguments or x not in SLOW]
    for path in [ROOT / "README.md", ROOT / "interop/README.md",
                 *sorted((ROOT / "math").glob("*.md"))]:
        old = path.read_text() if path.exists() else ""
        marked = re.compile("<!-- begin: (" + "|".join(names) + r") -->.*?<!-- end: \1 -->",
                            re.DOTALL)
        new = marked.sub(lambda found: block(found[1]), old)
        if new != old:
            stale[path] = new
    for path, new in stale.items():                  # once all tables are there
        if "--check" not in arguments:
            path.write_text(new)
        print(("stale: " if "--check" in arguments else "written: ") + str(path.relative_to(ROOT)))
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors: threads would only wait for one another
    raise SystemExit(main(sys.argv[1:]))
