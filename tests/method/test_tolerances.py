"""tolerances.py: every order of a float32 sum keeps to its bound; a real error does not."""

import math

import pytest
import torch

from three_policies.tests.support.tolerances import gamma, of_sum

N = 2 ** 10
SINGLE = torch.float32


def numbers(seed, n=N, rows=50):
    """Draw rows that cancel, of one sign, and of very different sizes: [3·rows, n], float32."""
    x = torch.randn(3, rows, n, generator=torch.Generator().manual_seed(seed))
    x[1] = x[1].abs()
    x[2] *= torch.logspace(-6, 6, n)
    return x.flatten(0, 1)


def pairwise(x):
    """Sum by halves, each rounded to its type: pairwise summation as the books define it."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


ORDERS = {
    "torch": lambda x: x.sum(-1), "backwards": lambda x: x.flip(-1).sum(-1),
    "one by one": lambda x: x.cumsum(-1)[..., -1],
    "columns": lambda x: x.T.contiguous().sum(0),
    "matrix product": lambda x: x @ torch.ones(x.shape[-1]),
    "in 7 parts": lambda x: sum(part.sum(-1) for part in x.tensor_split(7, -1)),
    "by halves": pairwise}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_a_sum_is_further_off_than_the_bound(order, seed):
    x = numbers(seed)
    exact, size = x.double().sum(-1), x.double().abs().sum(-1)
    off = (ORDERS[order](x).double() - exact).abs()
    assert (off <= of_sum(size, N)).all()
    if order == "by halves":
        assert (off <= of_sum(size, N, pairwise=True)).all()
        assert of_sum(1.0, N, pairwise=True) < 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_an_error_a_hundred_times_the_bound_is_caught(order):
    """A term in a thousand that is left out is seen: the bound is no bound on just anything."""
    x = numbers(0)
    exact, size = x.double().sum(-1), x.double().abs().sum(-1)
    for n, bound in (N, of_sum(size, N)), (2, of_sum(size, 2)):
        assert ((ORDERS[order](x).double() + 100 * bound - exact).abs() > of_sum(size, n)).all()
    kept = torch.cat([x[50:100, :512], x[50:100, 513:]], -1)        # of one sign: all terms count
    lost = (ORDERS["torch"](kept).double() - exact[50:100]).abs()
    assert (lost > of_sum(size[50:100], N)).float().mean() > 0.9


@pytest.mark.parametrize("terms", [1, 2, 64, 1000])
def test_products_and_exponentials_count_their_own_roundings(terms):
    """A dot product rounds a term once (Higham's equation 3.5: γ_n), a sum of e^x twice."""
    for seed in range(20):
        a, b = numbers(seed, terms, 10), numbers(seed + 99, terms, 10).flip(0)
        exact, size = ((f(a.double()) * f(b.double())).sum(-1) for f in (lambda x: x, torch.abs))
        assert (((a * b).sum(-1) - exact).abs() <= of_sum(size, terms, before=1)).all()
        assert ((torch.linalg.vecdot(a, b) - exact).abs() <= of_sum(size, terms, before=1)).all()
        x = a.clamp(-10, 10)
        exact = x.double().exp().sum(-1)
        assert ((x.exp().sum(-1) - exact).abs() <= of_sum(exact, terms, before=2)).all()


def test_gamma_is_what_the_books_have_and_refuses_to_bound_nothing():
    assert gamma(0) == 0 and gamma(1) == pytest.approx(2 ** -24, rel=1e-6)
    assert gamma(1, torch.float64) == 2 ** -53 / (1 - 2 ** -53)
    assert gamma(1, torch.bfloat16) == pytest.approx(2 ** -8, rel=1e-2)
    assert gamma(10) + gamma(20) + gamma(10) * gamma(20) <= gamma(30)           # Higham's Lemma 3.3
    assert math.isclose(of_sum(3.0, 5, before=2), 3 * gamma(6), rel_tol=1e-12)
    for roundings, dtype in (200_000, SINGLE), (3, torch.bfloat16):
        with pytest.raises(ValueError, match="compare in float64"):
            gamma(roundings, dtype)
