"""What is measured of a single cause is exact where it should be, and the table is whole.

A tiny model stands in for the real one: its rows are measured here, from its weights to a dump.
"""

import csv
import itertools
import math
from dataclasses import replace

import pytest
import torch

from three_policies.book import tables
from three_policies.doctor.dumps import read
from three_policies.studies import both_sides, sizes
from three_policies.tests.support.tolerances import gamma

PROMPTS = [[3, 5, 7, 2], [9, 4], [1, 8, 6], [5, 5]]


@pytest.fixture
def measured(tiny_model, tmp_path, monkeypatch):
    """Return a function that measures a row on the tiny model: its numbers and its dump."""
    monkeypatch.setattr(sizes, "LENGTHS", (4, 8, 24))
    monkeypatch.setattr(sizes, "questions", lambda model, asked: PROMPTS * 8)

    def measure(name, **changes):
        monkeypatch.setitem(sizes.ROWS, name, replace(sizes.ROWS[name], **changes))
        row = sizes.measure(name, tiny_model, tmp_path, sizes.Asked(tokens=24))
        numbers = {key: float(x) for key, x in row.items() if key != "row"}
        return numbers, list(read(tmp_path / f"{name}.jsonl"))
    return measure


def test_equal_weights_differ_by_rounding_alone(measured):
    row, dump = measured("float32")
    assert row["responses"] == len(dump) == 32 and row["tokens"] == sum(
        len(one.token_ids) for one in dump)
    assert 0 <= row["k3_exact"] < 1e-10 and row["largest"] < 1e-4
    assert row["ess_24"] == row["ess_steps_24"] == 1


def test_a_cause_is_as_large_in_the_dump_as_in_the_table(measured):
    row, dump = measured("int4")
    log_rho = torch.cat([torch.tensor(one.train_log_probs) - torch.tensor(one.rollout_log_probs)
                         for one in dump]).double()
    assert row["k3"] == pytest.approx((log_rho.expm1() - log_rho).mean().item(), rel=1e-3)
    assert row["rms"] == pytest.approx(log_rho.square().mean().sqrt().item(), rel=1e-3)
    assert row["largest"] == pytest.approx(log_rho.abs().max().item(), rel=1e-3)
    assert row["k3_exact"] == pytest.approx(row["kl"], rel=1e-3)           # μ is nowhere 0
    assert abs(row["k3"] - row["k3_exact"]) < 5 * row["k3_error"] + 0.2 * row["k3_exact"]
    assert row["equal"] < 0.1


def test_a_finer_grid_is_a_smaller_mismatch(measured):
    found = [measured(name)[0]["k3_exact"] for name in ("int8", "float8-e4m3", "int4")]
    assert found == sorted(found) and found[-1] > 10 * found[0]


def test_the_same_noise_draws_each_row(measured):
    one, other = ([x.token_ids for x in measured(name)[1]] for name in ("float32", "int8"))
    assert sum(x == y for x, y in zip(one, other)) > len(one) / 4


def test_a_cut_has_another_k3_than_kl(measured):
    """π is not cut, so E_μ[ρ] is the mass that μ kept and E[k3] = E_μ[ρ] − 1 + KL."""
    row, dump = measured("top-p", sampled={"top_p": 0.5})
    assert 0 < row["k3_exact"] < row["kl"]
    mean = torch.cat([(torch.tensor(x.train_log_probs) - torch.tensor(x.rollout_log_probs)).exp()
                      for x in dump]).mean().item()
    assert row["k3_exact"] == pytest.approx(mean - 1 + row["kl"], abs=0.02)


def test_a_layer_left_out_is_left_out(measured):
    assert measured("layer-left-out", without=1)[0]["k3_exact"] > 1e-3


def drawn_of(mu, tokens, ids=None):
    table = mu if ids is None else mu.gather(-1, ids)
    return both_sides.Drawn(tokens, mu[range(len(tokens)), tokens].tolist(), ids, table)


def test_what_is_exact_is_a_sum_over_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    z, noise = torch.randn(2, 5, 40, generator=generator)
    mu, tokens = (z + 0.5 * noise).log_softmax(-1), [1, 2, 3, 4, 5]
    p, m = z.double().softmax(-1), mu.double().exp()
    whole = both_sides.compared(drawn_of(mu, tokens), z)
    close = {"rtol": 1e-5, "atol": 1e-9}
    torch.testing.assert_close(whole.kl, (m * (m / p).log()).sum(-1), **close)
    torch.testing.assert_close(whole.second, (p ** 2 / m).sum(-1), **close)
    torch.testing.assert_close(whole.mass, torch.ones(5).double(), **close)
    torch.testing.assert_close(whole.entropy.double(), -(p * p.log()).sum(-1), **close)

    few = both_sides.compared(drawn_of(mu, tokens, mu.topk(8).indices), z)      # the others as one
    assert (few.kl < whole.kl).all() and (few.second < whole.second).all()
    torch.testing.assert_close(few.mass, torch.ones(5).double(), **close)
    every = both_sides.compared(drawn_of(mu, tokens, mu.topk(40).indices), z)
    # What float32's rounding leaves of 1 is one more token here, which π has at most 1e-12 of.
    left = gamma(40) * math.log(1e12)
    torch.testing.assert_close(every.kl, whole.kl, rtol=gamma(40), atol=left)


def test_steps_and_responses_agree_on_ess():
    """If steps are equal and independent, (1 + χ²)^−T is left.

    Of 20 000 responses the drawn share has a standard error of 0.0014, and five are allowed.
    """
    n, T = 20_000, 4
    m, p = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.5, 0.5], [0.6, 0.4]))
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (n, T), generator=generator).tolist()
    each = {row: drawn_of(m.expand(T, 2), [*row]) for row in itertools.product((0, 1), repeat=T)}
    compared = {row: both_sides.compared(one, p.expand(T, 2)) for row, one in each.items()}
    row = sizes.numbers(*([of[tuple(row)] for row in y] for of in (each, compared)))
    left = 1 / (0.6 ** 2 / 0.5 + 0.4 ** 2 / 0.5) ** T
    assert row["ess_steps_256"] == pytest.approx(left, rel=1e-12)
    assert row["ess_256"] == pytest.approx(left, abs=0.007)
    assert row["kl_1_16"] == pytest.approx(-math.log(4 * 0.6 * 0.4) / 2, rel=1e-12)


def test_a_row_that_stands_is_not_measured_again(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(name, model, out, asked_of, device):
        asked.append(name)
        return {"row": name, "k3": "0.5"}
    monkeypatch.setattr(sizes, "measure", measure)
    given = ["--model", "x", "--out", str(tmp_path), "--row", "int8", "--row", "int4"]
    sizes.main(given[:-2])
    sizes.main(given)
    assert asked == ["int8", "int4"] and "int8 is in" in capsys.readouterr().out
    assert [*sizes.results(tmp_path / "results.csv")] == ["int8", "int4"]
    sizes.main(given[:4])
    assert sorted(asked) == sorted(name for name, row in sizes.ROWS.items() if not row.on_gpu)


def test_every_row_of_the_table_is_declared_and_told_once():
    with (sizes.HERE / "sizes/results.csv").open() as file:
        names = [row["row"] for row in csv.DictReader(file)]
    assert len(names) == len(set(names)) and set(names) <= set(sizes.ROWS)
    header, rows = sizes.table()
    assert [row[0] for row in rows] == [f"`{name}`" for name in sizes.ROWS if name in names]
    assert all(len(row) == len(header) for row in rows)
    assert {name for name, row in sizes.ROWS.items() if not row.on_gpu} <= set(names)


@pytest.mark.parametrize("T", [2, 4])
def test_the_regions_end_where_a_method_misses_by_a_fifth(T):
    """The borders are interpolated, so each is tried: noise of that k3, the exact bias."""
    found = tables.borders(T)
    assert found["no weight"] < found["token"] < found["sequence"]
    for name, product in found.items():
        size = tables.noise_with_k3(product / T, T)
        assert tables.bias_and_std(tables.SIMPLE[name], T, size)[0] == pytest.approx(0.2, rel=0.05)


def test_the_figures_borders_are_the_tables():
    from three_policies.book import figures
    lengths = torch.tensor([2.0, 4.0, 8.0, 80.0]).double()
    ignore, token, sequence = figures.size_borders(lengths)
    for i, T in enumerate((2, 4, 8)):
        assert ignore[i] * T == pytest.approx(tables.borders(T)["no weight"])
        assert token[i] * T == pytest.approx(tables.borders(T)["token"])
    assert ignore[3] * 80 == pytest.approx((ignore[2] * 8).item())
    assert ((1 + 2 * sequence) ** -lengths).tolist() == pytest.approx([0.5] * 4)
    assert (ignore < token).all() and (token < sequence).all()
