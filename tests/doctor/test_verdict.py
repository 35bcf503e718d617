"""The doctor's verdict: E[ρ] is of all tokens, causes are of a bounded part, rows in any order."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from three_policies import doctor
from three_policies.doctor import causes, laws, places
from three_policies.doctor.dumps import Response, response
from three_policies.doctor.report import COSTS
from three_policies.doctor.tokens import Tokens
from three_policies.tests.support.certified import certifies


def row(**changes):
    return {"prompt_ids": [1], "token_ids": [5, 6, 7], "rollout_log_probs": [-1.0, -2.0, -1.0],
            "train_log_probs": [-1.0, -2.0, -1.5], "entropy": [1.0, 1.0, 1.0]} | changes


def test_the_mean_of_rho_and_its_error_are_those_by_hand():
    """eq:martingale: E[ρ] = 1 under an honest record; the error is √Σ(ρ − 1)² / n."""
    rows = [row(), row(train_log_probs=[-0.5, -2.0, -1.0]), row(response_mask=[1, 0, 1])]
    report = doctor.examine(response(i, x) for i, x in enumerate(rows, 1))
    rho = [1, 1, math.exp(-0.5), math.exp(0.5), 1, 1, 1, math.exp(-0.5)]
    assert (report.responses, report.tokens, report.missing) == (3, 8, ())
    assert report.mean == pytest.approx(sum(rho) / 8, rel=1e-12)
    squares = sum((x - 1) ** 2 for x in rho)
    assert report.error == pytest.approx(math.sqrt(squares) / 8, rel=1e-12)


@pytest.mark.parametrize("tokens, mean, error, proper", [
    (99, 1.0, 0.0, None), (99, 2.0, 0.0, None),
    (100, 1.0390625, 2 ** -7, True), (100, 1.0391, 2 ** -7, False),
    (100, 0.9609375, 2 ** -7, True), (100, 0.9609, 2 ** -7, False),
    (100, 1.00009, 0.0, True), (100, 1.00011, 0.0, False)])
def test_improper_is_more_than_five_errors_and_rounding(tokens, mean, error, proper):
    """2⁻⁷ is exact in binary: five errors are proper, and a little more is not."""
    report = doctor.Report(1, tokens, mean, error, (), [], Tokens.of([]))
    assert report.proper is proper and report.faulty is (proper is False)


@certifies("float64")
@pytest.mark.parametrize("mean, error, proper", [
    (1.0, 0.0099, True), (1.0, 0.0101, None), (129.1, 44.4, None), (1.4, 0.09, None),
    (8.08, 0.52, False), (0.6, 0.07, False),    # more than five errors from 1, and from 0
    (0.6, 0.13, None), (0.02, 0.016, None)])    # less from 0: a few tokens make up the mean
def test_an_error_that_would_hide_a_broken_record_leaves_it_undecided(mean, error, proper):
    """eq:affirmed: E[ρ] = 1 is affirmed if a loss of a twentieth would have been seen.

    In words and in JSON it is neither affirmed nor denied.
    """
    report = doctor.Report(1, 4000, mean, error, (), [], Tokens.of([]))
    assert report.proper is proper and report.as_json()["proper"] is proper
    line = str(report).splitlines()[1]
    assert line.startswith({True: "π is a distribution over what", False: "π is NOT a distribution",
                            None: "E[ρ] = "}[proper])
    assert ("is undecided: an error above 0.01 would hide" in line) == (proper is None)
    assert ("(undecided)" in report.in_short()) == (proper is None)
    assert report.faulty is (proper is False)


def test_a_column_whose_blocks_are_in_another_order_is_not_affirmed():
    """Blocks of log π stand in another order, as after a split of the context over devices.

    A few of its values are then far above log μ, and the mean of ρ is of these few.
    """
    g = torch.Generator().manual_seed(0)
    mu = -5 * torch.rand(128, 32, generator=g).double() ** 3 - 0.01
    mu[0, 0] = -12
    pi = mu.view(128, 4, 8)[:, [1, 3, 0, 2]].reshape(128, 32)
    report = doctor.examine(
        response(i, {"prompt_ids": [i], "token_ids": [5] * 32, "rollout_log_probs": a.tolist(),
                     "train_log_probs": b.tolist()}) for i, (a, b) in enumerate(zip(mu, pi)))
    print(f"E[ρ] = {report.mean:.1f} ± {report.error:.1f}")
    assert report.error > 10 and abs(report.mean - 1) < 2 * report.error
    assert report.proper is None and report.as_json()["proper"] is None and report.faulty
    assert "is a distribution" not in str(report) and "(undecided)" in report.in_short()


def test_what_was_never_drawn_leaves_it_undecided():
    """eq:affirmed: of 200 tokens no ρ is above 1, and a mass of 5/200 need not be drawn."""
    for pi, proper in ((-1.02, None), (-1.03, False), (-1.00005, True)):
        report = doctor.examine(response(i, row(
            token_ids=[5], rollout_log_probs=[-1.0], train_log_probs=[pi], entropy=[1.0]))
            for i in range(200))
        assert report.proper is proper
        assert ("tokens that were never drawn may make up the difference" in str(report)) == (
            proper is None)


@pytest.mark.parametrize("tokens, mean, says", [
    (1000, 1.0, "π is a distribution over what μ sampled: E[ρ] = 1.0000 ± 0.0050 (expected 1)."),
    (1000, 2.0, "π is NOT a distribution over what μ sampled: E[ρ] = 2.0000"),
    (99, 2.0, "E[ρ] = 2.0000 ± 0.0050 (expected 1) is undecided: fewer than 100 tokens cannot")])
def test_the_report_says_whether_pi_is_a_distribution(tokens, mean, says):
    report = doctor.Report(7, tokens, mean, 0.005, (), [], Tokens.of([]))
    first, second, _, last = str(report).split("\n")
    assert first == f"7 responses, {tokens} tokens." and second.startswith(says)
    assert (last == "No cause found: what differs is within the noise of two kernels.") == (
        report.verdict == "healthy")
    assert report.verdict == ("fault" if "is NOT" in says else
                              "healthy" if tokens == 1000 else "cannot tell")


@pytest.mark.parametrize("mean, why", [(0.2, "lacks a cut that μ had"), (2.0, "adds up to more")])
def test_noise_is_no_reason_where_pi_is_not_a_distribution(mean, why):
    """The verdict on π and the last sentence agree, in the report and in its short form."""
    report = doctor.Report(7, 1000, mean, 0.02, (), [], Tokens.of([]))
    for text in (str(report).split("\n")[-1], report.in_short()):
        assert "log μ is not of what was drawn, or that π " + why in text and "noise" not in text


@pytest.mark.parametrize("few, said", [(9, True), (10, False)])
def test_what_was_never_drawn_may_be_where_the_rest_of_pi_is(few, said):
    """If no ρ or few are on the other side of 1, a heavy tail looks like a cut."""
    rows = [response(1, row(token_ids=[5], rollout_log_probs=[-1.0], entropy=[1.0],
                            train_log_probs=[-0.9 if i < few else -1.5])) for i in range(500)]
    unless = "NOT a distribution over what μ sampled, unless it has over twice μ's mass on tokens"
    assert (f"{unless} that were never drawn: E[ρ]" in str(doctor.examine(rows))) == said
    above = [response(1, row(token_ids=[5], rollout_log_probs=[-1.0], entropy=[1.0],
                             train_log_probs=[-0.9]))] * 500
    assert unless not in str(doctor.examine(above))       # more mass elsewhere would make it worse


def test_a_copied_column_is_named():
    """No two kernels agree to the last digit; verl's π_old in bypass mode is a copy of log μ."""
    same = row(train_log_probs=[-1.0, -2.0, -1.0])
    copied, own = (doctor.examine([response(1, x)]) for x in (same, row()))
    assert "both columns are equal to the last digit, as if one were a copy" in str(copied)
    assert "copy" not in str(own) and copied.verdict == "cannot tell" and copied.exit_code == 3


def test_what_explains_the_gap_as_well_begins_with_or_and_what_is_left_with_then():
    """The first cause begins with Cause, and each has what to do about it."""
    def words(*found):
        report = doctor.Report(7, 1000, 1.0, 0.1, (), list(found), Tokens.of([]))
        lines = str(report).split("\n")[3:]
        assert [f"Do      {causes.CAUSES[f.cause][1]}" for f in found] == lines[2::3]
        return [line.split()[0] for line in lines[::3]]
    raw, eos = laws.Finding("raw", 1.0, "a sign"), laws.Finding("eos", 1.0, "a place")
    first = laws.Finding("temperature", 0.1, "a slope", other=raw)
    assert words(first, raw, eos) == ["Cause", "Or", "Then"]
    assert words(first, raw._replace(left=0.9), eos) == ["Cause", "Then", "Then"]
    assert words(first._replace(other=None), raw) == ["Cause", "Then"]


def test_log_pi_of_minus_infinity_is_a_ratio_of_zero():
    report = doctor.examine([response(1, row(train_log_probs=[-1.0, -math.inf, -0.5]))])
    assert report.mean == pytest.approx((1 + 0 + math.exp(0.5)) / 3, rel=1e-12)
    assert report.proper is None


def test_what_is_missing_is_named_with_its_cost():
    given = row()
    del given["prompt_ids"], given["entropy"]
    report = doctor.examine([response(1, given)])
    assert report.missing == ("entropy", "prompt_ids")
    assert all(f"Without {name}: {cost}." in str(report) for name, cost in COSTS)


@pytest.mark.parametrize("name", ["prompt_ids", "entropy"])
def test_each_that_is_missing_is_named_alone(name):
    given = row()
    del given[name]
    assert doctor.examine([response(1, given)]).missing == (name,)


def test_a_ratio_beyond_all_numbers_is_a_large_one():
    """ρ counts up to e²⁰."""
    far = row(rollout_log_probs=[-1.0, -2.0, -2000.0], train_log_probs=[-1.0, -2.0, -1.0])
    assert doctor.examine([response(1, far)]).mean == pytest.approx(1 + math.expm1(20) / 3)


def test_of_an_empty_dump_nothing_is_said():
    report = doctor.examine([])
    assert (report.responses, report.tokens, report.mean, report.error) == (0, 0, 1, 0)
    assert report.proper is None


def test_a_line_and_json_begin_with_the_first_cause():
    """What is printed in JSON has what to do about each cause; a line has the first alone."""
    found = [laws.Finding("eos", 0.1, "a place"), laws.Finding("raw", 0.5, "a sign")]
    report = doctor.Report(7, 1000, 1.0, 0.0078125, (), found, Tokens.of([]))
    assert report.as_json() == {
        "verdict": "fault", "k3": 0.0, "rms": 0.0,
        "pair": {"precision": None, "experts": None, "quantize": None},
        "proper": True, "e_rho": [1.0, 0.0078125], "tokens": 1000, "causes": [
            {"cause": "eos", "confidence": "certain", "evidence": "a place",
             "remedy": causes.CAUSES["eos"][1]},
            {"cause": "raw", "confidence": "likely", "evidence": "a sign",
             "remedy": causes.CAUSES["raw"][1]}]}
    assert report.in_short() == "E[ρ] = 1.0000 ± 0.0078; eos (certain): a place"
    assert report._replace(causes=[]).in_short() == (
        "E[ρ] = 1.0000 ± 0.0078; no cause found: what differs is within the noise of two kernels")


def test_a_suggestion_after_the_first_is_no_broken_law():
    """Weights that are rounded on purpose look a little like another temperature, too."""
    one, other = laws.Finding("weights", 1.0, "a size"), laws.Finding("temperature", 1.0, "a slope")
    report = doctor.Report(7, 1000, 1.0, 0.0078125, (), [one, other], Tokens.of([]))
    assert one.confidence == other.confidence == "suggested" and report.verdict != "fault"
    assert report._replace(causes=[other, one]).verdict == "fault"
    likely = other._replace(left=0.5)
    assert report._replace(causes=[one, likely]).verdict == "fault"


@pytest.mark.parametrize("limit, most, least", [(900, 900, 300), (12_000, 12_000, 12_000),
                                                (11_999, 11_999, 4000)])
def test_memory_is_bounded_and_the_identity_is_of_all_tokens(limit, most, least, monkeypatch):
    """No more than LIMIT tokens stay in memory, in whole groups, however many rows are read."""
    monkeypatch.setattr("three_policies.doctor.report.LIMIT", limit)
    stayed = []
    of = Tokens.of

    def count(rows, places):
        stayed.extend(rows)
        return of(rows, places)
    monkeypatch.setattr(Tokens, "of", count)
    stream = (response(i + 1, row(prompt_ids=[i // 8])) for i in range(4000))
    report = doctor.examine(stream)
    assert report.tokens == 12000 and least <= 3 * len(stayed) <= most
    assert report.mean == pytest.approx((2 + math.exp(-0.5)) / 3, rel=1e-9)
    groups = [r.prompt_ids[0] for r in stayed]
    assert all(groups.count(g) == 8 for g in groups)


def test_of_one_group_that_is_larger_than_the_limit_a_part_stays(monkeypatch):
    monkeypatch.setattr("three_policies.doctor.report.LIMIT", 90)
    report = doctor.examine(response(i + 1, row()) for i in range(100))
    assert report.tokens == 300 and 45 <= len(report.examined.mu) <= 90


def test_masked_tokens_take_their_place_in_memory(monkeypatch):
    """LIMIT counts them in every row: 11 whole rows of 18 tokens are below 200."""
    monkeypatch.setattr("three_policies.doctor.report.LIMIT", 200)
    wide = row(**{name: values * 6 for name, values in row().items()
                  if name in ("token_ids", "rollout_log_probs", "train_log_probs", "entropy")})
    rows = [response(i + 1, wide | {"response_mask": [1] + [0] * 17}) for i in range(100)]
    assert 5 <= len(doctor.examine(rows).examined.mu) <= 11


def test_an_empty_response_lacks_nothing():
    """No column of it can be missing: `entropy` was, for a dump that has it."""
    empty = response(2, {name: [] for name in row() if name != "prompt_ids"} | {"prompt_ids": [1]})
    assert doctor.examine([response(1, row()), empty]).missing == ()


def test_a_response_that_is_larger_than_the_limit_stays_whole(monkeypatch):
    monkeypatch.setattr("three_policies.doctor.report.LIMIT", 2)
    report = doctor.examine([response(1, row())])
    assert len(report.examined.mu) == report.tokens == 3


ROWS, LENGTH = 60, 10


def tied(seed):
    """Return tokens of which 20 end tokens have the gaps of 20 tokens of older weights, shuffled.

    Both parts leave one share of the gap, but for the order in which their gaps are added.
    """
    g = torch.Generator().manual_seed(seed)
    n = ROWS * LENGTH
    row, t = torch.arange(n) // LENGTH, torch.arange(n) % LENGTH
    last, old = (t == 9) & (row % 3 == 0), (t == 4) & (row % 3 == 1)
    odds = torch.randn(n, generator=g, dtype=torch.float64).where(~(last | old), 0.3)
    gap = torch.where(torch.rand(n, generator=g) < 0.5, -0.02, 0.02).double()
    gap[last] = 0.5 + torch.rand(20, generator=g, dtype=torch.float64)
    gap[old] = gap[last][torch.randperm(20, generator=g)]
    none = torch.zeros(n, dtype=torch.bool)
    return Tokens(
        logsigmoid(odds), logsigmoid(odds + gap), row, t, none.long(), torch.arange(n) % 50, last,
        torch.arange(n), none, none, (~old).long(), torch.full((n,), math.nan).double())


def shuffled(x, seed):
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    return x.take((order[:, None] * LENGTH + torch.arange(LENGTH)).flatten())


def test_two_causes_of_one_share_are_named_in_one_order():
    """All is equal to the last digit, the shares and the sentences too."""
    x = tied(1)
    first, second = places.places(x)
    assert abs(first.left / second.left - 1) < 1e-12
    found = {tuple(f[:3] for f in causes.find_causes(shuffled(x, n))) for n in range(20)}
    assert [[f[0] for f in each] for each in found] == [["eos", "stale"]]


def test_shares_whose_first_nine_digits_are_equal_are_one_share():
    def named(*shares):
        return [f.cause for f in causes.by_share([
            laws.Finding(cause, left, "") for cause, left in zip(("stale", "eos"), shares)])]
    assert named(0.3, 0.3) == named(0.3, 0.3 + 1e-15) == named(0.3 + 1e-15, 0.3) == ["eos", "stale"]
    assert named(0.3, 0.3 + 1e-8) == ["stale", "eos"] and named(0.0, 1e-300) == ["stale", "eos"]


def test_pairs_of_draws_are_those_of_any_order():
    """eq:same-prefix: which of several draws after one prefix are paired is no matter of rows."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=g, dtype=torch.float64)
    n = torch.arange(ROWS * LENGTH)
    prefix = n % 6
    ids = torch.multinomial(logits[prefix].softmax(-1), 1, generator=g)[:, 0]
    mu = logits.log_softmax(-1)[prefix, ids]
    noisy = (0.7 * logits).log_softmax(-1)[prefix, ids] + 0.05 * torch.randn(
        n.shape, generator=g, dtype=torch.float64)
    x = tied(0)._replace(mu=mu, pi=noisy.clamp(max=0), prefix=prefix, ids=ids,
                         last=torch.zeros_like(n).bool(), version=torch.zeros_like(n))
    found = {tuple(f[:3] for f in causes.find_causes(shuffled(x, n))) for n in range(5)}
    assert len(found) == 1 and "pairs of tokens after one prefix" in found.pop()[0][2]


def test_of_two_tokens_that_end_as_many_responses_the_smaller_is_the_end_token():
    rows = [Response(i, y, [-1.0] * len(y), [-1.0] * len(y), None, [True] * len(y))
            for i, y in enumerate([[3, 9], [4, 2], [5, 6, 7]])]
    for order in (rows, rows[::-1]):
        x = Tokens.of(order)
        assert x.ids[x.last].tolist() == [2]
