"""The doctor names the cause of a gap from a dump, on plants of doctor/plants.py.

Plants are of models that are made here, so each stands clear of the limits: see margins.py.
doctor/rates.py counts how often it is right, on models that its rules never saw.
"""

import math

import pytest
import torch

from three_policies import doctor
from three_policies.doctor import causes, laws, places, plants
from three_policies.doctor.dumps import Response, response
from three_policies.doctor.tokens import (LOWEST, NEVER, Tokens, gap_left, log_odds,
                                          numerics, z_of)
from three_policies.estimators import sampling_log_probs
from three_policies.tests.support.margins import stands_clear, stays_below
from three_policies.tests.support.planted import MODELS, in_rows, names, planted, shifted, tokens

CASES = [
    ("temperature", "sampler"), ("temperature", "trainer"), ("temperature", "after"),
    ("raw", "tau"), ("raw", "top-p"), ("cut", "top-p"), ("cut", "top-k"), ("shift", "trainer+1"),
    ("shift", "sampler-1"), ("eos", "zero"), ("tool", "zero"), ("retokenised", "swap"),
    ("padding", "trainer"), ("window", "window"), ("context", "template"), ("in-flight", "anew"),
    ("penalty", "presence"), ("softcap", "sampler"), ("scatter", "dropout"), ("flips", "trainer"),
    ("bf16-log-softmax", "trainer"), ("stale", "two"), ("weights", "int4"),
    ("first-token", "packed"), ("order", "blocks"), ("decode", "forgets")]


@pytest.mark.made_here
@pytest.mark.parametrize("i, cause, variant", [(i, *case) for i, case in enumerate(CASES)])
def test_each_cause_is_named_first(i, cause, variant):
    architecture = {"flips": "Mixtral", "context": "Qwen2"}.get(cause, MODELS[i % 3])
    rows = planted(cause, architecture, variant)
    report = stands_clear(lambda: doctor.examine(rows), lambda report: names(report)[:1])
    assert names(report)[:1] == [cause], str(report)
    first = report.as_json()["causes"][0]
    assert list(first) == ["cause", "confidence", "evidence", "remedy"] and first["evidence"]
    assert report.proper is False or cause != "cut"


def test_every_name_has_a_plant_and_a_remedy():
    assert {cause for cause, _ in CASES} == set(plants.VARIANTS) - {"healthy"}
    assert set(causes.CAUSES) == {cause for cause, _ in CASES} | {
        "numerics", "below-grid", "dropout", "depth"}        # of the model, or named second


@pytest.mark.made_here
@pytest.mark.parametrize("architecture, variant", [
    ("Qwen2", "same"), ("Mixtral", "same"), ("Gemma2", "same"), ("Gemma2", "bf16-sampler"),
    ("Llama", "bf16-sampler")])
def test_a_healthy_pair_raises_no_alarm(architecture, variant):
    """Qwen2 in bfloat16 is at an edge: in one draw of nine its gap seems to fade with tokens."""
    rows = planted("healthy", architecture, variant)
    report = stays_below(lambda: doctor.examine(rows))
    assert report.proper and not report.causes and not report.faulty, str(report)


@pytest.mark.parametrize("share, found", [(0.015, []), (0.06, [("flips", "suggested")])])
def test_of_a_healthy_mixture_of_experts_flips_are_suggested_at_most(share, found):
    """It routes some tokens differently in 16 bits; all others agree as two kernels do.

    How many they are in a model that is made here would depend on the processor's rounding.
    """
    g = torch.Generator().manual_seed(0)
    odds, noise = 2 * torch.randn(2, 2000, generator=g, dtype=torch.float64)
    routed = 0.5 * noise * (torch.rand(2000, generator=g) < share)
    t = torch.arange(2000) % 20
    x = tokens(*shifted(odds, 0.01 * noise + routed), t=t, row=torch.arange(2000) // 20)
    named = stands_clear(lambda: causes.find_causes(x), lambda named: [f.cause for f in named])
    assert [(f.cause, f.confidence) for f in named] == found


@pytest.mark.made_here
@pytest.mark.parametrize("first, second, severity", [
    ("shift", "temperature", 0.5), ("tool", "temperature", 0.7), ("window", "temperature", 0.7),
    ("retokenised", "temperature", 0.7)])
def test_the_first_cause_is_repaired_and_the_rest_diagnosed(first, second, severity):
    rows = planted(first, "Qwen2", None, second, severity)
    both = {first, second}
    report = stands_clear(lambda: doctor.examine(rows), lambda report: both & {*names(report)})
    assert both <= {*names(report)}, str(report)


def test_no_weight_is_offered_where_mass_is_lost():
    assert "no weight repairs it" in causes.CAUSES["cut"][1]


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_short_responses_are_no_trouble(tokens):
    """The cause is named even if responses are too short for a gap to fade along them."""
    g = torch.Generator().manual_seed(0)
    mu = -2 * torch.rand(64, tokens, generator=g, dtype=torch.float64) - 0.1
    pi = (mu + torch.randn(mu.shape, generator=g, dtype=torch.float64) / 2).clamp(max=-0.01)
    found = [Response(i, [3] * tokens, a, b, [i], [True] * tokens)
             for i, (a, b) in enumerate(zip(mu.tolist(), pi.tolist()))]
    assert names(doctor.examine(found)) == ["weights"]


def test_a_gap_that_fades_is_not_one_that_falls():
    """A gap that fades as 1/(t + 8) is one of context, one that falls at token 13 is in-flight."""
    g = torch.Generator().manual_seed(0)
    t = torch.arange(30).repeat(100)
    mu = -torch.rand(len(t), generator=g).double() - 0.1
    x = Tokens(mu, mu, t, t, torch.zeros_like(t), *[t] * 7)      # prompts of one length
    noise = -torch.rand(len(t), generator=g).double().log()
    flat, fades = torch.ones(len(t)), 8 / (t + 8)
    falls = torch.where(t < 13, 1, 0.6 * 21 / (t + 8))
    for size, expected in ((flat, None), (fades, "context"), (falls, "in-flight")):
        odds = log_odds(x.mu) - size * noise
        found, _ = places.over_time(x._replace(pi=torch.nn.functional.logsigmoid(odds)))
        assert (found and found.cause) == expected


@pytest.mark.parametrize("place, named", [(True, True), (False, False)])
def test_what_looks_like_a_place_may_be_a_penalty(place, named):
    """Ever more tokens were seen, so a gap that begins at a token may be a weak penalty's."""
    g = torch.Generator().manual_seed(0)
    odds, noise = torch.randn(2, 400, generator=g, dtype=torch.float64)
    t, seen = torch.arange(400) % 20, torch.rand(400, generator=g) < 0.5
    apart = torch.where(seen, 0.4, -0.4) + 0.8 * noise
    x = tokens(*shifted(odds, apart * (t >= (5 if place else 0))), t=t, seen=seen,
               row=torch.arange(400) // 20)
    assert not places.penalty(x) and places.penalty(x, easier=2)
    first = causes.find_causes(x)[0]
    assert (first.cause == "penalty") == named
    assert not named or (first.other and first.confidence == "likely")      # the place is said, too


def test_rounding_of_one_sign_is_no_cause():
    """E[ρ] of a nearly sure policy may be 10 standard errors from 1, by 1e-7."""
    g = torch.Generator().manual_seed(0)
    rounding = 2.0 ** -23 * (torch.rand(640, generator=g) < 0.3).double()
    sure = torch.full_like(rounding, -1e-4)
    for mu, pi in ((sure, sure - rounding), (sure - rounding, sure)):
        assert abs(z_of((pi - mu).expm1())) > 10
        assert not causes.find_causes(tokens(mu, pi))
    off = causes.find_causes(tokens(sure, sure - 1e6 * rounding))       # 0.04 is no rounding
    assert [finding.cause for finding in off] == ["cut"]


def test_a_nearly_sure_policy_without_a_rare_token_is_no_fault():
    """E[ρ] and E[−log π] are off then by what was not drawn, and no error shows it."""
    rows = in_rows(320, 20)
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        rare = torch.rand(320, generator=g, dtype=torch.float64) < 0.001     # of 1000 other tokens
        mu, pi = (torch.where(rare, (1 - top) / 1000, top).double().log()
                  for top in (0.999, 0.9985))
        if not rare.any():
            assert abs(z_of((pi - mu).expm1())) > 15
        assert "cut" not in [found.cause for found in causes.find_causes(tokens(mu, pi, **rows))]
        entropy = torch.full_like(mu, -0.999 * math.log(0.999) - 0.001 * math.log(1e-6))
        assert not causes.find_causes(tokens(mu, mu, entropy=entropy, **rows))


def test_what_undrawn_tokens_cannot_explain_is_a_fault():
    """20 000 tokens draw a mass of 0.0005: a cut of 0.001 is seen, and so is a cold draw."""
    g = torch.Generator().manual_seed(0)
    mu = -0.5 * torch.rand(20_000, generator=g, dtype=torch.float64) - 0.1
    rows, warm = in_rows(20_000, 20), torch.full_like(mu, 1.5)
    cut = [x.cause for x in causes.find_causes(tokens(mu, mu + math.log(0.999), **rows))]
    cold = [x.cause for x in causes.find_causes(tokens(mu, mu, entropy=warm, **rows))]
    assert cut == ["cut"] and cold == ["raw"]


@pytest.mark.parametrize("times, named", [(1, False), (4, True)])
def test_three_old_tokens_may_be_chance_and_twelve_are_not(times, named):
    """eq:gap-left: three of 13 gaps are five times the others, which saves less than ten nats."""
    n = 13 * times
    old = torch.arange(n) % 13 < 3
    odds = torch.zeros(n, dtype=torch.float64)
    x = tokens(*shifted(odds, torch.where(old, 0.5, 0.1)), version=(~old).long(),
               t=torch.zeros(n).long())
    left = gap_left(x.e(), old, ~old)
    assert (-n * math.log(left) > 10) == named
    assert [found.cause for found in places.places(x)] == ["stale"] * named


def test_a_shift_leaves_little_of_the_gap():
    g = torch.Generator().manual_seed(0)
    mu, noise = (torch.rand(2, 2000, generator=g, dtype=torch.float64)).log()
    for size, named in ((0.1, True), (1.0, False)):     # at 1.0 the neighbour explains a third
        found = laws.shift(tokens(mu, mu.roll(1) + size * noise))
        assert bool(found) == named, size


def test_log_probs_of_minus_infinity_are_no_numbers_of_16_bits():
    mu = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log()
    assert not laws.sixteen_bits(tokens(mu, torch.full_like(mu, -40.0)))     # as `Tokens.of` has −∞


def test_drawn_again_a_flip_mostly_agrees_and_scatter_never():
    g = torch.Generator().manual_seed(0)
    odds = 3 * torch.randn(300, generator=g, dtype=torch.float64).repeat_interleave(2)
    prefix = torch.arange(300).repeat_interleave(2)
    noise = torch.randn(600, generator=g, dtype=torch.float64)
    rare = torch.rand(600, generator=g) < 0.12
    for apart, cause in ((2 * noise, "scatter"), (2 * noise.abs() ** 3 * noise, "scatter"),
                         (0.2 * noise.abs() * noise + 2 * noise * rare, "flips")):
        x = tokens(*shifted(odds, apart), prefix=prefix)
        found = causes.texture(x)
        assert found and found.cause == cause and "drawn again" in found.evidence
        dense = causes.texture(x, experts=False)                # flips only where there are experts
        assert dense and dense.cause == "scatter" and dense.other.cause == "dropout"


def test_of_few_draws_that_disagree_a_little_no_flip_is_named():
    """Six tokens drawn again: their median is above two kernels' noise, their mean twice that."""
    odds, g = torch.zeros(212, dtype=torch.float64), torch.Generator().manual_seed(0)
    odds[12:] = torch.randn(200, generator=g, dtype=torch.float64)
    limit = numerics(tokens(*shifted(odds, odds * 0)))
    apart = torch.full_like(odds, 0.3)
    apart[:12] = 0
    apart[1:12:2] = limit * torch.tensor([1.1, 1.1, 1.1, 1.1, 2, 8]).double()
    prefix = torch.where(torch.arange(212) < 12, torch.arange(212) // 2, torch.arange(212))
    found = causes.texture(tokens(*shifted(odds, apart), prefix=prefix), alone=True)
    assert found and found.cause == "weights"


def test_a_token_drawn_again_must_scatter_by_more_than_two_kernels():
    """Where the fault does not act on the repeated tokens, their scatter is rounding."""
    g = torch.Generator().manual_seed(0)
    odds, noise = torch.randn(2, 400, generator=g, dtype=torch.float64)
    once = torch.arange(400) >= 80                      # the others are 40 tokens, each drawn twice
    prefix = torch.where(once, torch.arange(400), torch.arange(400) // 2)
    odds = odds[prefix]
    for size, named in ((0.01, "weights"), (1.0, "scatter")):
        x = tokens(*shifted(odds, noise * torch.where(once, 1.0, size)), prefix=prefix,
                   t=torch.zeros_like(prefix))
        found = causes.texture(x, alone=True)
        assert found and found.cause == named, size


def test_a_gap_fades_within_prompts():
    """Prompts with a large gap whose responses end early make a gap that fades, but not in one."""
    g = torch.Generator().manual_seed(0)
    t, start = (torch.cat([y.repeat(30) for y in parts]) for parts in zip(
        *((torch.arange(4 * k), torch.full((4 * k,), k)) for k in range(1, 11))))
    odds = torch.randn(len(t), generator=g, dtype=torch.float64)
    noise = -torch.rand(len(t), generator=g, dtype=torch.float64).log()
    for size, named in ((4 / (start + 1), None), (8 / (t + 8.0), "context")):
        x = tokens(*shifted(odds, size * noise), t=t, start=start)
        found, _ = places.over_time(x)
        assert (found and found.cause) == named


def test_a_fall_that_is_at_no_token_is_not_named():
    """Six places leave none for a step, and −∞ nats are no evidence."""
    g, t = torch.Generator().manual_seed(0), torch.tensor([0, 2, 4, 6, 9, 12]).repeat(666)
    noise = -torch.rand(len(t), generator=g, dtype=torch.float64).log()
    odds = torch.randn(len(t), generator=g, dtype=torch.float64)
    first, second = places.over_time(tokens(*shifted(odds, 8 / (t + 8.0) * noise), t=t))
    assert first and first.cause == "context" and second is None


@pytest.mark.parametrize("most, named", [(16, "padding"), (math.inf, "context")])
def test_padding_is_what_a_prompt_lacks_to_the_longest(most, named):
    """Both fade along the response; padding ends at a length that no prompt here reaches."""
    g = torch.Generator().manual_seed(0)
    t, start = torch.arange(30).repeat(120), torch.tensor([4, 6, 8, 10, 12]).repeat_interleave(720)
    before = t + start + 8.0
    size = 20 / before if most == math.inf else 2 * (most - start) / (t + most + 8.0)
    noise = -torch.rand(len(t), generator=g).log().double()
    x = tokens(*shifted(torch.randn(len(t), generator=g).double(), size * noise), t=t, start=start)
    first, second = places.over_time(x)
    assert first and first.cause == named
    assert named == "context" or (second and second.cause == "context")
    assert places.over_time(x._replace(start=torch.full_like(t, -1)))[0].cause == "context"


def test_an_end_token_that_differs_alone_makes_the_others_no_wrong_record():
    """eq:martingale: without it E[ρ] is (1 − π_end)/(1 − μ_end), and both sides are right there.

    The end token's logit is less by 1 on one side. Both sides are softmaxes, and μ is what drew.
    """
    g, rows = torch.Generator().manual_seed(0), []
    for i in range(256):
        logits = torch.randn(24, 40, generator=g).double()
        mu, pi = (x.log_softmax(-1) for x in (logits, logits - (torch.arange(40) == 1).double()))
        drawn = torch.multinomial(mu.exp(), 1, generator=g)
        n = next((t for t in range(24) if drawn[t] == 1), 23) + 1
        of_drawn = (x.gather(-1, drawn)[:n, 0].tolist() for x in (mu, pi))
        entropy = -(pi.exp() * pi).sum(-1)[:n]
        rows.append(Response(i + 1, drawn[:n, 0].tolist(), *of_drawn, [5, i], [True] * n,
                             entropy.tolist(), None))
    report = doctor.examine(rows)
    assert report.proper and names(report)[0] == "eos"
    assert not {*names(report)} & causes.RECORDS, str(report)


def test_an_even_entropy_does_not_make_a_missing_cut_a_temperature():
    """eq:unnormalised: log ρ is as even as the entropy then, and as its quotient.

    The record is of before top-p 0.8, and π replays the cut.
    """
    g = torch.Generator().manual_seed(0)
    raw = torch.randn(128 * 24, 2000, generator=g).double().log_softmax(-1)
    pi, _ = sampling_log_probs(raw, top_p=0.8)
    drawn = torch.multinomial(pi.exp(), 1, generator=g)
    entropy = -(pi.exp() * pi.clamp(min=-80)).sum(-1)
    x = tokens(*(y.gather(-1, drawn)[:, 0] for y in (raw, pi)))._replace(entropy=entropy)
    first, second = causes.find_causes(x)
    assert (first.cause, first.confidence, second.cause) == ("raw", "likely", "temperature")


@pytest.mark.parametrize("noise, found", [(0.0, []), (0.1, ["raw"])])
def test_a_record_with_a_little_noise_is_not_of_what_was_drawn(noise, found):
    """eq:record-sign: E[ρ] and E[log ρ] are both too large, though two kernels differ as much."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(50, 60, generator=g, dtype=torch.float64)
    drawn = torch.multinomial(logits.softmax(-1), 1000, True, generator=g).T.reshape(-1, 1)
    whole = logits.repeat(1000, 1)
    recorded = whole + noise * torch.randn(whole.shape, generator=g, dtype=torch.float64)
    other = whole + 0.01 * torch.randn(whole.shape, generator=g, dtype=torch.float64)
    mu, pi = (x.log_softmax(-1).gather(-1, drawn)[:, 0]
              for x in ((recorded, whole) if noise else (whole, other)))
    named = causes.find_causes(tokens(mu, pi, **in_rows(50_000, 50)))
    assert [f.cause for f in named] == found
    assert all(f.confidence == "suggested" and "not of what was drawn" in f.evidence for f in named)


def test_either_side_may_have_the_softcap():
    """eq:same-prefix: a cubic in the log-probs of the side that lacks the cap fits all pairs."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(60, 4, generator=g, dtype=torch.float64)
    whole, capped = (x.log_softmax(-1)[:, :2].flatten()
                     for x in (logits, 4 * (logits / 4).tanh()))
    index = torch.arange(0, 120, 2)
    for mu, pi in ((whole, capped), (capped, whole)):
        assert laws.beyond("softcap", laws.bend(tokens(mu, pi), index, index + 1, 0.01)[0])
        warm = 1.3 * mu
        assert abs(laws.bend(tokens(mu, warm), index, index + 1, 0.01)[0]) < 1e-6


@pytest.mark.parametrize("noise, named", [(0.02, True), (0.8, True), (1.3, False)])
def test_a_law_that_leaves_most_of_the_gap_is_no_first_cause(noise, named):
    """eq:same-prefix: 200 pairs with a slope of 2 save far more than ten nats in each row."""
    g = torch.Generator().manual_seed(1)
    mu = torch.nn.functional.logsigmoid(2 * torch.randn(400, generator=g).double())
    pi = (2 * mu - 1 + noise * torch.randn(400, generator=g).double()).clamp(max=0)
    x = tokens(mu, pi, prefix=torch.arange(400) // 2, ids=torch.arange(400) % 2)
    assert (laws.slope_of(x) is not None) == named
    weak = laws.slope_of(x, sure=False)               # as a second cause it may be said
    assert weak is not None and -200 * math.log(weak.left) > 40


@pytest.mark.made_here
def test_what_explains_the_gap_almost_as_well_is_named_second():
    """A slope of the log-odds is a raw record as well, until E[ρ] or E[1/ρ] excludes one."""
    g = torch.Generator().manual_seed(0)
    x = Tokens.of(planted("temperature", "Qwen2", "sampler"))
    few = x.take(torch.randperm(len(x.t), generator=g)[:60].sort().values)
    found = causes.find_causes(few)
    assert [f.cause for f in found[:2]] in (["temperature", "raw"], ["raw", "temperature"])
    assert all(f.confidence != "certain" for f in found)


# ------------------------------------------------------- ends of responses, and −∞

def test_an_end_token_within_a_response_does_not_end_it():
    rows = [response(i, {"token_ids": ids, "rollout_log_probs": [-1] * len(ids),
                         "train_log_probs": [-1] * len(ids)})
            for i, ids in enumerate([[2, 5, 2], [3, 2], [4, 2, 6, 7]])]
    assert Tokens.of(rows).last.nonzero().flatten().tolist() == [2, 4]


def test_the_end_token_is_that_of_responses_that_were_not_cut():
    """Most of the longest were cut at max_tokens, wherever they were."""
    rows = [response(i, {"token_ids": ids, "rollout_log_probs": [-1] * len(ids),
                         "train_log_probs": [-1] * len(ids)})
            for i, ids in enumerate([[3, 2], [4, 6, 7], [5, 6, 7]])]
    assert Tokens.of(rows).last.tolist() == [False, True, *[False] * 6]


def test_minus_infinity_of_the_trainer_is_a_number():
    rows = [response(1, {"token_ids": [3, 2], "rollout_log_probs": [-1, -2],
                         "train_log_probs": [-1, -1e9]})]
    x = Tokens.of([row._replace(train_log_probs=[0.01, -math.inf]) for row in rows])
    assert x.pi.tolist() == [0, NEVER] and x.e().isfinite().all()
    rows = [row._replace(train_log_probs=[-50.0, -math.inf]) for row in rows]
    assert Tokens.of(rows).pi.tolist() == [LOWEST, NEVER]


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("cut", [dict(top_p=0.9), dict(top_k=20)])
def test_what_pi_alone_excludes_is_a_cut(cut, only):
    """A cut made anew on each side, or on π's alone, gives −∞ to a few tokens that μ drew.

    Without the law these few would decide all others. Replayed sets and the end token have none.
    """
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 200, generator=g, dtype=torch.float64) * 1.5
    near = logits + 0.02 * torch.randn(40, 200, generator=g, dtype=torch.float64)
    mu = sampling_log_probs(logits, **({} if only else cut))[0]
    drawn = torch.multinomial(mu.exp(), 64, replacement=True, generator=g).T          # [64, 40]
    kept = torch.where(mu > -math.inf, near, -math.inf).log_softmax(-1)
    for pi, found in ((sampling_log_probs(near, **cut)[0], ["cut"]), (kept, [])):
        rows = [response(i, {"token_ids": ids, "prompt_ids": [i], **{
            name: x[range(40), ids].tolist() for name, x in (
                ("rollout_log_probs", mu), ("train_log_probs", pi))}})
            for i, ids in enumerate(drawn.tolist())]
        x = Tokens.of(rows)
        never, named = int((x.pi == NEVER).sum()), causes.find_causes(x)[:1]
        assert [f.cause for f in named] == found and (never > 0) == bool(found)
        for f in named:
            assert f"log π = −∞ on {never} of 2560 tokens" in f.evidence
            assert f.confidence == ("certain" if never > 2 else "likely")
    for banned in (x.t == 39, x.ids == x.ids[5]):               # what ends each response; one id
        assert laws.barred(x._replace(pi=torch.where(banned, NEVER, x.mu))) is None
    rare = torch.arange(len(x.t)) == 7
    hot = (x.mu / 0.7).where(~rare, NEVER)               # and a fault of all other tokens
    first, second = causes.find_causes(x._replace(pi=hot))[:2]
    assert (first.cause, first.confidence) == ("cut", "likely") and second.cause == "temperature"


def test_a_policy_that_is_no_distribution_blames_no_sampler():
    """eq:record-sign: with E[ρ] > 1 and E[log ρ] < 0, π sums to more than 1."""
    g = torch.Generator().manual_seed(0)
    mu, d = torch.randn(2, 40_000, generator=g, dtype=torch.float64)
    d = 0.1 * (d - d.mean()) - 1e-4
    mu = 2 * mu.clamp(-1.5, 1.5) - 4
    rows = in_rows(40_000, 40)
    x = tokens(mu, mu + d, **rows)
    assert d.exp().mean() > 1 and causes.texture(x) is None
    assert causes.texture(tokens(mu, mu + d + 2e-4, **rows)).cause == "raw"       # E[log ρ] > 0
