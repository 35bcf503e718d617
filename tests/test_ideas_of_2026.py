"""Score centering, masks in probability, prefix weights, the second moment: each is its equation, by enumeration.

Responses come from μ = MU. Expected values are written out as sums over states and tokens, not through the code
under test. Run with -s to see the biases.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from oracle import J, Policy, close, estimator_moments, exact_gradient, expectation, f64, grad_J, rewards, scores
from tolerances import gamma

from adapters.dialects import from_dialect
from correction import RolloutCorrectionConfig as Config
from correction import Correction, correct, importance_weights, rejection_mask
from rejection import CRITERIA, Evidence, second_moment_limit
from estimators import aggregate_log_ratio
from losses import Counts, LossConfig, policy_loss
from metrics import merge

PI = Policy(3, 3, seed=0)
MU = PI.perturbed(1, 0.8)
MASK, R, G = PI.mask, rewards(PI), scores(PI)
LP, MU_LP = PI.log_probs(), MU.log_probs().detach()
LOG_RHO = (LP - MU_LP).detach()
EVERY = PI.step_log_probs(), MU.step_log_probs().detach()           # log π(v|s), log μ(v|s): [S, V]
CANDIDATES = tuple(x[PI.states] for x in EVERY)                     # [N, T, V]
SUM = "seq-mean-token-sum"


def reinforce(level=None, threshold=2.0, **options):
    return Config(level, threshold, bypass_mode=True, loss_type="reinforce", **options)


def mean_gradient(config, advantages, candidates=CANDIDATES, pi=PI, mu=MU, lp=LP, mu_lp=MU_LP):
    """E_μ of the gradient that `policy_loss` descends, with its sign turned: to be compared with ∇J."""
    def loss(i):
        given = None if candidates is None else tuple(x[i] for x in candidates)
        return policy_loss(lp[i], mu_lp[i], mu_lp[i], advantages[i].expand(-1, pi.T), pi.mask[i], config, LossConfig(aggregation=SUM),
                           candidates=given)[0]
    return -estimator_moments(pi, mu, loss).mean


# ------------------------------------------------------------------------------------ score centering

CENTERED = [reinforce(), reinforce("token", 0.9), reinforce("token", (0.7, 1.4)),
            reinforce(rollout_rs={"token_k1": (0.8, 1.2)}), reinforce("token", math.inf, rollout_rs={"token_tv": 0.05}),
            reinforce("token", 2.0, rollout_rs={"token_tv_outward": 0.05, "token_k3": 0.2})]


@pytest.mark.parametrize("config", CENTERED, ids=str)
def test_a_constant_advantage_moves_nothing_once_scores_are_centered(config):
    """eq:score-centering: E_μ[w g − E_μ[w g | s]] = 0 in every state. Without it only the untruncated ρ has that."""
    for constant in (1.0, -2.0):
        advantages = torch.full_like(R, constant)
        drift = mean_gradient(config, advantages, None).norm().item()
        print(f"{config.rollout_is} {config.rollout_is_threshold} {config.rollout_rs}: drift {drift:.3f}")
        assert drift > 1e-2
        assert mean_gradient(replace(config, score_centering=True), advantages).abs().max() < 1e-12
    assert mean_gradient(reinforce("token", math.inf), torch.ones_like(R), None).abs().max() < 1e-12


def weight_of(config, log_rho, log_mu, advantage):
    """w(v) of one token, from its definition."""
    rho, mu, keep = math.exp(log_rho), math.exp(log_mu), True
    for name, bound in config.rollout_rs.items():
        if name == "token_k1":
            keep &= bound[0] <= rho <= bound[1]
        elif name == "token_k3":
            keep &= rho - 1 - log_rho <= bound
        elif name == "token_tv":
            keep &= abs(mu * rho - mu) <= bound
        elif name == "token_tv_outward":
            keep &= not ((advantage > 0 and mu * rho - mu > bound) or (advantage < 0 and mu - mu * rho > bound))
    if config.rollout_is is None:
        return float(keep)
    bound = config.rollout_is_threshold
    return keep * (rho * (bound[0] <= rho <= bound[1]) if isinstance(bound, tuple) else min(rho, bound))


def by_hand(config, advantages, centered):
    """Σ_y μ(y) Σ_t A (w g − Σ_v μ(v) w(v) ∇log π(v)), token by token."""
    log_pi, log_mu = EVERY[0].detach(), EVERY[1]
    total = torch.zeros_like(PI.logits)
    for row in range(len(MASK)):
        for t in range(PI.T):
            if not MASK[row, t]:
                continue
            state, token, advantage = PI.states[row, t].item(), PI.tokens[row, t].item(), advantages[row].item()
            for v in range(PI.V):
                w = weight_of(config, (log_pi - log_mu)[state, v].item(), log_mu[state, v].item(), advantage)
                share = float(v == token) - (log_mu[state, v].exp().item() if centered else 0.0)
                score = -log_pi[state].exp()
                score[v] += 1.0
                total[state] += MU.probs()[row].item() * advantage * share * w * score
    return total.flatten().detach()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("config", CENTERED, ids=str)
def test_the_centered_gradient_is_its_formula(config, centered):
    """eq:score-centering, with advantages of both signs."""
    advantages = R - R.mean()
    found = mean_gradient(replace(config, score_centering=centered), advantages)
    assert close(found, by_hand(config, advantages, centered))


def test_centering_subtracts_the_mean_of_whatever_is_done_to_a_sampled_token():
    """Rejection by tokens leaves the subtracted mean in place: it is that of the state, not of the token."""
    config = reinforce("token", 2.0, rollout_rs={"token_k1": (50.0, None)}, score_centering=True)
    assert not correct(LP, MU_LP, MASK, config).mask.any()
    assert close(mean_gradient(config, R), by_hand(config, R, True))


@pytest.mark.parametrize("level", [None, "token"])
def test_what_no_candidate_stands_for_is_taken_in_proportion(level):
    """eq:score-centering from μ's likeliest tokens alone: exact where the rest of μ is in proportion to π's."""
    V, K = 5, 2
    pi = Policy(V, 2, seed=3)
    tilted, head = pi.logits.detach().clone(), pi.logits.detach().topk(K).indices           # [S, K]
    tilted.scatter_add_(1, head, torch.randn(head.shape, generator=torch.Generator().manual_seed(4)).double())
    biases = []
    for logits in (tilted, pi.perturbed(5, 0.8).logits.detach()):
        mu = pi.perturbed(5, 0.8)
        mu.logits = logits.clone().requires_grad_()
        lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
        few = tuple(x.gather(1, head)[pi.states] for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
        config = reinforce(level, 0.9, score_centering=True)
        biases.append(mean_gradient(config, torch.ones_like(rewards(pi)), few, pi, mu, lp, mu_lp).norm().item())
    print(f"{level}: drift with {K} of {V} tokens {biases}")
    assert biases[0] < 1e-12 < 1e-3 < biases[1]


@pytest.mark.parametrize("name", ["token_tv", "token_tv_outward"])
def test_a_tail_of_many_tokens_is_not_judged_as_one(name):
    """eq:total-variation of the lump is |Σπ − Σμ| = 0.2, of each of its ten tokens 0.02: they stay, and so does the lump."""
    logits = f64([[0.7] + [0.03] * 10]).log(), f64([[0.5] + [0.05] * 10]).log()
    pi, mu = Policy(11, 1), Policy(11, 1)
    pi.logits, mu.logits = (x.clone().requires_grad_() for x in logits)
    lp, mu_lp = pi.log_probs(), mu.log_probs().detach()
    one = tuple(x[:, :1].expand(len(lp), 1, 1) for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
    for level in (None, "token"):
        config, ones = reinforce(level, math.inf, rollout_rs={name: 0.1}), torch.ones(len(lp), 1).double()
        plain, centered = (mean_gradient(replace(config, score_centering=on), ones, one, pi, mu, lp, mu_lp).norm()
                           for on in (False, True))
        assert plain > 0.05 and centered < 1e-12


@pytest.mark.parametrize("rest", [0.3, 0.01, 1e-5])
def test_a_small_tail_is_a_tail_all_the_same(rest):
    """Its probability is not limited until it is below 1e-6: log π of the lump is what it is, and so is its gradient."""
    share = f64([[0.6, 0.4 - rest, rest]])
    pi, mu = Policy(3, 1), Policy(3, 1)
    pi.logits, mu.logits = share.log().requires_grad_(), f64([[0.5, 0.5 - 2 * rest / 3, 2 * rest / 3]]).log().requires_grad_()
    few = tuple(x[:, :2].expand(3, 1, 2) for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
    whole = tuple(x.expand(3, 1, 3) for x in (pi.step_log_probs(), mu.step_log_probs().detach()))
    config, ones = reinforce(score_centering=True), torch.ones(3, 1, dtype=torch.float64)
    found, expected = (mean_gradient(config, ones, given, pi, mu, pi.log_probs(), mu.log_probs().detach())
                       for given in (few, whole))
    assert found.abs().max() < 1e-12 and expected.abs().max() < 1e-12


def test_candidates_in_half_precision_are_promoted_before_they_are_subtracted():
    """1 − Σπ of bfloat16 log-probs is formed in float32: what remains is their own rounding, once."""
    config, ones = reinforce("token", 0.9, score_centering=True), torch.ones_like(R).expand(-1, 3)
    halves = tuple(x[..., :2].detach().bfloat16() for x in CANDIDATES)
    gradients = []
    for given in (halves, tuple(x.double() for x in halves)):
        log_pi = given[0].clone().requires_grad_()
        loss, _ = policy_loss(LP.detach(), MU_LP, MU_LP, ones, MASK, config, LossConfig(aggregation=SUM), candidates=(log_pi, given[1]))
        gradients.append(torch.autograd.grad(loss, log_pi)[0].double())
    # only the gradient itself is rounded to bfloat16, entry by entry; before that, a few roundings of float32
    off, size = (gradients[0] - gradients[1]).abs(), gradients[1].abs()
    assert (off <= 2 ** -8 * size + 2 ** -18 * size.max()).all()


def test_with_kept_counts_a_rejected_row_is_divided_by_its_own_length():
    """eq:aggregation: the centering of a response of which nothing is kept is a mean over its tokens, like any other."""
    rows, config = MASK.sum(-1) == 3, reinforce(score_centering=True)
    nothing = Correction(None, torch.zeros_like(MASK[rows]))

    def loss(mode):
        return policy_loss(LP[rows], MU_LP[rows], MU_LP[rows], R[rows].expand(-1, 3), MASK[rows], config, LossConfig(aggregation=mode, denominator="kept"),
                           candidates=tuple(x[rows] for x in CANDIDATES), correction=nothing,
                           counts=Counts(torch.tensor(1.0), torch.tensor(1.0)))[0]
    total = loss("seq-mean-token-sum")
    assert abs(total) > 1e-3 and close(loss("seq-mean-token-mean"), total / 3)


def test_missing_candidates_are_no_tokens():
    """−∞ in log μ fills a row that has fewer candidates: with two of three, or these and two fillers, the same."""
    config, filled = reinforce("token", 0.9, score_centering=True), []
    for fillers in (0, 2):
        log_pi, log_mu = (torch.nn.functional.pad(x[..., :2], (0, fillers), value=y)
                          for x, y in zip(CANDIDATES, (-0.1, -math.inf)))
        filled.append(mean_gradient(config, R, (log_pi, log_mu)))
    assert torch.equal(*filled)


@pytest.mark.parametrize("there", [math.nan, 1e30])
def test_centering_of_padding_is_nothing(there):
    """Neither value nor gradient, whatever stands there."""
    config, junk = reinforce("token", 0.9, score_centering=True), torch.where(MASK, 0.0, there)[..., None]
    losses = []
    for x in (CANDIDATES, (CANDIDATES[0] + junk, CANDIDATES[1] + junk)):
        loss, _ = policy_loss(LP, MU_LP, MU_LP, R.expand(-1, 3), MASK, config, LossConfig(aggregation=SUM), candidates=x)
        losses.append((loss, exact_gradient(PI, loss)))
    assert torch.equal(losses[0][0], losses[1][0]) and torch.equal(losses[0][1], losses[1][1])


@pytest.mark.parametrize("options, words", [
    (dict(loss_type="ppo_clip"), "score_centering needs loss_type reinforce"),
    (dict(rollout_is="sequence"), "rollout_is null or token"),
    (dict(rollout_is="prefix"), "rollout_is null or token"),
    (dict(rollout_is="token", rollout_is_batch_normalize=True), "no rollout_is_batch_normalize"),
    (dict(rollout_rs={"seq_mean_k3": 0.1}), "criteria token_*"),
    (dict(rollout_rs={"second_moment": 0.1}), "criteria token_*"),
    (dict(score_centering="yes"), "score_centering must be true or false")])
def test_what_cannot_be_centered_is_one_sentence(options, words):
    settings = dict(bypass_mode=True, loss_type="reinforce", score_centering=True) | options
    with pytest.raises(ValueError) as error:
        Config(**settings)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("candidates", [None, (LP, MU_LP[:2])])
def test_centering_without_candidates_is_an_error(candidates):
    with pytest.raises(ValueError, match="score_centering needs candidates"):
        policy_loss(LP, MU_LP, MU_LP, R.expand(-1, 3), MASK, reinforce(score_centering=True), candidates=candidates)


# ------------------------------------------------------------------------------- masks in probability

def test_total_variation_of_the_sampled_token():
    """eq:total-variation: from 1e-4 a token may grow tenfold; from 0.5 it may not grow by 0.31. Bounds met keep."""
    mu, pi = f64([[1e-4, 0.5, 0.5, 0.6, 0.3]]), f64([[1e-3, 0.81, 0.8, 0.3, 0.3]])
    log_rho, mask = (pi / mu).log(), torch.ones(1, 5)
    kept = rejection_mask(log_rho, mask, {"token_tv": 0.3 + 1e-12}, rollout_log_prob=mu.log())
    assert kept.tolist() == [[True, False, True, True, True]]
    assert not rejection_mask(log_rho, mask, {"token_k1": (0.5, 2.0)})[0, 0]
    verdict = CRITERIA["token_tv"].judge(Evidence(log_rho, mask.bool(), rollout_log_prob=mu.log()), 0.3)
    assert close(verdict.statistic, (pi - mu).abs())


def test_a_bound_met_exactly_keeps():
    """≤, for |π − μ|, for its outward half, for opsm's mean and for the second moment: all exact in binary."""
    mu, pi = f64([[0.25, 0.5]]), f64([[0.5, 0.25]])
    given, ones = ((pi / mu).log(), torch.ones(1, 2)), torch.ones(1, 2)
    for name, advantages in (("token_tv", ones), ("token_tv_outward", f64([[1.0, -1.0]]))):
        seen = Evidence(given[0], ones.bool(), advantages, mu.log())
        exact = CRITERIA[name].judge(seen, 1.0).statistic
        for bound, kept in ((exact.max().item(), True), (math.nextafter(exact.min().item(), 0), False)):
            assert rejection_mask(*given, {name: bound}, advantages, mu.log()).any() == kept
            assert rejection_mask(*given, {name: bound}, advantages, mu.log()).all() == kept
    drifted = torch.full((1, 2), -0.5, dtype=torch.float64)
    for bound, kept in ((0.5, True), (math.nextafter(0.5, 0), False)):
        assert rejection_mask(drifted, ones, {"opsm": bound}, -ones).all() == kept
    for bound, kept in ((0.25, True), (math.nextafter(0.25, 0), False)):
        assert rejection_mask(drifted, ones, {"second_moment": bound}).all() == kept


@pytest.mark.parametrize("sign, kept", [(1, [False, True, True]), (-1, [True, False, True]), (0, [True, True, True])])
def test_outward_means_further_the_way_the_advantage_pushes(sign, kept):
    """DPPO: π above μ with A > 0, π below μ with A < 0."""
    mu, pi = f64([[0.2, 0.7, 0.4]]), f64([[0.6, 0.3, 0.5]])
    found = rejection_mask((pi / mu).log(), torch.ones(1, 3), {"token_tv_outward": 0.2}, torch.full((1, 3), float(sign)),
                           mu.log())
    assert found.tolist() == [kept]


@pytest.mark.parametrize("name", ["token_tv", "token_tv_outward"])
@pytest.mark.parametrize("bound", [0.02, 0.1, 0.3])
def test_ipo_and_dppo_are_their_formulas(name, bound):
    """E_μ[Σ ρ A 1[kept] g], token by token; what is missing from the token surrogate is what was not kept."""
    config, advantages = reinforce("token", math.inf, rollout_rs={name: bound}), R - R.mean()
    found = mean_gradient(config, advantages, None)
    assert close(found, by_hand(config, advantages, False))
    whole = mean_gradient(reinforce("token", math.inf), advantages, None)
    print(f"{name} ≤ {bound}: {(found - whole).norm() / grad_J(PI, R).norm():.3f} of |∇J| is masked away")
    assert (found - whole).norm() > 1e-4


def test_a_ratio_of_impossible_probabilities_stays_finite():
    """π ≤ 1, whatever the two log-probs claim."""
    log_rho = torch.tensor([[200.0, -200.0, math.log(2)]])
    seen = Evidence(log_rho, torch.ones(1, 3).bool(), rollout_log_prob=torch.zeros(1, 3))
    verdict = CRITERIA["token_tv"].judge(seen, 0.3)
    assert verdict.statistic.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("name", ["token_tv", "token_tv_outward"])
def test_a_bound_on_probabilities_needs_one_of_them(name):
    with pytest.raises(ValueError, match=f"rollout_rs.{name} needs rollout_log_prob"):
        rejection_mask(LOG_RHO, MASK, {name: 0.3}, R.expand(-1, 3))


def test_outward_needs_advantages():
    with pytest.raises(ValueError, match="rollout_rs.token_tv_outward needs the advantages"):
        correct(LP, MU_LP, MASK, Config(rollout_rs={"token_tv_outward": 0.2}))


# ------------------------------------------------------------------------------------- prefix weights

def prefix():
    return torch.where(MASK, LOG_RHO, 0.0).cumsum(-1).exp() * MASK


def test_prefix_weights_are_running_products():
    """eq:prefix, truncated or zeroed like any other level; padding in the middle adds nothing."""
    expected = torch.stack([prefix()[:, :t + 1].gather(1, torch.full((len(MASK), 1), t))[:, 0] for t in range(3)], 1)
    assert close(importance_weights(LOG_RHO, MASK, "prefix", math.inf), expected)
    assert close(importance_weights(LOG_RHO, MASK, "prefix", 0.9), expected.clamp(max=0.9))
    inside = (expected >= 0.7) & (expected <= 1.2)
    assert close(importance_weights(LOG_RHO, MASK, "prefix", (0.7, 1.2)), expected * inside)
    gap = torch.tensor([[1.0, 0.0, 1.0]])
    assert close(aggregate_log_ratio(f64([[0.1, math.nan, 0.2]]), gap, "prefix"), f64([[0.1, 0.0, 0.3]]))


def test_prefix_weights_are_exact_for_advantages_of_the_past():
    """eq:prefix: E_μ[Σ ρ_{1:t} A_t g_t] = E_π[Σ A_t g_t] where A_t is a function of y_1 … y_t, with less variance
    than the whole product, which is exact too."""
    advantages = torch.where(MASK, torch.randn(PI.logits.shape, generator=torch.Generator().manual_seed(5)).double()[
        PI.states, PI.tokens], 0.0)
    target = torch.einsum("n,nt,ntp->p", PI.probs().detach(), advantages, G)
    found = {}
    for level in ("prefix", "sequence"):
        config = reinforce(level, math.inf)
        found[level] = estimator_moments(PI, MU, lambda i, config=config: policy_loss(
            LP[i], MU_LP[i], MU_LP[i], advantages[i], MASK[i], config, LossConfig(aggregation=SUM))[0])
        assert close(-found[level].mean, target)
    assert found["prefix"].variance.sum() < found["sequence"].variance.sum()


def test_with_one_reward_at_the_end_the_past_is_right_and_the_future_is_not():
    """E_μ[Σ ρ_{1:t} R g_t] = Σ_s d_π(s) Σ_v ∇π(v|s) Q^μ(s, v): π's visits, μ's returns; the token weight has μ's both."""
    found = mean_gradient(reinforce("prefix", math.inf), R, None)
    shape = PI.logits.shape

    def summed(values):
        return torch.zeros(shape, dtype=torch.float64).index_put((PI.states, PI.tokens), values.detach(), accumulate=True)

    mu_taken = summed(MASK * MU.probs()[:, None])                                        # d_μ(s) μ(v|s)
    Q = summed(MASK * MU.probs()[:, None] * R) / mu_taken
    visits = summed(MASK * PI.probs()[:, None]).sum(-1, keepdim=True)                    # d_π(s)
    assert close(found, exact_gradient(PI, (visits * Q * PI.logits.softmax(-1)).sum()))
    target = grad_J(PI, R)
    biases = {level: ((mean_gradient(reinforce(level, math.inf), R - J(PI, R).detach(), None) - target).norm()
                      / target.norm()).item() for level in ("token", "prefix", "sequence")}
    print("bias with one reward at the end:", biases)
    assert biases["sequence"] < 1e-12 < 0.05 < biases["prefix"]


# ----------------------------------------------------------------------------------- the second moment

def dropped_by_hand(squares, bound):
    """The largest go until the mean of the others is at most `bound`; equal ones go together."""
    left = sorted(squares)
    while left and sum(left) / len(left) > bound:
        left = [x for x in left if x < left[-1]]
    return [x not in left for x in squares]


@pytest.mark.parametrize("seed", range(40))
def test_the_worst_tokens_go_until_the_mean_is_met(seed):
    """eq:second-moment against lists: any batch, also with ties, with all and with none to drop."""
    rng = random.Random(seed)
    rows, width, scale = rng.randint(1, 5), rng.randint(1, 9), rng.choice([1e-3, 0.2, 1.0, 30.0])
    steps = rng.choice([1, 4, 64])                     # dyadic numbers: float32 squares and sums are exact, and tie
    log_rho = f64([[rng.randint(-steps, steps) / steps * scale for _ in range(width)] for _ in range(rows)]).float()
    mask = torch.tensor([[rng.random() < 0.8 for _ in range(width)] for _ in range(rows)])
    bound = rng.choice([0.04, 0.5, 1e-9, 1e4])
    kept = rejection_mask(log_rho, mask, {"second_moment": bound})
    expected = dropped_by_hand(log_rho.square()[mask].tolist(), bound)
    assert kept[mask].tolist() == [not gone for gone in expected] and not kept[~mask].any()


@pytest.mark.parametrize("x", [1e-30, 0.04, 1.0, 1e30])
def test_neighbouring_numbers_are_told_apart(x):
    """Of two float32 numbers with none between them, the larger one alone goes."""
    least = torch.tensor(x)
    squares = torch.stack([least, torch.nextafter(least, torch.tensor(math.inf))])[None]
    assert second_moment_limit(squares, torch.ones(1, 2), least.item()) == least


def test_the_second_moment_of_all_ranks(monkeypatch):
    """Two ranks of different shapes drop what one batch of both would: they share a sum and a count, in step."""
    g = torch.Generator().manual_seed(0)
    here, there = (torch.randn(3, 5, generator=g), torch.ones(3, 5)), (3 * torch.randn(2, 7, generator=g), torch.ones(2, 7))
    both = torch.cat([x.flatten() for x in (here[0], there[0])])[None]
    whole = rejection_mask(both, torch.ones_like(both), {"second_moment": 0.3})
    limits = second_moment_limit(both.square(), torch.ones_like(both), 0.3)
    other = there[0].square()

    def all_reduce(sums, op=None, group=None):         # of the rank that holds `there`, at the same halving
        assert group == "ranks"
        bits = state["low"], state["high"]
        if op == torch.distributed.ReduceOp.MAX:       # in the end, the largest that any of them keeps
            x = torch.tensor(bits[0], dtype=torch.int32).view(torch.float32)
            return sums.copy_(torch.maximum(sums, other[other <= x].max()))
        x = torch.tensor((sum(bits) + 1) // 2, dtype=torch.int32).view(torch.float32)
        sums += torch.tensor([other[other <= x].sum(dtype=torch.float64), (other <= x).sum()])
        fits = sums[0] <= 0.3 * sums[1]
        state["low"], state["high"] = ((sum(bits) + 1) // 2, bits[1]) if fits else (bits[0], (sum(bits) + 1) // 2 - 1)

    state = {"low": 0, "high": 0x7F800000}
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    alone = rejection_mask(*here, {"second_moment": 0.3})
    state = {"low": 0, "high": 0x7F800000}
    kept = rejection_mask(*here, {"second_moment": 0.3}, group="ranks")
    state = {"low": 0, "high": 0x7F800000}
    assert second_moment_limit(here[0].square(), here[1], 0.3, "ranks") == limits
    assert torch.equal(kept, here[0].square() <= limits) and torch.equal(kept.flatten(), whole[0, :15])
    assert not torch.equal(kept, alone)


def test_what_is_logged_of_the_second_moment_is_the_largest_term_that_stays():
    """eq:second-moment: the interval ends at a term of the batch, on every rank the same; the metrics merge as others do."""
    log_rho = f64([[0.1, -0.2, 0.15, 2.0, -0.1], [0.3, 0.0, 0.0, -3.0, 0.2]])
    mask, config = torch.ones(2, 5), Config(rollout_rs={"second_moment": 0.04})
    _, interval, below, above = CRITERIA["second_moment"].judge(Evidence(log_rho, mask.bool()), 0.04)
    assert interval[1] == torch.tensor(0.3).double().square().float() and not below.any() and above.sum() == 2
    whole = correct(log_rho, torch.zeros_like(log_rho), mask, config).metrics
    limit = float(interval[1])
    limited = log_rho.square().float().clamp(max=limit).double()
    assert close(whole["rollout_corr/rollout_rs_second_moment_std"], limited.std(correction=0), gamma(8))   # of float32 terms
    assert whole["rollout_corr/rollout_rs_second_moment_seq_fraction_high"] == 1                # both rows' means are above
    assert close(whole["rollout_corr/rollout_rs_second_moment_masked_fraction"], 0.2)
    parts = [correct(log_rho[i:i + 1], torch.zeros(1, 5).double(), mask[:1], config) for i in (0, 1)]
    alone = merge(parts)                                   # each by its own limit: without a group they cannot agree
    assert close(alone["rollout_corr/rollout_rs_second_moment_masked_fraction"], 0.2)
    assert alone["rollout_corr/rollout_rs_second_moment_max"] == whole["rollout_corr/rollout_rs_second_moment_max"] == 9.0


def test_nothing_is_kept_where_the_smallest_term_is_above_the_bound():
    apart = torch.tensor([[1.0, -2.0]])
    assert second_moment_limit(apart.square(), torch.ones(1, 2), 0.5) == 0
    assert not rejection_mask(apart, torch.ones(1, 2), {"second_moment": 0.5}).any()


# --------------------------------------------------------------------------------- prime-rl's own words

IPO = dict(bypass_mode=True, loss_type="reinforce")


@pytest.mark.parametrize("block, expected", [
    ({"type": "ipo"}, Config("token", 1e4, rollout_rs={"token_tv": 0.3}, **IPO)),
    ({"trainer": {"loss": {"type": "ipo", "eps": 0.1, "adv_tau": 1.0, "kl_tau": 0.0}}},
     Config("token", 1e4, rollout_rs={"token_tv": 0.1}, **IPO)),
    ({"loss": {"eps": 0.2, "max_importance_ratio": 100, "score_centering": True}},
     Config("token", 100.0, rollout_rs={"token_tv": 0.2}, **IPO, score_centering=True)),
    ({"loss": {"max_importance_ratio": 1}}, Config("token", 1.0, rollout_rs={"token_tv": 0.3}, **IPO)),
    ({"loss": {"type": "ipo", "ipo_threshold": 0.1}},                                  # a release without a cap
     Config("token", math.inf, rollout_rs={"token_tv": 0.1}, **IPO)),
    ({"loss": {"type": "icepop"}}, Config("token", (0.2, 5.0), **IPO)),
    ({"loss": {"type": "icepop", "ratio_low": 0.5, "ratio_high": 2.0}}, Config("token", (0.5, 2.0), **IPO)),
    ({"loss": {"type": "default", "dppo_mask_low": 0.1, "dppo_mask_high": 0.1}},
     Config("token", math.inf, rollout_rs={"token_tv_outward": 0.1}, **IPO))])
def test_prime_rls_block_is_read(block, expected):
    assert from_dialect(block) == expected


@pytest.mark.parametrize("block, words", [
    ({"type": "ippo"}, "type cannot be 'ippo'; did you mean 'ipo'?"),
    ({"type": "ipo", "kl_tau": 1e-3}, "kl_tau must be 0"),
    ({"type": "ipo", "adv_tau": 0.5}, "adv_tau must be 1"),
    ({"type": "ipo", "ratio_low": 0.5}, "ratio_low is no setting of prime-rl's loss type ipo"),
    ({"type": "icepop", "eps": 0.5}, "eps is no setting of prime-rl's loss type icepop"),
    ({"type": "default", "dppo_mask_low": 0.1}, "dppo_mask_low and dppo_mask_high must be equal"),
    ({"eps": 0.0}, "eps must be a positive number"),
    ({"eps": 0.1, "ipo_threshold": 0.1}, "eps and ipo_threshold are one setting: give one of them"),
    ({"max_importance_ratio": math.inf}, "max_importance_ratio must be a finite number of at least 1, not inf"),
    ({"max_importance_ratio": 0.5}, "max_importance_ratio must be a finite number of at least 1, not 0.5"),
    ({"max_importance_ratio": None}, "max_importance_ratio must be a positive number, not None"),
    ({"type": "default", "max_importance_ratio": 2.0}, "max_importance_ratio is no setting of prime-rl's loss type default"),
    ({"type": "ipo", "rollout_is": "token"}, "another dialect")])
def test_what_prime_rl_means_otherwise_is_one_sentence(block, words):
    with pytest.raises(ValueError) as error:
        from_dialect({"loss": block})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_one_and_the_same_batch_by_sum_and_by_mean():
    """28 200 tokens, each 0.01 % less likely: their product is 0.0596, their geometric mean 0.9999, and the latter is the
    same at any length."""
    log_rho, mask = torch.full((1, 28_200), -1e-4, dtype=torch.float64), torch.ones(1, 28_200)
    assert round(importance_weights(log_rho, mask, "sequence", 2.0)[0, 0].item(), 4) == 0.0596
    assert round(importance_weights(log_rho, mask, "geometric", 2.0)[0, 0].item(), 4) == 0.9999
    assert expectation(MU, importance_weights(LOG_RHO, MASK, "sequence", math.inf)[:, 0]).item() == pytest.approx(1)
