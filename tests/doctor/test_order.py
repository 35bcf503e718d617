"""No order of a dump's rows decides what is wrong with it, and no last bit which of two causes."""

import math

import torch
from torch.nn.functional import logsigmoid

from three_policies.doctor import causes, laws, places
from three_policies.doctor.dumps import Response
from three_policies.doctor.tokens import Tokens

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
