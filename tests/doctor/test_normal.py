"""Three verdicts: a fault, healthy, or not to be told; and where a k3 lies among healthy pairs."""

import json
import math

import pytest
import torch

from three_policies import doctor
from three_policies.doctor import laws
from three_policies.doctor.command import main
from three_policies.doctor.dumps import response
from three_policies.doctor.normal import BEYOND, MARGIN, PAIRS, Class, table
from three_policies.doctor.report import Lost
from three_policies.doctor.tokens import Tokens, confident
from three_policies.oracle import Policy
from three_policies.tests.support.certified import certifies

DENSE, EXPERTS = Class("bf16", False), Class("bf16", True)


def pair(size, n=4000, tail=0.0, **more):
    """Return responses of two kernels whose logits differ by noise; `tail`: in 2 % of tokens."""
    g = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(n, 60, generator=g, dtype=torch.float64)
    wild = tail * (torch.rand(n, 1, generator=g) < 0.02)
    noise = torch.randn(n, 60, generator=g, dtype=torch.float64) * (size + wild)
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=g)
    mu, pi = (x.log_softmax(-1).gather(-1, drawn).view(-1, 20).tolist()
              for x in (logits, logits + noise))
    ids = drawn.view(-1, 20).tolist()
    return [response(i, {"prompt_ids": [i], "token_ids": y, "rollout_log_probs": a,
                         "train_log_probs": b} | more)
            for i, (y, a, b) in enumerate(zip(ids, mu, pi), 1)]


def k3(of):
    return (d := of.examined.d()).expm1().sub(d).mean().item()


@pytest.mark.parametrize("size, of, verdict", [
    (0.015, Class(), "healthy"), (0.05, Class(), "cannot tell"), (0.05, DENSE, "healthy"),
    (0.097, Class(), "cannot tell"), (0.097, DENSE, "cannot tell"),     # an H100's, and eight bits
    (0.20, Class(), "cannot tell"), (0.20, DENSE, "cannot tell"), (0.5, EXPERTS, "fault"),
    (0.35, DENSE, "fault"), (0.5, Class(), "fault"), (0.005, Class("fp32"), "fault"),
    (0.005, Class("fp16", False), "healthy"), (0.05, Class("fp16", False), "fault"),
    (0.35, Class("fp8"), "cannot tell"), (0.35, Class("bf16", False, "int6"), "cannot tell")])
def test_a_gap_is_judged_by_what_healthy_pairs_of_its_class_left(size, of, verdict):
    report = doctor.examine(pair(size), of)
    assert report.k3 == pytest.approx(k3(report), rel=1e-9)
    print(f"k3 {report.k3:.2g} against {of.healthy:g} and {of.fault:g}")
    assert all(not 0.8 < report.k3 / limit < 1.25 for limit in (of.healthy, of.fault)), "an edge"
    assert report.verdict == verdict, str(report)
    assert report.exit_code == {"healthy": 0, "fault": 1, "cannot tell": 3}[verdict]


def test_noise_of_two_kernels_is_said_of_what_is_healthy_alone():
    for size, of in ((0.05, Class()), (0.097, DENSE), (0.35, DENSE)):
        text = str(doctor.examine(pair(size), of))
        assert "within the noise" not in text and "on a model of 135M" in text
    unknown = str(doctor.examine(pair(0.05)))
    assert "Say --precision and --experts or --no-experts, or give --model." in unknown
    assert "within the noise" in str(doctor.examine(pair(0.05), DENSE))


def test_experts_in_16_bits_that_route_some_tokens_differently_are_no_fault():
    report = doctor.examine(pair(0.02, tail=1.0), EXPERTS)
    print(f"k3 {report.k3:.2g}: {report.in_short()}")
    assert not report.faulty and 0.002 < report.k3 < 0.03
    assert "flips" not in [f.cause for f in doctor.examine(pair(0.02, tail=1.0), DENSE).causes]


def test_half_of_the_tokens_show_that_both_sides_are_float32():
    few = pair(1e-6, tail=1.0)
    report = doctor.examine(few)
    assert report.of.precision == "fp32" and report.verdict == "fault"


@certifies("float64")
def test_no_noise_makes_a_sure_token_improbable():
    """eq:confident: errors of the logits up to ε move a token's log-odds by 2ε at most."""
    z = Policy(4, 3, seed=0).logits.detach() * 3
    g = torch.Generator().manual_seed(0)
    for epsilon in (0.1, 0.5, 1.3):
        worst = math.inf
        for _ in range(200):
            error = epsilon * (2 * torch.randint(2, z.shape, generator=g) - 1)
            mu, pi = z.log_softmax(-1), (z + error).log_softmax(-1)
            worst = min(worst, (pi - mu)[mu >= math.log(0.5)].min().item())
        most = math.log(2 / (1 + math.exp(2 * epsilon)))        # of a token of one half
        assert most - 1e-12 <= worst < 0
    least = (math.log(0.5) - math.log(0.5 * math.exp(-2) / (1 - 0.5 * math.exp(-2)))
             - math.log(0.5)) / 2
    assert least == pytest.approx(1.3116, abs=1e-3)            # both logits are wrong by as much


def test_one_sure_token_that_the_trainer_denies_is_a_fault_of_one_set_of_weights():
    rows = pair(0.01)
    mu, pi = [-0.5, *rows[0].rollout_log_probs[1:]], [-2.6, *rows[0].train_log_probs[1:]]
    denied = rows[0]._replace(rollout_log_probs=mu, train_log_probs=pi)
    verdicts = [doctor.examine([denied, *rows[1:]], Class("bf16", experts)).verdict
                for experts in (False, None, True)]
    assert verdicts == ["fault", "cannot tell", "healthy"]     # a token may go to another expert
    report = doctor.examine([denied, *rows[1:]], DENSE)
    assert report.verdict == "fault" and report.causes[0].evidence.startswith("of 1 tokens μ is")
    assert confident(report.examined) == 1
    older = [r._replace(versions=[int(r is denied)] * 20) for r in [denied, *rows[1:]]]
    assert confident(Tokens.of(older)) == 0               # older weights may be sure of others


def test_the_dump_states_its_pair_and_the_command_has_the_last_word(tmp_path, capsys):
    """`pair` is a table in each row; a reader that does not know it ignores it."""
    row = {"engine": "bfloat16", "trainer": "float32", "quantize": None, "experts": False}
    assert Class.stated(row) == DENSE and Class.stated(None) == Class.stated([1]) == Class()
    report = doctor.examine(pair(0.05, pair=row))
    assert report.of == DENSE and report.verdict == "healthy"
    assert doctor.examine(pair(0.05, pair=row), Class("fp32")).verdict == "fault"

    path, config = tmp_path / "dump.jsonl", tmp_path / "config.json"
    path.write_text("".join(json.dumps({name: getattr(r, name) for name in (
        "prompt_ids", "token_ids", "rollout_log_probs", "train_log_probs")}) + "\n"
        for r in pair(0.05)))
    config.write_text('{"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}')
    assert main([str(path)]) == 3 and main([str(path), "--config", str(config)]) == 0
    assert main([str(path), "--precision", "float32"]) == 1
    assert main([str(path), "--precision", "bf16", "--no-experts", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["verdict"] == "healthy" and said["pair"]["precision"] == "bf16"
    config.write_text("[]")
    assert main([str(path), "--config", str(config)]) == 2
    with pytest.raises(SystemExit):
        main([str(path), "--precision", "bg"])


@pytest.mark.parametrize("lacks", [{"engine": None}, {"trainer": None}, {"engine": "auto"}])
def test_a_pair_of_which_one_side_is_unknown_has_no_precision(lacks):
    """The coarser one counts, and that may be the other."""
    row = {"engine": "float32", "trainer": "float32", "experts": True} | lacks
    assert Class.stated(row) == Class(None, True)


def answer(report):
    return next(x for x in str(report).splitlines() if x.startswith(("A fault", "Cannot", "Heal")))


def test_the_answer_leads_with_what_decided_it():
    """k3 comes first only where the size is the reason."""
    rows = pair(0.01)
    lost = [rows[0]._replace(mask=[False] + [True] * 19, not_finite=1), *rows[1:]]
    hot = [r._replace(train_log_probs=[x / 2 for x in r.train_log_probs]) for r in rows]
    copied = [r._replace(train_log_probs=r.rollout_log_probs) for r in rows]
    sure = [rows[0]._replace(rollout_log_probs=[-0.5] * 20, train_log_probs=[-2.6] * 20), *rows[1:]]
    for of, begins in (
            (lost, "A fault: 1 of 4000 sampled tokens have no finite log-prob. k3 "),
            (hot, "A fault: log μ is not of what was drawn"),
            (copied, "Cannot tell: both columns are equal to the last digit. k3 0"),
            (rows[:4], "Cannot tell: 80 tokens are too few. k3 "),
            (pair(0.35), "A fault: k3 "), (rows, "Healthy: k3 ")):
        assert answer(doctor.examine(of, DENSE)).startswith(begins), answer(doctor.examine(of))
    assert "μ is above ½ and π over 2 nats less" in answer(doctor.examine(sure)) or (
        doctor.examine(sure).causes)


@pytest.mark.parametrize("size, verdict", [
    (0.2, "cannot tell"), (0.33, "fault"), (0.5, "fault")])      # 0.33: of this class, not of any
@pytest.mark.parametrize("rows", [4, 8])
def test_fewer_than_100_tokens_are_a_fault_only_beyond_any_class(rows, size, verdict):
    """A law may be broken by chance there; a log-prob that is not finite is not."""
    report = doctor.examine(pair(size)[:rows], DENSE)
    print(f"k3 {report.k3:.2g} against {DENSE.fault:g} and {BEYOND:g}: {report.verdict}")
    few = "cannot tell" if report.k3 < BEYOND else "fault"
    assert report.verdict == (few if rows == 4 else verdict)
    law = report._replace(causes=[laws.Finding("eos", 0.1, "a place")])
    assert law.verdict == (few if rows == 4 else "fault")
    assert law._replace(lost=Lost(1, 1, 0)).verdict == "fault"


def test_weights_that_were_rounded_on_purpose_break_no_law_by_a_sure_token():
    """eq:confident is of one set of weights: four bits of them are another one."""
    def put(column, i, value):
        return [value if t == 7 * i % 20 else x for t, x in enumerate(column)]
    def with_denied(rows):
        return [r._replace(rollout_log_probs=put(r.rollout_log_probs, i, -0.5),
                           train_log_probs=put(r.train_log_probs, i, -2.9)) if i < 20 else r
                for i, r in enumerate(rows)]
    denied = with_denied(pair(0.6))
    for of, said in ((Class("bf16", False, "int4"), False), (DENSE, True)):
        report = doctor.examine(denied, of)
        assert any("as no noise is" in f.evidence for f in report.causes) == said
        assert (report.verdict == "fault") == said
    quiet = [doctor.examine(with_denied(pair(0.01)), of) for of in (
        Class("bf16", False, "int4"), DENSE)]
    assert [bool(report.causes) for report in quiet] == [False, True]


def test_the_word_none_rounds_nothing():
    for word in (None, "none", "None", "null", "no", False, ""):
        assert Class.stated({"quantize": word}) == Class() and not Class.of(quantize=word).coarse
    assert Class.stated({"quantize": "int4"}).coarse


@pytest.mark.parametrize("turned", [False, True])
def test_rows_that_state_different_pairs_are_said_and_what_differs_is_open(turned):
    """Whichever comes first: a class of one part is not that of the dump."""
    rows = pair(0.05)
    stated = [{"engine": p, "trainer": p, "experts": False} for p in ("float32", "bfloat16")]
    mixed = [r._replace(pair=stated[(i % 2) ^ turned]) for i, r in enumerate(rows)]
    report = doctor.examine(mixed)
    assert report.of == Class(None, False) and report.verdict == "cannot tell"
    assert "Rows state different pairs" in str(report) and report.as_json()["differing_pairs"] == 2
    one = doctor.examine([r._replace(pair=stated[1]) for r in rows])
    assert one.of == DENSE and "different pairs" not in str(one)
    half = [r._replace(pair=stated[1] if i % 2 else None) for i, r in enumerate(rows)]
    assert doctor.examine(half).of == DENSE                     # the others state nothing
    assert doctor.examine(mixed, DENSE).verdict == "healthy"    # the user knows better


def test_copies_of_rows_are_no_more_evidence():
    """A row of 20 tokens is drawn twice once in e²⁵ at most: copies are left out, and counted."""
    rows = pair(0.03, n=1000)
    once, four = doctor.examine(rows, DENSE), doctor.examine(rows * 4, DENSE)
    assert (four.responses, four.tokens, four.copies) == (50, 1000, 150)
    assert (four.mean, four.error, four.verdict) == (once.mean, once.error, once.verdict)
    assert [f.cause for f in four.causes] == [f.cause for f in once.causes]
    assert "150 rows more are copies of these" in str(four) and four.as_json()["copies"] == 150
    assert once.copies == 0 and "copies" not in str(once)
    short = [response(i, {"prompt_ids": [1], "token_ids": [5], "rollout_log_probs": [-0.5],
                          "train_log_probs": [-0.5]}) for i in range(200)]
    assert doctor.examine(short).copies == 0                    # drawn so often by chance


def test_a_model_that_knows_both_columns_overrules_the_size():
    report = doctor.examine(pair(0.1))
    assert report.verdict == "cannot tell"
    assert report._replace(causes=[], rescored=True).verdict == "healthy"


def test_the_table_is_in_help_and_each_class_has_a_source(capsys):
    for p in PAIRS:
        assert p.source and p.usual <= max(1e-6, p.most)
        of = Class(p.precision, p.experts)
        assert of.fault == max(1e-6, MARGIN * p.most) and of.pairs() == [p]
    with pytest.raises(SystemExit):
        main(["--help"])
    assert table() in capsys.readouterr().out
