"""centering.py computes the equation of score centering, with any criteria of tokens.

Responses come from μ = MU. Expected values are written out as sums over states and tokens, not
through the code under test. Run with -s to see the biases.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from three_policies.centering import candidate_tables, centering_loss
from three_policies.correction import Correction, correct
from three_policies.losses import Counts, LossConfig, policy_loss
from three_policies.oracle import (Policy, close, estimator_moments, exact_gradient, f64, grad_J,
                                   rewards)
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.examples import MASK, PI, R, SUM, reinforce

MU = PI.perturbed(1, 0.8)
LP, MU_LP = PI.log_probs(), MU.log_probs().detach()
EVERY = PI.step_log_probs(), MU.step_log_probs().detach()           # log π(v|s), log μ(v|s): [S, V]
CANDIDATES = tuple(x[PI.states] for x in EVERY)                     # [N, T, V]


def mean_gradient(config, advantages, candidates=CANDIDATES, pi=PI, mu=MU, lp=LP, mu_lp=MU_LP):
    """Return −E_μ[∇policy_loss], which is to be compared with ∇J."""
    def loss(i):
        given = None if candidates is None else tuple(x[i] for x in candidates)
        return policy_loss(lp[i], mu_lp[i], mu_lp[i], advantages[i].expand(-1, pi.T), pi.mask[i],
                           config, LossConfig(aggregation=SUM),
                           candidates=given)[0]
    return -estimator_moments(pi, mu, loss).mean


# --------------------------------------------------------------------- the gradient, token by token

CENTERED = [reinforce(None, 2.0), reinforce("token", 0.9), reinforce("token", (0.7, 1.4)),
            reinforce(None, 2.0, rollout_rs={"token_k1": (0.8, 1.2)}),
            reinforce("token", math.inf, rollout_rs={"token_tv": 0.05}),
            reinforce("token", 2.0, rollout_rs={"token_tv_outward": 0.05, "token_k3": 0.2})]


@certifies("float64")
@pytest.mark.parametrize("config", CENTERED, ids=str)
def test_a_constant_advantage_moves_nothing_once_scores_are_centered(config):
    """eq:score-centering: E_μ[w g − E_μ[w g | s]] = 0 holds in every state.

    Without centering only the untruncated ρ has that.
    """
    for constant in (1.0, -2.0):
        advantages = torch.full_like(R, constant)
        drift = mean_gradient(config, advantages, None).norm().item()
        print(f"{config.rollout_is} {config.rollout_is_threshold} {config.rollout_rs}: "
              f"drift {drift:.3f}")
        assert drift > 1e-2
        assert mean_gradient(replace(config, score_centering=True), advantages).abs().max() < 1e-12
    assert mean_gradient(reinforce("token", math.inf), torch.ones_like(R), None).abs().max() < 1e-12


def weight_of(config, log_rho, log_mu, advantage):
    """Return w(v) of one token, from its definition."""
    rho, mu, keep = math.exp(log_rho), math.exp(log_mu), True
    for name, bound in config.rollout_rs.items():
        if name == "token_k1":
            keep &= bound[0] <= rho <= bound[1]
        elif name == "token_k3":
            keep &= rho - 1 - log_rho <= bound
        elif name == "token_tv":
            keep &= abs(mu * rho - mu) <= bound
        elif name == "token_tv_outward":
            keep &= not ((advantage > 0 and mu * rho - mu > bound)
                         or (advantage < 0 and mu - mu * rho > bound))
    if config.rollout_is is None:
        return float(keep)
    bound = config.rollout_is_threshold
    return keep * (rho * (bound[0] <= rho <= bound[1]) if isinstance(bound, tuple)
                   else min(rho, bound))


def by_hand(config, advantages, centered):
    """Return Σ_y μ(y) Σ_t A (w g − Σ_v μ(v) w(v) ∇log π(v)), token by token."""
    log_pi, log_mu = EVERY[0].detach(), EVERY[1]
    total = torch.zeros_like(PI.logits)
    for row in range(len(MASK)):
        for t in range(PI.T):
            if not MASK[row, t]:
                continue
            state, token = PI.states[row, t].item(), PI.tokens[row, t].item()
            advantage = advantages[row].item()
            for v in range(PI.V):
                log_rho = (log_pi - log_mu)[state, v].item()
                w = weight_of(config, log_rho, log_mu[state, v].item(), advantage)
                share = float(v == token) - (log_mu[state, v].exp().item() if centered else 0.0)
                score = -log_pi[state].exp()
                score[v] += 1.0
                total[state] += MU.probs()[row].item() * advantage * share * w * score
    return total.flatten().detach()


def test_tables_of_different_sizes_become_one_tensor():
    """A token's candidates keep their order; −∞ stands where there are fewer, and off the mask."""
    mask, none = torch.tensor([[True, True], [False, True]]), -math.inf
    first = torch.tensor([[7, 3, 1], [4, 0, 0]]), torch.tensor([[-1, -2, none], [-0.5, none, none]])
    second = torch.tensor([[5, 6, 2]]), torch.tensor([[-3, -4, none]])
    ids, log_mu = candidate_tables([first, second], mask)
    assert ids.tolist() == [[[7, 3], [4, 0]], [[0, 0], [5, 6]]] and ids.dtype == torch.int64
    assert log_mu.tolist() == [[[-1, -2], [-0.5, none]], [[none, none], [-3, -4]]]


def test_candidates_that_hold_a_little_more_than_all_of_mu_leave_no_rest():
    """Rounded log-probs add up to more than 1; what remains is then nothing, not a NaN."""
    more = EVERY[1] + 1e-6
    found = mean_gradient(CENTERED[0], R, (CANDIDATES[0], more[PI.states]))
    exact = mean_gradient(CENTERED[0], R)
    assert found.isfinite().all() and (found - exact).abs().max() < 1e-4


def test_rounding_is_no_token_that_an_exact_weight_makes_large():
    """1 − Σμ of candidates that hold all of μ is rounding, and C = ∞ would make π's rest of it."""
    generator = torch.Generator().manual_seed(0)
    log_pi = torch.randn(1, 200, 50, generator=generator).log_softmax(-1)
    ids = log_pi.topk(8).indices                              # μ is cut to these, π is not
    log_mu = (log_pi + torch.randn(log_pi.shape, generator=generator)).gather(-1, ids)
    log_mu, ones = log_mu.log_softmax(-1), torch.ones(1, 200)
    config = reinforce("token", math.inf, score_centering=True)
    found, exact = (centering_loss(lp, mu, ones.to(lp), ones, config) for lp, mu in (
        (log_pi.gather(-1, ids), log_mu),
        (log_pi.gather(-1, ids).double(), log_mu.double().log_softmax(-1))))
    # All terms have one sign. A hundredth is far above rounding; the rest was up to the whole mean.
    assert ((found - exact).abs() < 0.01 * exact.abs()).all()


@certifies("float64")
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("config", CENTERED, ids=str)
def test_the_centered_gradient_is_its_formula(config, centered):
    """eq:score-centering: the gradient is the formula's, for advantages of both signs."""
    advantages = R - R.mean()
    found = mean_gradient(replace(config, score_centering=centered), advantages)
    assert close(found, by_hand(config, advantages, centered))


def test_centering_subtracts_the_mean_of_whatever_is_done_to_a_sampled_token():
    """The subtracted mean is that of the state: rejecting a token does not change it."""
    config = reinforce("token", 2.0, rollout_rs={"token_k1": (50.0, None)}, score_centering=True)
    assert not correct(LP, MU_LP, MASK, config).mask.any()
    assert close(mean_gradient(config, R), by_hand(config, R, True))


@certifies("float64")
@pytest.mark.parametrize("name", ["token_tv", "token_tv_outward"])
@pytest.mark.parametrize("bound", [0.02, 0.1, 0.3])
def test_ipo_and_dppo_are_their_formulas(name, bound):
    """eq:total-variation: the gradient is E_μ[Σ ρ A 1[kept] g], and a bound masks a part of it."""
    config, advantages = reinforce("token", math.inf, rollout_rs={name: bound}), R - R.mean()
    found = mean_gradient(config, advantages, None)
    assert close(found, by_hand(config, advantages, False))
    whole = mean_gradient(reinforce("token", math.inf), advantages, None)
    share = (found - whole).norm() / grad_J(PI, R).norm()
    print(f"{name} ≤ {bound}: {share:.3f} of |∇J| is masked away")
    assert (found - whole).norm() > 1e-4


# --------------------------------------------------------------------- what no candidate stands for

@certifies("float64")
@pytest.mark.parametrize("level", [None, "token"])
def test_what_no_candidate_stands_for_is_taken_in_proportion(level):
    """eq:score-centering: few candidates are exact if the rest of μ is in proportion to π's."""
    V, K = 5, 2
    pi = Policy(V, 2, seed=3)
    tilted, head = pi.logits.detach().clone(), pi.logits.detach().topk(K).indices           # [S, K]
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(4)).double()
    tilted.scatter_add_(1, head, noise)
    biases = []
    for logits in (tilted, pi.perturbed(5, 0.8).logits.detach()):
        mu = pi.perturbed(5, 0.8)
        mu.logits = logits.clone().requires_grad_()
        lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
        few = tuple(x.gather(1, head)[pi.states]
                    for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
        config = reinforce(level, 0.9, score_centering=True)
        drift = mean_gradient(config, torch.ones_like(rewards(pi)), few, pi, mu, lp, mu_lp)
        biases.append(drift.norm().item())
    print(f"{level}: drift with {K} of {V} tokens {biases}")
    assert biases[0] < 1e-12 < 1e-3 < biases[1]


@pytest.mark.parametrize("name", ["token_tv", "token_tv_outward"])
def test_a_tail_of_many_tokens_is_not_judged_as_one(name):
    """eq:total-variation: a lump's |Σπ − Σμ| is 0.2, that of each of its ten tokens 0.02.

    The bound is one for tokens, so the tokens stay, and so does the lump.
    """
    logits = f64([[0.7] + [0.03] * 10]).log(), f64([[0.5] + [0.05] * 10]).log()
    pi, mu = Policy(11, 1), Policy(11, 1)
    pi.logits, mu.logits = (x.clone().requires_grad_() for x in logits)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
    one = tuple(x[:, :1].expand(len(lp), 1, 1)
                for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
    for level in (None, "token"):
        config = reinforce(level, rollout_rs={name: 0.1})
        ones = torch.ones(len(lp), 1).double()
        plain, centered = (
            mean_gradient(replace(config, score_centering=on), ones, one, pi, mu, lp, mu_lp).norm()
            for on in (False, True))
        assert plain > 0.05 and centered < 1e-12


def tail_of(V, K, seed, size):
    """Draw π and μ over V tokens, μ's K likeliest first: [V] twice, and [1, 1, K] candidates."""
    g = torch.Generator().manual_seed(seed)
    logits, noise = 1.5 * torch.randn(V, generator=g).double(), size * torch.randn(V, generator=g)
    order = (logits + noise).argsort(descending=True)
    log_pi, log_mu = (x[order].log_softmax(-1) for x in (logits, logits + noise))
    return log_pi, log_mu, log_mu[None, None, :K]


def drift_of(log_pi, log_mu, candidates, bound, keep=True):
    """Return what centering leaves of E_μ[w g] with C = ∞ and token_tv, in logits: [V].

    Without `keep`, the lump goes where its own |Σπ − Σμ| is above the bound.
    """
    K, logits = candidates.shape[-1], log_pi.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    stays = ((log_pi.exp() - log_mu.exp()).abs() <= bound).double()
    plain = -(stays * log_pi.exp() * log_p).sum()                       # −E_μ[w log π], w = ρ·κ
    config = reinforce("token", math.inf, rollout_rs={"token_tv": bound}, score_centering=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    centering = centering_loss(log_p[None, None, :K], candidates, one, one, config).sum()
    rest, of_mu = (x[K:].exp().sum() for x in (log_p, log_mu))
    if not keep and (rest - of_mu).abs() > bound:
        centering = centering - rest.detach() * rest.log()
    return torch.autograd.grad(plain + centering, logits)[0]


@pytest.mark.parametrize("bound", [0.05, 0.1, 0.2])
def test_a_lump_that_is_kept_is_exact_if_no_token_of_it_goes(bound):
    """eq:total-variation: it goes only with more than δ; μ's K + 1st has at most 1/(K + 1).

    So with K ≥ 1/δ − 1 candidates the drift is 0, unless π gives one of the others more than δ.
    """
    enough, exact, exceptions = math.ceil(1 / bound) - 1, 0, 0
    for V, K in itertools.product((3, 8, 32), (1, 2, enough)):
        if K >= V:
            continue
        for seed in range(40):
            log_pi, log_mu, few = tail_of(V, K, seed, 1.0)
            tail_pi, tail_mu = log_pi[K:].exp(), log_mu[K:].exp()
            stays = (tail_pi - tail_mu).abs().max() <= bound
            drift = drift_of(log_pi, log_mu, few, bound).norm().item()
            assert (drift < 1e-12) == stays.item()
            exact += stays.item()
            if K == enough and not stays:
                exceptions += 1
                assert tail_pi.max() > bound >= tail_mu.max()
    print(f"δ = {bound}: exact {exact} times; with {enough} candidates {exceptions} are not")
    assert exact > 50


def test_a_lump_of_many_tokens_is_better_kept_than_judged_as_one():
    """eq:score-centering: over 1 000 tokens judging it drifts always, over three it is exact.

    δ = 0.05; the root mean square of the drift over 40 pairs of policies.
    """
    sizes = {}
    for V, K in ((1000, 64), (1000, 16), (3, 2)):
        for keep in (True, False):
            found = torch.stack([drift_of(*tail_of(V, K, seed, 1.0), 0.05, keep)
                                 for seed in range(40)]).norm(dim=-1)
            sizes[V, K, keep] = found.square().mean().sqrt().item()
            print(V, K, "kept" if keep else "judged", f"{sizes[V, K, keep]:.4f}",
                  f"{(found > 1e-12).double().mean():.2f} of the pairs")
    for K in (16, 64):
        assert 3 * sizes[1000, K, True] < sizes[1000, K, False]
    assert sizes[3, 2, False] < 1e-12 < 0.05 < sizes[3, 2, True]


@pytest.mark.parametrize("rest", [0.3, 0.01, 1e-5, 1e-7])
def test_a_small_tail_is_a_tail_all_the_same(rest):
    """A tail's probability and the gradient of its log π are not limited above rounding."""
    share = f64([[0.6, 0.4 - rest, rest]])
    pi, mu = Policy(3, 1), Policy(3, 1)
    of_mu = f64([[0.5, 0.5 - 2 * rest / 3, 2 * rest / 3]])
    pi.logits, mu.logits = share.log().requires_grad_(), of_mu.log().requires_grad_()
    few = tuple(x[:, :2].expand(3, 1, 2)
                for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
    whole = tuple(x.expand(3, 1, 3) for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
    config, ones = reinforce(score_centering=True), torch.ones(3, 1, dtype=torch.float64)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
    found, expected = (mean_gradient(config, ones, given, pi, mu, lp, mu_lp)
                       for given in (few, whole))
    assert found.abs().max() < 1e-12 and expected.abs().max() < 1e-12


# ----------------------------------------------------------------------- dtypes, padding and errors

def test_candidates_in_half_precision_are_promoted_before_they_are_subtracted():
    """1 − Σπ of bfloat16 log-probs is formed in float32: only their own rounding remains."""
    config, ones = reinforce("token", 0.9, score_centering=True), torch.ones_like(R).expand(-1, 3)
    halves = tuple(x[..., :2].detach().bfloat16() for x in CANDIDATES)
    gradients = []
    for given in (halves, tuple(x.double() for x in halves)):
        log_pi = given[0].clone().requires_grad_()
        loss, _ = policy_loss(LP.detach(), MU_LP, MU_LP, ones, MASK, config,
                              LossConfig(aggregation=SUM), candidates=(log_pi, given[1]))
        gradients.append(torch.autograd.grad(loss, log_pi)[0].double())
    # Only the gradient itself is rounded to bfloat16. Before that come a few roundings of float32.
    off, size = (gradients[0] - gradients[1]).abs(), gradients[1].abs()
    assert (off <= 2 ** -8 * size + 2 ** -18 * size.max()).all()


def test_with_kept_counts_a_rejected_row_is_divided_by_its_own_length():
    """eq:aggregation: the centering of a wholly rejected response is a mean over its tokens."""
    rows, config = MASK.sum(-1) == 3, reinforce(score_centering=True)
    nothing = Correction(None, torch.zeros_like(MASK[rows]))

    def loss(mode):
        return policy_loss(LP[rows], MU_LP[rows], MU_LP[rows], R[rows].expand(-1, 3), MASK[rows],
                           config, LossConfig(aggregation=mode, denominator="kept"),
                           candidates=tuple(x[rows] for x in CANDIDATES), correction=nothing,
                           counts=Counts(torch.tensor(1.0), torch.tensor(1.0)))[0]
    total = loss("seq-mean-token-sum")
    assert abs(total) > 1e-3 and close(loss("seq-mean-token-mean"), total / 3)


@pytest.mark.parametrize("bound", [0.05, 1e-9])
def test_a_batch_is_its_rows_and_rejected_tokens_have_their_centering_alone(bound):
    """eq:score-centering: A has both signs, and 1e-9 rejects every token that A would move out."""
    config = reinforce("token", 2.0, rollout_rs={"token_tv_outward": bound}, score_centering=True)
    advantages, rows = R.expand(-1, 3), torch.arange(len(R))

    def loss(i):
        given = (x[i] for x in (LP, MU_LP, MU_LP, advantages, MASK))
        return policy_loss(*given, config, LossConfig(aggregation=SUM),
                           candidates=tuple(x[i] for x in CANDIDATES))[0]
    weights, mask, _ = correct(LP, MU_LP, MASK, config, advantages)
    terms = torch.where(mask, -advantages * weights * LP, 0.0)
    centering = centering_loss(*CANDIDATES, advantages, MASK, config)
    assert (mask != MASK).any() and (advantages > 0).any() and (advantages < 0).any()
    assert close(loss(rows), (terms + centering).sum(-1).mean())
    assert close(loss(rows), torch.stack([loss(rows[i:i + 1]) for i in rows]).mean())


def test_missing_candidates_are_no_tokens():
    """A row with fewer candidates is filled with log μ = −∞, and two fillers change nothing."""
    config, filled = reinforce("token", 0.9, score_centering=True), []
    for fillers in (0, 2):
        log_pi, log_mu = (torch.nn.functional.pad(x[..., :2], (0, fillers), value=y)
                          for x, y in zip(CANDIDATES, (-0.1, -math.inf)))
        filled.append(mean_gradient(config, R, (log_pi, log_mu)))
    assert torch.equal(*filled)


def test_a_rejected_candidate_that_the_trainer_bans_has_no_value():
    """eq:score-centering: 0 · −∞ would be NaN; the criterion has rejected that token."""
    config = reinforce("token", 2.0, rollout_rs={"token_k1": (0.1, None)}, score_centering=True)
    log_mu, values = f64([[[0.5, 0.5]]]).log(), []
    for log_pi in (-9.0, -math.inf, math.nan):
        candidates = f64([[[math.log(0.5), log_pi]]]), log_mu
        values.append(centering_loss(*candidates, torch.ones(1, 1), torch.ones(1, 1), config))
    assert close(*values[:2]) and close(*values[1:])


def test_centering_has_no_gradient_through_mu_or_advantages():
    """eq:score-centering: μ(v) w(v) and A are constants, even when they come with a graph."""
    log_pi, log_mu = (x.detach().clone().requires_grad_() for x in CANDIDATES)
    advantages = R.expand(-1, PI.T).clone().requires_grad_()
    loss = centering_loss(log_pi, log_mu, advantages, MASK, reinforce("token", 2.0)).sum()
    of_pi, *constants = torch.autograd.grad(loss, (log_pi, log_mu, advantages), allow_unused=True)
    assert of_pi.abs().max() > 0 and constants == [None, None]


@pytest.mark.parametrize("there", [math.nan, 1e30])
def test_centering_of_padding_is_nothing(there):
    """Padding adds neither value nor gradient, whatever stands there."""
    config = reinforce("token", 0.9, score_centering=True)
    junk = torch.where(MASK, 0.0, there)[..., None]
    losses = []
    for x in (CANDIDATES, (CANDIDATES[0] + junk, CANDIDATES[1] + junk)):
        loss, _ = policy_loss(LP, MU_LP, MU_LP, R.expand(-1, 3), MASK, config,
                              LossConfig(aggregation=SUM), candidates=x)
        losses.append((loss, exact_gradient(PI, loss)))
    assert torch.equal(losses[0][0], losses[1][0]) and torch.equal(losses[0][1], losses[1][1])


@pytest.mark.parametrize("options, words", [
    (dict(loss_type="ppo_clip"), "score_centering needs loss_type reinforce"),
    (dict(rollout_is="sequence"), "rollout_is must be null or token"),
    (dict(rollout_is="prefix"), "rollout_is must be null or token"),
    (dict(rollout_is="token", rollout_is_batch_normalize=True), "rollout_is_batch_normalize false"),
    (dict(rollout_rs={"seq_mean_k3": 0.1}), "each criterion a token_*"),
    (dict(rollout_rs={"second_moment": 0.1}), "each criterion a token_*"),
    (dict(score_centering="yes"), "score_centering must be true or false")])
def test_what_cannot_be_centered_is_one_sentence(options, words):
    settings = dict(bypass_mode=True, loss_type="reinforce", score_centering=True) | options
    with pytest.raises(ValueError) as error:
        Config(**settings)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("candidates", [None, (LP, MU_LP[:2])])
def test_centering_without_candidates_is_an_error(candidates):
    with pytest.raises(ValueError, match="score_centering needs candidates"):
        policy_loss(LP, MU_LP, MU_LP, R.expand(-1, 3), MASK, reinforce(score_centering=True),
                    candidates=candidates)
