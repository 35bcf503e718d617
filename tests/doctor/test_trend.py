"""What a gap grows with, from exact policies that learn while an engine has some of their weights.

A policy climbs J by its exact gradient. The engine has its logits of some earlier step, or rounded,
plus the error of its own arithmetic; k3 of a step is the exact KL(μ‖π) of a token, and a batch adds
noise to it. Each fault stands beside the case without it. No verdict may change if rows are left
out, whichever they are.
"""

import json
import math

from types import SimpleNamespace

import pytest
import torch

from three_policies.doctor.command import main
from three_policies.doctor.dumps import append
from three_policies.doctor.growth import room
from three_policies.doctor.logs import Log, Row, of_dumps
from three_policies.doctor.normal import Class
from three_policies.doctor.trend import judge
from three_policies.oracle import Policy, grad_J, kl, rewards
from three_policies.tests.support.certified import certifies

STEPS, RATE = 48, 0.02
SPREAD = 0.15               # of log k3 from batch to batch: that of a few thousand tokens


def with_logits(logits):
    policy = Policy(4, 3)
    policy.logits = logits.clone().requires_grad_()
    return policy


def climbed(rates):
    """Return the logits before each step of ascent, each of the length of its rate."""
    policy = Policy(4, 3, seed=3)
    reward, found = rewards(policy), []
    for rate in rates:
        found.append(policy.logits.detach().clone())
        gradient = grad_J(policy, reward).reshape(policy.logits.shape)
        policy = with_logits(found[-1] + rate * gradient / gradient.norm())
    return found


def log_of(engine, rates=(RATE,) * STEPS, floor=0.01, columns=lambda step: {}):
    """Return the log of a run; engine(logits, t) are the weights at step t, from 0."""
    logits, draw = climbed(rates), torch.Generator().manual_seed(0)
    own = floor * torch.randn(logits[0].shape, generator=draw).double()
    rows: list[Row] = []
    for t, (now, rate) in enumerate(zip(logits, rates)):
        mu, pi = with_logits(engine(logits, t) + own), with_logits(now)
        tokens = (mu.probs() * mu.mask.sum(-1)).sum()
        noise = math.exp(SPREAD * torch.randn(1, generator=draw).item())
        rows.append({"step": t + 1.0, "k3": (kl(mu, pi) / tokens).item() * noise,
                     "learning rate": rate, **columns(t + 1)})
    return of_rows(rows)


def of_rows(rows):
    return Log("rows", rows, {name: name for row in rows for name in row})


def thinned(log):
    """Yield the log as other loggers would have it: every 2nd or 3rd row, some lost, the end."""
    lost = torch.rand(len(log.rows), generator=torch.Generator().manual_seed(1)) < 0.3
    for rows in (log.rows, log.rows[::2], log.rows[1::3], log.rows[:-5],
                 [row for row, gone in zip(log.rows, lost) if not gone]):
        yield log._replace(rows=rows)


def verdicts(log):
    return {judge(part).verdict for part in thinned(log)}


def synced(logits, t):
    return logits[t]


def rounded(spacing):
    return lambda logits, t: logits[0] + spacing * ((logits[t] - logits[0]) / spacing).round()


# ----------------------------------------------------------------- weights that do not reach it

@certifies("float64")
def test_kl_is_quadratic_in_a_small_step():
    """eq:trend: KL(π_θ‖π_θ+kδ)/k² is ½ δᵀFδ + O(k)."""
    policy = Policy(4, 3, seed=3)
    delta = torch.randn(policy.logits.shape, generator=torch.Generator().manual_seed(2)).double()
    half = [(kl(policy, with_logits(policy.logits.detach() + k * delta)) / k ** 2).item()
            for k in (1e-3, 2e-3, 4e-3)]
    assert half[1] - half[0] == pytest.approx((half[2] - half[0]) / 3, rel=0.02)
    fisher = half[0] - (half[1] - half[0])
    assert half[2] == pytest.approx(fisher, rel=0.02) and fisher > 0.1


@pytest.mark.parametrize("last", [0, 12])
def test_weights_that_stop_arriving_are_a_failed_sync(last):
    """eq:trend: the gap follows the distance from the last step whose weights arrived."""
    log = log_of(lambda logits, t: logits[min(t, last)])
    assert verdicts(log) == {"failed-sync"}
    assert verdicts(log_of(synced)) == {"floor"}
    trend = judge(log)
    assert trend.faulty and ("step 1," if last == 0 else "step 1") in trend.evidence[0]


@pytest.mark.parametrize("engine", [
    lambda logits, t: logits[max(0, t - 2)], lambda logits, t: logits[t - t % 6],
    lambda logits, t: logits[max(0, t - 3)] if t < 9 else logits[t - 2]])
def test_a_delay_or_an_interval_is_no_fault(engine):
    assert verdicts(log_of(engine)) <= {"stale", "floor"}
    assert verdicts(log_of(engine, floor=1e-6)) <= {"stale", "floor"}


def test_every_sixth_step_is_seen_in_its_sawtooth():
    trend = judge(log_of(lambda logits, t: logits[t - t % 6]))
    assert trend.verdict == "stale" and "a sync every 6 steps" in trend.evidence[0]


def test_the_way_is_of_learning_rates_and_not_of_steps():
    """While the learning rate is 0 a failed sync leaves the gap as it is."""
    rates = (RATE,) * 12 + (0.0,) * 24 + (RATE,) * 12
    log = log_of(lambda logits, t: logits[0], rates)
    assert verdicts(log) == {"failed-sync"}
    blind = of_rows([{x: row[x] for x in ("step", "k3")} for row in log.rows])
    assert "learning rate" in judge(blind).record


def test_updates_below_the_grid_grow_and_then_stay():
    """eq:trend: rounding leaves the whole way until it is as long as the grid's spacing."""
    spread = torch.rand(climbed([RATE])[0].shape, generator=torch.Generator().manual_seed(4))
    spacing = 0.05 * 4 ** spread.double()                            # as the weights' sizes spread
    log = log_of(rounded(spacing), (RATE / 5,) * 96, floor=0.001,
                 columns=lambda step: {"staleness": 0.0})
    assert verdicts(log) == {"below-grid"}
    assert judge(log_of(synced, columns=lambda step: {"staleness": 0.0})).verdict == "floor"


# ------------------------------------------------------------------------ what a log counts itself

def test_a_delay_that_grows_by_one_a_step_is_a_sync_that_never_happens():
    def stuck(step):
        return {"staleness": step - 1.0}
    log = log_of(lambda logits, t: logits[0], columns=stuck)
    assert verdicts(log) == {"never-synced"} and judge(log).confidence == "certain"
    late = log_of(lambda logits, t: logits[min(t, 9)], columns=lambda t: {"version": min(t, 10.0)})
    assert verdicts(late) == {"never-synced"}
    every = log_of(lambda logits, t: logits[t - t % 8],
                   columns=lambda t: {"staleness": (t - 1.0) % 8})
    assert verdicts(every) <= {"stale", "floor"}
    placeholder = log_of(synced, columns=lambda t: {"version": 0.0})
    assert judge(placeholder).confidence == "suggested"


def test_a_gap_that_grows_at_learning_rate_0_is_an_order():
    """A share of the tokens is scored in another's place, and grows with the steps."""
    still = (0.0,) * STEPS

    def moved(logits, t):
        last = torch.arange(len(logits[t]))[:, None] > len(logits[t]) - 1 - t / 4
        return torch.where(last, logits[t].roll(1, 0), logits[t])
    assert verdicts(log_of(moved, still)) == {"order"}
    trend = judge(log_of(synced, still))
    assert (trend.verdict, trend.confidence) == ("floor", "certain")
    longer = judge(log_of(moved, still, columns=lambda step: {"length": 10.0 + step}))
    assert longer.verdict == "undecided" and "the position" in longer.evidence[0]


def test_an_engine_with_the_references_weights_has_its_kl_as_the_gap():
    def log(engine):
        logits, rows = climbed((RATE,) * STEPS), []
        for t, now in enumerate(logits):
            mu, pi, ref = (with_logits(x) for x in (engine(logits, t), now, logits[0]))
            d, weight = (ref.log_probs() - pi.log_probs()).detach(), mu.probs().detach()[:, None]
            rho = (pi.log_probs() - mu.log_probs()).detach()
            rows.append({"step": t + 1.0, "k3": (weight * (rho.expm1() - rho)).sum().item() + 1e-7,
                         "reference": (weight * (d.expm1() - d)).sum().item(),
                         "learning rate": RATE})
        return of_rows(rows)
    never = judge(log(lambda logits, t: logits[0]))
    assert (never.verdict, never.confidence) == ("failed-sync", "certain")
    assert not judge(log(synced)).faulty


def test_a_floor_that_follows_the_entropy_is_not_the_weights():
    draw = torch.Generator().manual_seed(0)
    rows = []
    for t in range(40):
        entropy = 1 + math.sin(t / 3) / 2 + t / 80
        noise = math.exp(SPREAD * torch.randn(1, generator=draw).item())
        rows.append({"step": t + 1.0, "k3": 1e-4 * entropy ** 3 * noise, "entropy": entropy,
                     "learning rate": 1e-6})
    assert verdicts(of_rows(rows)) == {"follows"}


@pytest.mark.parametrize("rows, sentence", [
    (3, "3 rows with a gap are too few for a trend, which needs 5"),
    (0, "the log has no column of the gap between both sides")])
def test_a_log_that_cannot_tell_says_what_would(rows, sentence):
    log = log_of(synced)
    few = of_rows(log.rows[:rows] or [{"step": 1.0, "reward": 0.5}])
    trend = judge(few)
    assert trend.verdict == "undecided" and trend.evidence == [sentence] and trend.record
    assert f"Next    record {'k3 per token' if rows == 0 else 'the version'}" in str(trend)


# --------------------------------------------------------------------- how rarely syncs may happen

@certifies("float64")
def test_ess_of_a_distance_is_a_second_difference():
    """eq:room: 1 + χ² = exp(A(θ + 2δ) − 2A(θ + δ) + A(θ)), and F is where ESS/N is 0.5."""
    z, delta = torch.randn(2, 50, 50, generator=torch.Generator().manual_seed(0)).double()
    delta = delta / 20                                              # 50 states, of 50 tokens each

    def inverse(k):
        p, q = z.log_softmax(-1), (z + k * delta).log_softmax(-1)
        return (2 * q - p).exp().sum(-1)
    A = [(z + k * delta).logsumexp(-1) for k in range(3)]
    torch.testing.assert_close(inverse(1).log(), A[2] - 2 * A[1] + A[0], rtol=1e-10, atol=0)
    chi2 = inverse(1).mean().item() - 1
    said = room(of_rows([{"step": 1.0, "chi2": chi2, "staleness": 1.0}]))
    share = math.sqrt(math.log(2) / math.log1p(chi2))
    exact = next(k / 10 for k in range(1, 999) if inverse(k / 10).mean() > 2)
    print(f"ESS/N is 0.5 at {exact} steps, predicted {share:.1f}")
    assert f"{share:.3g} times" in said and share == pytest.approx(exact, rel=0.15)


def test_lags_of_dumps_give_the_engines_floor(tmp_path):
    """eq:trend: k3 over lag² has the floor at lag 0; a confident disagreement there is named."""
    draw = torch.Generator().manual_seed(6)
    for step in range(6):
        lag = torch.arange(400) % 3
        d = (1e-4 + 4e-4 * lag ** 2).mul(2).sqrt() * torch.randn(400, generator=draw)
        d[0] = -3.0 if step == 5 else d[0]
        row = {"token_ids": [*range(400)], "rollout_log_probs": [-0.5] * 400,
               "train_log_probs": (-0.5 + d).clamp(max=0).tolist(),
               "weight_version": (step + 3 - lag).tolist()}
        (tmp_path / f"step-{step}.jsonl").write_text(json.dumps(row))
    log, lags = of_dumps(sorted(tmp_path.glob("*.jsonl")))
    assert [x.lag for x in lags] == [0, 1, 2] and lags[0].denied == 1
    assert lags[2].k3 == pytest.approx(1.7e-3, rel=0.3)
    assert "of it the engine's floor" in room(log, [lags[0]._replace(k3=1e-4), *lags[1:]])


def test_a_gap_without_a_trend_is_judged_by_its_size_in_its_class():
    """A floor is no acquittal: 0.005 may be two kernels' of 16 bits, or that of a fault."""
    def of_floor(size):
        return judge(log_of(lambda logits, t: logits[t], rates=(0.0,) * STEPS, floor=size))
    floor, quiet = of_floor(0.1), of_floor(0.005)
    assert floor.verdict == "floor" and floor.k3 is not None and 0.002 < floor.k3 < 0.016
    codes = [floor._replace(of=Class.of(*of, experts=False)).exit_code for of in (
        (), ("bf16",), ("fp16",), ("fp32",))]
    assert codes == [3, 3, 1, 1] and "Size    k3 0.0" in str(floor)
    assert quiet.exit_code == 0 and quiet._replace(verdict="undecided").exit_code == 3


# ----------------------------------------------------------------------- this trainer, and a plant

def test_a_run_whose_engine_gets_no_weights_is_named_from_log_and_dumps(run, monkeypatch, capsys):
    from three_policies.rollout import WeightSync
    settings = ("rollout.quantize=null", "rollout.prompts=16", "train.steps=14", "train.lr=3e-4",
                "rollout.max_tokens=8", "train.micro_batch_size=64", "train.mini_batches=1",
                "run.dump=14")
    push, pushes = WeightSync.push, []

    def until_the_third(self, tensors):
        pushes.append(tensors)
        if len(pushes) <= 3:
            push(self, tensors)
    monkeypatch.setattr(WeightSync, "push", until_the_third)
    assert run(*settings)[0] == 0
    monkeypatch.setattr(WeightSync, "push", push)
    assert run(*settings, name="y")[0] == 0
    capsys.readouterr()
    found = {}
    for place in ("runs/x", "runs/x/dumps", "runs/y", "runs/y/dumps"):
        code = main([place, "--json"])
        found[place] = code, json.loads(capsys.readouterr().out)["trend"]
    assert found == {"runs/x": (1, "failed-sync"), "runs/x/dumps": (1, "failed-sync"),
                     "runs/y": (0, "floor"), "runs/y/dumps": (0, "floor")}
    assert main(["runs/x"]) == 1 and "learning_rate" in capsys.readouterr().out


def written(place, size, seed=0, n=400):
    """Write a dump of a thousand tokens whose two kernels differ by noise of that size."""
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(5 * n, 20, generator=g, dtype=torch.float64)
    y = torch.multinomial(z.softmax(-1), 1, generator=g)
    mu, pi = (x.log_softmax(-1).gather(-1, y).view(-1, 5).tolist() for x in (
        z, z + size * torch.randn(z.shape, generator=g, dtype=torch.float64)))
    append(place, [{"prompt_ids": [i], "token_ids": ids, "rollout_log_probs": a,
                    "train_log_probs": b}
                   for i, (ids, a, b) in enumerate(zip(y.view(-1, 5).tolist(), mu, pi))])


@pytest.mark.parametrize("worst, code, begins", [
    (0.005, 0, "Healthy: "), (0.05, 3, "Cannot tell: "), (0.6, 1, "A fault: ")])
def test_the_worst_of_several_dumps_counts_and_its_file_is_named(
        worst, code, begins, tmp_path, capsys):
    """It may be any of them; and the answer begins as that of one dump does."""
    for step in range(6):
        written(tmp_path / f"step-{step}.jsonl", worst if step == 2 else 0.005, step)
    assert main([str(tmp_path)]) == code
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith(begins) and (code == 0 or "step-2.jsonl" in said), said
    assert main([str(tmp_path), "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == {0: "healthy", 3: "cannot tell", 1: "fault"}[code]
    assert told["trend"] in ("floor", "undecided") and (
        code == 0 or told["worst"].endswith("step-2.jsonl"))
    assert main([str(tmp_path / "step-2.jsonl")]) == code


@pytest.mark.parametrize("k3, rows, code, begins", [
    (1e-4, 30, 0, "Healthy: k3 0.0001 a token"), (5.0, 30, 1, "A fault: k3 5 a token"),
    (1e-4, 3, 3, "Cannot tell: 3 rows with a gap are too few")])
def test_a_log_begins_with_one_of_three_answers(k3, rows, code, begins, tmp_path, capsys):
    append(tmp_path / "log.jsonl", [{"step": n, "rollout_corr/k3_kl": k3, "train/lr": 0.0}
                                    for n in range(1, rows + 1)])
    given = [str(tmp_path / "log.jsonl"), "--precision", "bf16", "--no-experts"]
    assert main(given) == code
    assert capsys.readouterr().out.splitlines()[1].startswith(begins)


def test_a_fault_of_a_dump_outweighs_staleness():
    """That the engine is behind explains no broken law of a dump."""
    stale = judge(log_of(lambda logits, t: logits[t], rates=(0.0,) * STEPS, floor=0.1))._replace(
        verdict="stale")
    assert stale.exit_code == 0
    assert stale._replace(worst=SimpleNamespace(faulty=True)).exit_code == 1
