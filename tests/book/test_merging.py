"""What a merge loses is predicted from units in the last place; the declared runs are as told."""

import csv
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from three_policies.studies import merging

ROOT = Path(__file__).resolve().parents[2]

CHAPTER = (ROOT / "math" / "1-three-policies.md").read_text()


def test_a_unit_is_the_distance_to_the_next_number_of_bfloat16():
    w = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    above = (w.view(torch.int16) + 1).view(torch.bfloat16)         # away from 0
    assert torch.equal(merging.unit(w.float()), (above.double() - w.double()).abs())
    assert merging.unit(torch.tensor([0.0])).item() == 0


def test_an_entry_is_lost_within_half_a_unit_and_towards_zero_from_a_power_of_two_a_quarter():
    """All numbers of three binades, on either side of each limit; the rule takes u/2 everywhere."""
    w = torch.arange(0x3C80, 0x3E00, dtype=torch.int16).view(torch.bfloat16)       # 2⁻⁶ to 2⁻³
    power, u = torch.frexp(w.float()).mantissa == 0.5, merging.unit(w.float())
    assert power.sum() == 3 and len(w) == 3 * 128
    for sign in (1, -1):
        limit = torch.where(power & (sign < 0), u / 4, u / 2)
        for within, share in ((True, 0.99), (False, 1.01)):
            lost = (w.double() + sign * share * limit).float().bfloat16() == w
            assert (lost == within).all(), (sign, share)


@pytest.mark.parametrize("sigma", [1e-6, 1e-4, 1e-3])
def test_at_a_power_of_two_the_rules_share_is_at_most_a_third_too_high(sigma):
    w, u = torch.tensor([[2.0 ** -4]]), 2.0 ** -11
    _, rule, _ = merging.rounding(w, torch.full((1, 1), sigma))
    exact = sum(math.erf(limit / sigma / math.sqrt(2)) for limit in (u / 2, u / 4)) / 2
    assert 0.965 < rule.item() / exact < 1.035 * 4 / 3                  # the histogram's steps


@pytest.mark.parametrize("sigma", [1e-5, 1e-4, 1e-3, 1e-2])
def test_gain_loss_and_noise_are_those_of_roundings(sigma):
    """A million normal updates are rounded by torch; means are within four standard errors.

    The histogram's steps of 3.5 % are added to them.
    """
    n, generator = 4000, torch.Generator().manual_seed(1)
    w = 0.05 * torch.randn(250, 1, generator=generator).bfloat16().float()
    w = w.bfloat16().float()
    delta = sigma * torch.randn(250, n, generator=generator, dtype=torch.float64)
    moved = (w.double() + delta).float().bfloat16().double() - w
    gain, lost, noise = merging.rounding(w, torch.full((250, 1), sigma))
    for predicted, drawn in ((lost, (moved == 0).double()), (gain, moved * delta / sigma ** 2),
                             (noise, (moved - gain * delta) ** 2)):
        error = drawn.std() / math.sqrt(drawn.numel())
        assert abs(predicted.mean() - drawn.mean()) < 4 * error + 0.035 * predicted.mean()


def test_the_declared_prediction_is_judged_as_the_chapter_says():
    declared = yaml.safe_load((ROOT / "studies/merging/declared.yaml").read_text())
    cells, tolerance = merging.cells(), declared["tolerance"]
    for (rank, rate), share in zip(merging.CELLS, declared["first_step_share"].values(),
                                   strict=True):
        assert share == pytest.approx(cells[rank, rate, 1]["share"], rel=tolerance)
    assert list(declared["first_step_share"]) == [f"rank {rank}, rate {rate:g}"
                                                  for rank, rate in merging.CELLS]

    pairs = [("share_predicted", "share"), ("kl_predicted", "kl_merged")]
    said = re.search(r"within (\d+) % of what was measured .*? (\d+) of the 24 shares and (\d+) of "
                     r"the 24 KLs. Relative to the prediction instead it is (\d+) and (\d+),",
                     " ".join(CHAPTER.split()))
    assert said and len(cells) == 24
    assert [100 * tolerance, *(merging.held(*pair, tolerance) for pair in pairs),
            *(merging.held(*reversed(pair), tolerance) for pair in pairs)] == [
        int(x) for x in said.groups()]
    assert all(x["share_predicted"] > x["share"] for x in cells.values())
    worst = max(cells.values(), key=lambda x: x["kl_merged"] / x["kl_kernels"])
    assert f"{worst['kl_merged']:.1e} against {worst['kl_kernels']:.1e}" in CHAPTER
    assert worst["kl_merged"] < worst["kl_kernels"]
    assert f"up to {100 * max(x['share'] for x in cells.values()):.0f} %" in CHAPTER
    grids = [abs(x["kl_merged_bfloat16"] / x["kl_merged"] - 1) for x in cells.values()]
    up = sum(x["kl_merged_bfloat16"] > x["kl_merged"] for x in cells.values())
    said = (f"changed the KL by {100 * sum(grids) / 24:.0f} % on average, up in {up} of 24 cells "
            f"and down in {24 - up}")
    assert said in " ".join(CHAPTER.split())


def test_every_declared_cell_is_a_row_and_no_other():
    with (ROOT / "studies/merging/results.csv").open() as file:
        found = [(int(row["seed"]), int(row["rank"]), float(row["rate"]), int(row["step"]))
                 for row in csv.DictReader(file)]
    assert found == [(seed, *cell, step) for seed in merging.SEEDS for cell in merging.CELLS
                     for step in merging.STEPS]
