"""Several test files of the core start from these policies, batches and configurations.

Responses come from μ = MU unless a test says otherwise; PI is π_θ, OLD π_old, REF the reference.
The oracle enumerates all their sequences, so an expectation is a sum. STEADY is the profile of the
property tests.
"""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, settings

from three_policies.checks import interval
from three_policies.estimators import chi_square
from three_policies.losses import AGGREGATIONS, LossConfig, policy_loss
from three_policies.oracle import (Policy, estimator_moments, f64, rewards)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.ratios import exp_ratio
from three_policies.rejection import CRITERIA

# Every run has the same examples, and none judges the speed of the machine.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", STEADY)
settings.load_profile("steady")


# -------------------------------------------------------- policies of which every sequence is known

PI = Policy(3, 3, seed=0)
MU, OLD, REF = PI.perturbed(1, 0.5), PI.perturbed(2, 0.3), PI.perturbed(3, 0.7)
MASK, R = PI.mask, rewards(PI)
A = R.expand(-1, 3)
SUM, PLAIN = "seq-mean-token-sum", math.inf                         # C = ∞: nothing is truncated


# ----------------------------------------------------------------------------------- configurations

# Criteria that tests know by hand; of a new row of CRITERIA they know nothing but that row.
KNOWN = (*(f"{of}_{kind}" for of in ("token", "seq_sum", "seq_mean", "seq_max")
           for kind in ("k1", "k2", "k3")), "opsm", "token_tv", "token_tv_outward", "seq_mean_tv",
         "token_binary_kl", "seq_mean_binary_kl", "vaco", "second_moment")


def bound_of(criterion, pair, number):
    """Return a pair if the criterion's bound is one, and else a number."""
    return pair if CRITERIA[criterion].read is interval else number


LOSS_TYPES = ("ppo_clip", "gspo", "cispo", "sapo")
MODES = [*itertools.product((False, True), LOSS_TYPES), (True, "reinforce")]


def named(mode):
    return f"{'bypass' if mode[0] else 'decoupled'} {mode[1]}"


def config_of(mode, *settings):
    """Return a config in one of MODES: level, threshold, batch normalisation, rejection."""
    return Config(*settings, bypass_mode=mode[0], loss_type=mode[1])


every_mode = pytest.mark.parametrize("mode", MODES, ids=named)
every_aggregation = pytest.mark.parametrize("how", AGGREGATIONS)
every_denominator = pytest.mark.parametrize("denominator", ["fixed", "kept"])


def reinforce(level=None, threshold=PLAIN, **options):
    """Return a config of REINFORCE with weights of a level, truncated at the threshold."""
    return Config(level, threshold, bypass_mode=True, loss_type="reinforce", **options)


# -------------------------------------------------------- what a configuration does, by enumeration

def moments(config, pi=PI, old=OLD, mu=MU, advantages=A, batch=1, **options):
    """Return the moments of ∇policy_loss on one sequence of μ (or `batch` of them).

    Tokens are summed. `options` are the fields of LossConfig.
    """
    lp, old_lp, mu_lp = pi.log_probs(), old.log_probs().detach(), mu.log_probs().detach()
    def loss(i):
        return policy_loss(lp[i], old_lp[i], mu_lp[i], advantages[i], pi.mask[i], config,
                           LossConfig(aggregation=SUM, **options))[0]
    return estimator_moments(pi, mu, loss, batch)


# ------------------------------------------------------------------------------------------ batches

GOOD = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [False] * 3])
X = f64([[0.1, -0.3, 9.0], [0.5, 9.0, 9.0], [0.2, 0.4, -0.9], [9.0] * 3])
RATIOS = f64([[2.0, 0.5, 1.0], [4.0, 1.0, 1.0]])        # Πρ = 1 and 4; their roots 1 and 4^(1/3)


def batch(seed=0, rows=6, T=5, junk=0.0):
    """Draw log-probs and lengths: (log_prob, old, rollout, advantages, mask)."""
    generator = torch.Generator().manual_seed(seed)
    base, *noise, advantages = torch.randn(5, rows, T, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.randint(1, T + 1, (rows, 1), generator=generator)
    policies = [torch.where(mask, base - 2 + 0.4 * x, junk) for x in noise]
    return policies[0].requires_grad_(), *policies[1:], torch.where(mask, advantages, junk), mask


def chi_square_of(log_rho, mask):
    """Return χ² of the log-ratios that a mask leaves, by `chi_square` of their two moments."""
    rho = torch.where(mask.bool(), exp_ratio(log_rho.double()), 0.0)
    return chi_square(mask.bool().sum(), rho.square().sum())


# ---------------------------------------------------------------------------- aggregation, by lists

def by_loops(values, mask, mode, counted, horizon):
    """Aggregate values over `mask`, dividing by what `counted` counts, one number at a time."""
    some = [any(column) for column in zip(*counted.tolist())]
    last = max((t for t, there in enumerate(some) if there), default=-1)
    total, horizon = 0.0, horizon or len(some) - some[:last].count(False)
    for row, kept, on in zip(values.tolist(), mask.tolist(), counted.tolist()):
        divide = {"seq-mean-token-mean": max(sum(on), 1),
                  "seq-mean-token-sum-norm": horizon}.get(mode, 1)
        total += sum(x for x, k in zip(row, kept) if k) / divide
    if mode == "token-sum":
        return total
    number = sum if mode == "token-mean" else any
    return total / sum(number(on) for on in counted.tolist())
