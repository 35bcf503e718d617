"""The trainer writes dumps, and the doctor reads them and rows of other trainers."""

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image

from three_policies.checks import UserError
from three_policies.doctor import Report
from three_policies.doctor.laws import Finding
from three_policies.doctor.tokens import Tokens
from three_policies.doctor.command import consult, main
from three_policies.doctor.dumps import append, read, response, responses_of, rows_of
from three_policies.tests.support.launching import ROOT
from three_policies.tests.support.tolerances import gamma

SAID = "the first batch, as the doctor sees it: "


def test_a_run_dumps_its_first_steps_and_says_what_the_doctor_makes_of_the_first(run, capsys):
    """The doctor sees that the engine's weights have four bits, and the trainer's do not."""
    code, lines = run("run.dump=2", "train.steps=3", "rollout.samples=16")
    said = capsys.readouterr().err
    assert code == 0 and len(lines) == 3 and said.count(SAID) == 1
    places = sorted(Path("runs/x/dumps").iterdir())
    assert [path.name for path in places] == ["step-000001.jsonl", "step-000002.jsonl"]
    for path, line in zip(places, lines):
        found = list(read(path))
        assert len(found) == line["response/count"] == 64
        assert sum(len(r.token_ids) for r in found) == line["response/tokens"]
        gaps = [pi - mu for r in found for mu, pi in zip(r.rollout_log_probs, r.train_log_probs)]
        rho = list(map(math.exp, gaps))
        # Roundings in float32: a token's log ρ once, its exponential twice, its sums 10 times.
        rounded = sum(x * gamma(13 + math.ceil(abs(gap))) for x, gap in zip(rho, gaps)) / sum(rho)
        mean = sum(rho) / len(rho)
        assert mean == pytest.approx(line["rollout_corr/is_ratio_mean"], rel=rounded)
        assert rounded < 1e-6
    assert main([str(places[0]), "--json"]) in (0, 1, 3)
    told = json.loads(capsys.readouterr().out)
    assert f"E[ρ] = {told['e_rho'][0]:.4f}" in said


def test_in_bypass_mode_the_doctor_has_the_policys_log_probs(run):
    code, _ = run("run.dump=1", "correction.preset=bypass_ppo_clip")
    [path] = Path("runs/x/dumps").iterdir()
    assert code == 0 and any(r.rollout_log_probs != r.train_log_probs for r in read(path))


def test_a_dump_changes_nothing_else(run):
    from three_policies.tests.support.small import steady
    (_, plain), (_, dumped) = run(), run("run.dump=2", name="y")
    assert steady(plain) == steady(dumped)


def padded():
    """Return two rows: prompts padded left, responses right, a log μ missing, a tool's token."""
    prompts = torch.tensor([[0, 5, 6], [7, 8, 9]])
    tokens = torch.tensor([[4, 3, 0], [4, 4, 3]])
    mu = torch.tensor([[-1.0, -2.0, 0.0], [math.nan, -0.5, -0.25]])
    return dict(prompts=prompts, prompt_mask=prompts > 0, tokens=tokens, token_mask=tokens > 0,
                response_mask=torch.tensor([[1, 1, 0], [1, 0, 1]]), rollout_log_prob=mu,
                train_log_prob=mu.nan_to_num() - 0.5)


def test_rows_of_a_padded_batch_have_no_padding(tmp_path):
    append(tmp_path / "dump.jsonl", rows_of(**padded()))
    first, second = read(tmp_path / "dump.jsonl")
    assert first.prompt_ids == [5, 6] and first.token_ids == [4, 3]
    assert first.rollout_log_probs == [-1.0, -2.0] and first.mask == [True, True]
    assert second.prompt_ids == [7, 8, 9] and second.mask == [False, False, True]
    assert second.train_log_probs == [0, -1.0, -0.75] and second.rollout_log_probs[0] == 0
    masks = ("prompt_mask", "token_mask")
    assert rows_of(**padded() | {name: padded()[name].long() for name in masks}) == rows_of(
        **padded() | {name: padded()[name].float() for name in masks}) == rows_of(**padded())
    pi = torch.tensor([[-math.inf, math.nan, 0], [0, math.inf, -1]])
    append(tmp_path / "dump.jsonl", rows_of(**padded() | {"train_log_prob": pi}))
    _, _, third, fourth = read(tmp_path / "dump.jsonl")
    assert third.mask == [True, False] and third.train_log_probs == [-math.inf, 0]  # cut from π
    assert fourth.mask == [False, False, True] and fourth.train_log_probs == [0, 0, -1]


@pytest.mark.parametrize("versions", [None, torch.tensor([[3, 3, 4], [4, 4, 4]])])
def test_a_batch_that_is_not_written_is_read_alike(versions, tmp_path):
    """What is null in a row, what pads, and what a tool wrote, whose log-probs may be anything."""
    batch = padded() | {"versions": versions}
    batch["train_log_prob"] = torch.tensor([[-math.inf, 0.05, 0], [-1, -math.inf, math.inf]])
    append(tmp_path / "dump.jsonl", rows_of(**batch))
    first, second = responses_of(**batch)
    assert [first, second] == list(read(tmp_path / "dump.jsonl"))
    assert first.train_log_probs[0] == -math.inf and (first.not_finite, second.not_finite) == (0, 2)
    assert responses_of(**batch | {"token_mask": batch["token_mask"] * 0})[0].versions is None


@pytest.fixture
def planted(tmp_path):
    """Return responses to one prompt, whose log μ is of temperature 1 and log π of 0.5."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    mu, pi = logits.log_softmax(-1), (2 * logits).log_softmax(-1)
    drawn = torch.multinomial(mu.exp(), 600, replacement=True,
                              generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path / "dump.jsonl"
    append(path, [{"prompt_ids": [1], "token_ids": [y, 3], "rollout_log_probs": [mu[y].item(), -1],
                   "train_log_probs": [pi[y].item(), -1]} for y in drawn])
    return path


def test_the_figure_is_a_row_above_those_of_the_book(planted, tmp_path):
    from three_policies.doctor.panels import SIGNATURES
    assert main([str(planted), "--figure", str(tmp_path / "figure.png")]) == 1
    with Image.open(tmp_path / "figure.png") as found, Image.open(SIGNATURES) as known:
        assert found.width == known.width and found.height > known.height + 100
        below = found.crop((0, found.height - known.height, *found.size)).convert("RGB")
        assert below.tobytes() == known.convert("RGB").tobytes()


def test_the_five_panels_hold_what_their_titles_say(monkeypatch):
    """Four tokens by hand for each response to one prompt; the second response is masked."""
    from three_policies.doctor.tokens import Tokens, log_odds
    from three_policies.doctor import panels
    mu = torch.tensor([[-1.0, -2, -3, -0.5], [-2, -1, -0.25, -4], [-3, -30, -0.5, -1]]).double()
    pi = torch.tensor([[-2.0, -1, -3, -0.75], [-1, -1.5, -0.5, -2], [-2, -1, -0.25, -3]]).double()
    counts = torch.tensor([True, False, True, True])                # of which response
    both = {"rollout_log_probs": mu, "train_log_probs": pi}
    rows = [{"prompt_ids": [1], "token_ids": [n, 8, 9, 7], "response_mask": [int(counts[n])] * 4}
            | {name: (x[n - (n > 1)] if counts[n] else x[0]).tolist() for name, x in both.items()}
            for n in range(4)]
    one = response(1, {"token_ids": [5, 6], "rollout_log_probs": [-1, -2],
                       "train_log_probs": [-1, -2]})
    monkeypatch.setattr(panels, "SHOWN", 4)                        # every third token is a point
    figure = panels.draw({"planted": Tokens.of([response(n, row) for n, row in enumerate(rows)]),
                           "equal": Tokens.of([one])})
    cloud, by_token, grid, after, running, *below = figure.axes
    assert [axis.get_title() for axis in figure.axes] == [*panels.TITLES, *[""] * 5]
    assert (cloud.get_ylabel(), below[0].get_ylabel()) == ("planted", "equal")

    def close(found, wanted):
        found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (found, wanted))
        return torch.allclose(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    odds, gap = [log_odds(x).flatten() for x in (mu, pi)], log_odds(pi) - log_odds(mu)
    assert close(cloud.collections[0].get_offsets().data, torch.stack(odds, 1)[::3])
    drawn = torch.cat([x[::3] for x in odds])
    assert close([cloud.get_xlim(), cloud.get_ylim()], [[drawn.min(), drawn.max()]] * 2)
    places = torch.arange(4).repeat(3)
    assert close(by_token.collections[0].get_offsets().data,
                 torch.stack([places, gap.flatten()], 1)[::3])
    assert close(by_token.get_lines()[0].get_ydata(), gap.median(0).values)
    wide = gap.abs().quantile(0.99).item()
    assert close(by_token.get_ylim(), [-1.3 * wide, 1.3 * wide])
    assert close(grid.images[0].get_array().filled(math.nan), gap)
    assert close(grid.images[0].get_clim(), [-wide, wide])
    assert close(below[1].get_ylim(), [-0.065, 0.065])               # rounding is not magnified
    # Of three first tokens two are a pair, the later less the earlier.
    assert close(after.collections[0].get_offsets().data, [[-1.0, 1.0]])
    assert len(below[3].collections[0].get_offsets()) == 0
    rho = (pi - mu).clamp(max=20).expm1().flatten()                   # the first 11 are too few
    n = torch.arange(1, 13)
    mean, error = rho.cumsum(0) / n, rho.square().cumsum(0).sqrt() / n
    assert close(running.get_lines()[0].get_xydata(), torch.stack([n, mean], 1)[10::3])
    band = running.collections[0].get_paths()[0].vertices[:, 1]
    assert close([band.min(), band.max()], [(mean - 2 * error)[10], (mean + 2 * error)[10]])


def test_what_cannot_be_read_is_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.endswith("cannot be read: No such file or directory\n")
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder without a log and without a dump" in capsys.readouterr().err
    assert main(["--model", str(tmp_path)]) == 2
    assert "--model" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.jsonl"), "--figure", "figure.txt"])
    said = capsys.readouterr().err
    assert "--figure must end in .png, .jpg, .webp or .pdf, not 'figure.txt'" in said
    assert main([str(tmp_path / "none.jsonl"), "--figure", "figure.PNG"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "dump.gz").write_bytes(gzip.compress(b"{}"))
    assert main([str(tmp_path / "dump.gz")]) == 2
    assert "line 1: this is not JSON, but gzip: unpack it first" in capsys.readouterr().err


GOOD = {"token_ids": [4, 5], "rollout_log_probs": [-1.0, -0.5], "train_log_probs": [-1.0, -0.5]}
NEMO = {"token_ids": [4, 5], "generation_logprobs": [0.0, -0.5], "prev_logprobs": [0.0, -0.5],
        "token_loss_mask": [0, 1]}
PRIME = {"token_ids": [4, 5], "inference_logprobs": [None, -0.5],
         "trainer_logprobs": [None, -0.5], "loss_mask": [0, 1]}


@pytest.mark.parametrize("row, said", [
    ({**GOOD, "token_ids": 5}, "token_ids must be a list"),
    ({**GOOD, "token_ids": [4, 2 ** 70]}, "token_ids has an entry that is no whole number"),
    ({**GOOD, "token_ids": [4, True]}, "token_ids has an entry that is no whole number"),
    ({**GOOD, "token_ids": [4, -1]}, "token_ids has -1, which is the number of no token"),
    ({**GOOD, "token_ids": [4, 2 ** 31]}, "token_ids has 2147483648, which is the number of no"),
    ({k: x for k, x in NEMO.items() if k != "token_loss_mask"}, "token_loss_mask is missing"),
    ({**GOOD, "train_log_probs": [-10 ** 400, -1]}, "train_log_probs has an entry that is no fin"),
    ({**GOOD, "train_log_probs": [-math.inf, math.inf]}, "train_log_probs has an entry that is no"),
    ({**GOOD, "train_log_probs": None}, "train_log_probs is missing"),
    ({**GOOD, "rollout_log_probs": [0.7, -1]}, "rollout_log_probs has a value above 0"),
    ({**GOOD, "weight_version": [0, 2 ** 63]}, "weight_version has an entry that is no whole"),
    ({**NEMO, "prev_logprobs": [math.nan, -0.5]}, "prev_logprobs has an entry that is no finite"),
    ({**PRIME, "loss_mask": [0.5, 1]}, "loss_mask has 0.5, which is neither 0 nor 1"),
    ({**PRIME, "inference_logprobs": [-1, -1], "trainer_logprobs": [-1, -1], "loss_mask": [1, 1],
      "entropy": [None]}, "entropy must be a list with an entry for each token"),
    ({"token_ids": [3], "rollout_log_probs": [-1], "train_log_probs": [-1],
      "entropy": [-0.2]}, "entropy has a value below 0, which is no entropy of tokens"),
    ("null", "a row must be a table"), ("{}", "token_ids is missing"),
    ({**GOOD, "response_mask": [0.5, 1]}, "response_mask has 0.5, which is neither 0 nor 1"),
    ({**GOOD, "weight_version": [0, 10 ** 30]}, "weight_version has an entry that is no whole"),
    ({**GOOD, "prompt_ids": [-3]}, "prompt_ids has -3"),
    *(({**GOOD, "prompt_ids": x}, "prompt_ids has an entry that is no whole number")
      for x in (0, {}, "", False, [3.0])),
    ({**GOOD, "rollout_log_probs": ["", -1]}, "rollout_log_probs has an entry that is no finite"),
    *(({**NEMO, "input_lengths": x}, "input_lengths must be a number of tokens, at most 2, not ")
      for x in (None, [2], "x", -1, 3, 10 ** 400, True)),
    ("[" * 100_000, "this is not JSON")], ids=str)
def test_a_bad_row_is_one_sentence_with_its_line(row, said, tmp_path, capsys):
    """A traceback would end with 1, which means that a cause was found."""
    path, text = tmp_path / "dump.jsonl", row if isinstance(row, str) else json.dumps(row)
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(NEMO)}\n{text}\n")
    assert main([str(path)]) == 2
    assert f"line 3: {said}" in capsys.readouterr().err


def test_a_dump_of_masked_or_empty_responses_has_no_token(tmp_path, capsys):
    append(tmp_path / "dump.jsonl", [GOOD | {"response_mask": [0, 0]}, {name: [] for name in GOOD}])
    assert main([str(tmp_path / "dump.jsonl")]) == 2
    assert capsys.readouterr().err == "doctor: the dump has no token that counts\n"


@pytest.mark.parametrize("given, said", [
    (["--older", "x"], "--older needs --model"), (["--figure", "no/x.png"], "no/x.png is in no")])
def test_what_would_be_left_out_is_refused(given, said, planted, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(planted), *given])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("place, code, said", [
    ("/dev/full", 2, "doctor: [Errno 28] No space left on device\n"), ("pipe", 1, "")])
def test_a_report_that_nobody_can_read_has_no_traceback(place, code, said, planted):
    """A pipe's reader may have gone: `| head -1`."""
    end = open(place, "w") if place != "pipe" else os.fdopen((pipe := os.pipe())[1], "w")
    if place == "pipe":
        os.close(pipe[0])
    with end:
        found = subprocess.run([sys.executable, "-m", "doctor", str(planted)], cwd=ROOT,
                               stdout=end, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (code, said)


def test_a_continued_run_dumps_its_first_steps_too(run):
    run("run.dump=1")
    run("run.dump=1", "train.steps=4")
    dumps = sorted(path.name for path in Path("runs/x/dumps").iterdir())
    assert dumps == ["step-000001.jsonl", "step-000003.jsonl"]


def test_a_model_scores_the_first_responses_and_the_report_is_of_all(
        tiny_model, tmp_path, monkeypatch):
    """All older checkpoints are looked at before the first is loaded."""
    from three_policies.doctor.rescore import Match, Rescored
    scored, plain, model = [], Match("plain", None, None, 1.0, 0.0), str(tiny_model)
    monkeypatch.setattr("three_policies.doctor.command.RESCORED", 2)
    monkeypatch.setattr(
        "three_policies.doctor.rescore.rescore", lambda path, older, few: scored.append(
            (path, older, [r.line for r in few])) or Rescored(plain, plain, "none"))
    append(tmp_path / "dump.jsonl", [GOOD] * 5)
    given = argparse.Namespace(dump=tmp_path / "dump.jsonl", model=model, older=[model] * 2,
                               figure=None, config=None, precision=None, experts=None)
    report, _ = consult(given)
    assert (report.responses, scored) == (5, [(model, [model] * 2, [1, 2])])
    given.older = [model, str(tmp_path / "none")]
    with pytest.raises(UserError, match="--older .*none"):
        consult(given)


def test_a_dump_or_a_model_must_be_given(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "give a DUMP, --model DIR, or both" in capsys.readouterr().err


def test_a_bug_is_told_from_a_cause(monkeypatch, capsys):
    monkeypatch.setattr("three_policies.doctor.command.consult", lambda _: 1 / 0)
    assert main(["x"]) == 2 and "ZeroDivisionError" in capsys.readouterr().err


def test_the_report_ends_with_what_the_model_says(monkeypatch, capsys):
    from three_policies.doctor.rescore import Match, Rescored
    plain = Match("plain", None, None, 1.0, 0.0)
    rescored = Rescored(plain, plain._replace(name="hot", cause="temperature"), "train")
    monkeypatch.setattr("three_policies.doctor.command.consult",
                        lambda _: (types.SimpleNamespace(exit_code=1), rescored))
    assert main(["x"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == rescored.lines()


def test_two_causes_have_the_exit_code_of_one(monkeypatch, capsys):
    """An exit code of 2 means a dump that cannot be read."""
    found = Finding("eos", 0.1, "a place")
    for mean, error, causes, code in (
            (1.0, 0.005, [found, found], 1), (1.0, 0.005, [], 0), (1.0, 0.5, [found], 1),
            (1.0, 0.5, [], 0), (2.0, 0.1, [], 1)):      # undecided; a fault without a name
        report = Report(7, 1000, mean, error, (), causes, Tokens.of([]))
        monkeypatch.setattr("three_policies.doctor.command.consult",
                            lambda _, report=report: (report, None))
        assert main(["x", "--json"]) == code == main(["x"])
        said = json.loads(capsys.readouterr().out.splitlines()[0])
        assert code == bool(said["causes"] or said["proper"] is False)


def test_a_side_that_only_the_model_finds_guilty_is_a_fault(monkeypatch, capsys):
    """The dump alone shows nothing, and what the model finds has no name."""
    for guilty, code in (("none", 0), ("train", 1)):
        monkeypatch.setattr("three_policies.doctor.command.consult", lambda _, guilty=guilty: (
            types.SimpleNamespace(exit_code=0, as_json=dict),
            types.SimpleNamespace(guilty=guilty, as_json=dict)))
        assert main(["x", "--json"]) == code


@pytest.mark.made_here
def test_without_a_dump_the_model_samples_and_is_in_order(tiny_model, capsys):
    assert main(["--model", str(tiny_model), "--engine", "transformers", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["causes"] == [] and told["model"]["guilty"] == "none" and told["tokens"] == 32 * 40


@pytest.mark.made_here
def test_the_model_names_the_guilty_side_of_a_dump(tiny_model, tmp_path, capsys):
    from three_policies.doctor.rescore import random_prompts, sample_and_score
    found = sample_and_score(str(tiny_model), "transformers", random_prompts(str(tiny_model)),
                             top_p=0.8)
    append(tmp_path / "dump.jsonl", [
        {"prompt_ids": r.prompt_ids, "token_ids": r.token_ids, "train_log_probs": r.train_log_probs,
         "rollout_log_probs": r.rollout_log_probs} for r in found])
    assert main([str(tmp_path / "dump.jsonl"), "--model", str(tiny_model), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["model"]["guilty"] == "rollout" and told["causes"][0]["cause"] == "cut"
    assert abs(told["model"]["rollout"]["parameter"] - 0.8) < 0.01


def test_what_prime_rl_could_not_write_is_masked(tmp_path):
    """It writes null for a number that is not finite, and for the prompt's log-probs."""
    row = {"token_ids": [1, 2, 3, 4], "loss_mask": [False, True, True, True],
           "inference_logprobs": [None, -1, -2, -3], "trainer_logprobs": [None, -1, None, -3],
           "entropy": [None, 1, 2, 3]}
    (tmp_path / "dump.jsonl").write_text("".join(
        json.dumps({**row, "entropy": x}) + "\n" for x in (row["entropy"], [0, 1, 2, None])))
    first, second = read(tmp_path / "dump.jsonl")
    assert first.prompt_ids == [1] and first.mask == [True, False, True]
    assert first.rollout_log_probs == [-1, -2, -3] and first.train_log_probs == [-1, 0, -3]
    assert first.entropy == [1, 2, 3] and second.entropy is None
    assert first._replace(line=0, entropy=None) == second._replace(line=0)


def test_the_prompt_ends_where_the_rows_own_mask_begins():
    """A null masks a token of the response; a row that is all prompt has no response."""
    null = response(1, PRIME | {"loss_mask": [1, 1]})
    assert (null.prompt_ids, null.token_ids, null.mask) == ([], [4, 5], [False, True])
    for row in (NEMO | {"token_loss_mask": [0, 0]}, NEMO | {"input_lengths": 0}):
        assert response(1, row).token_ids == []
    assert response(1, NEMO | {"token_loss_mask": [0, 0]}).prompt_ids == [4, 5]


def test_verls_batch_is_a_dump(tmp_path, verl_required):
    from three_policies.interop.verl import dump
    given = padded()
    given |= {name: torch.nn.functional.pad(given[name], (2, 0))      # wider than the responses
              for name in ("prompts", "prompt_mask")}
    batch = {"prompts": given["prompts"], "responses": given["tokens"],
             "attention_mask": torch.cat([given["prompt_mask"], given["token_mask"]], 1),
             "response_mask": given["response_mask"], "rollout_log_probs":
             given["rollout_log_prob"], "old_log_probs": given["train_log_prob"]}
    dump(types.SimpleNamespace(batch=batch), tmp_path / "dump.jsonl")
    append(tmp_path / "same.jsonl", rows_of(**given))
    assert list(read(tmp_path / "dump.jsonl")) == list(read(tmp_path / "same.jsonl"))
    batch["rollout_log_probs"] = batch["old_log_probs"].clone()
    with pytest.warns(UserWarning, match="a copy of rollout_log_probs.*bypass_mode=false"):
        dump(types.SimpleNamespace(batch=batch), tmp_path / "copy.jsonl")
    assert all(r.rollout_log_probs == r.train_log_probs for r in read(tmp_path / "copy.jsonl"))


def test_verls_queue_is_a_dump(tmp_path, monkeypatch, verl_required):
    """verl's default trainer hands over keys; TransferQueue has each row without its padding."""
    from three_policies.interop.verl import dump
    given = padded()
    masks = {"prompts": given["prompt_mask"], "responses": given["token_mask"]}
    columns = {"prompts": given["prompts"], "responses": given["tokens"],
               "response_mask": given["response_mask"],
               "rollout_log_probs": given["rollout_log_prob"],
               "old_log_probs": given["train_log_prob"], "entropy": given["train_log_prob"].neg()}

    def kv_batch_get(keys, partition_id, select_fields):
        assert (keys, partition_id) == (["a", "b"], "train")
        return {name: torch.nested.as_nested_tensor(
            [x[m] for x, m in zip(columns[name], masks.get(name, masks["responses"]))],
            layout=torch.jagged) for name in select_fields}
    monkeypatch.setitem(sys.modules, "transfer_queue",
                        types.SimpleNamespace(kv_batch_get=kv_batch_get))
    dump(types.SimpleNamespace(keys=["a", "b"], partition_id="train"), tmp_path / "dump.jsonl")
    append(tmp_path / "same.jsonl", rows_of(**given, entropy=columns["entropy"]))
    assert list(read(tmp_path / "dump.jsonl")) == list(read(tmp_path / "same.jsonl"))
