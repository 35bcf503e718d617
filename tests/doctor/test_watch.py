"""The doctor watches: in a trainer at a bounded cost, in a terminal a line a step.

Dumps are of planted models, or of log-probs written by hand.
"""

import json
import math
import time

import pytest
import torch

from three_policies.doctor import follow as following, watch as watching
from three_policies.doctor.command import main
from three_policies.doctor.dumps import append
from three_policies.doctor.follow import Follower, in_order
from three_policies.doctor.watch import EXAMINED, FREE, SHARE, Watch, count, leading


def rows(sharper=1.0, seed=0, n=400):
    """Return rows of two tokens after one prompt; log π is of logits that are `sharper` × μ's."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    mu, pi = logits.log_softmax(-1), (sharper * logits).log_softmax(-1)
    drawn = torch.multinomial(mu.exp(), 2 * n, replacement=True,
                              generator=torch.Generator().manual_seed(seed)).reshape(-1, 2)
    return [{"prompt_ids": [1], "token_ids": y, "rollout_log_probs": mu[y].tolist(),
             "train_log_probs": pi[y].tolist()} for y in drawn.tolist()]


HEALTHY, HOT = rows(), rows(2.0)


class Heard(Watch):
    """A watch that keeps what it says, and the metrics of each batch."""

    def __init__(self):
        self.lines, self.logged = [], []
        super().__init__(say=self.lines.append)


@pytest.fixture
def watch():
    return Heard()


def see(watch, *batches):
    for step, batch in enumerate(batches, 1):
        watch.logged.append({})
        watch.see(step, lambda batch=batch: batch, watch.logged[-1].__setitem__)


# ------------------------------------------------------------------------------ in a trainer

def test_the_first_batch_is_said_and_then_what_changes(watch):
    see(watch, HEALTHY, rows(seed=1), HOT, rows(2.0, 1), HEALTHY)
    assert [line.split(":")[0] for line in watch.lines] == [
        "doctor, step 1", "ALARM doctor, step 3", "doctor, step 5"]
    assert "temperature (certain)" in watch.lines[1] and "k3 " in watch.lines[1]
    assert [x["doctor/alarm"] for x in watch.logged] == [0, 0, 1, 1, 0]
    assert watch.logged[0]["doctor/k3"] == 0 and watch.logged[2]["doctor/k3"] > 0.05
    assert watch.judge.alarms == 2


def test_a_fault_that_is_not_certain_is_an_alarm_when_two_batches_show_it(watch, monkeypatch):
    """One of many honest batches looks faulty by chance."""
    from three_policies.doctor.laws import Finding
    found = iter([["weights"], [], ["weights"], ["weights"], ["flips"]])
    true = watching.examine
    monkeypatch.setattr(watching, "examine", lambda batch, _: true(batch)._replace(
        causes=[Finding(name, 0.9, "a size") for name in next(found)]))
    see(watch, *[HEALTHY] * 5)
    assert [x["doctor/fault"] for x in watch.logged] == [1, 0, 1, 1, 1]
    assert [x["doctor/alarm"] for x in watch.logged] == [0, 0, 0, 1, 0]
    assert [line.startswith("ALARM") for line in watch.lines] == [
        False, False, False, True, False]


def noisy(n=800, size=0.05, **more):
    """Return rows whose log ρ is noise of two kernels: k3 0.001, or 1e-5 if its size is 0.005."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2 * n, 40, generator=g, dtype=torch.float64)
    other = logits + size * torch.randn(logits.shape, generator=g, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g)
    mu, pi = (x.log_softmax(-1).gather(-1, y).view(-1, 2).tolist() for x in (logits, other))
    return [{"prompt_ids": [i], "token_ids": ids, "rollout_log_probs": a, "train_log_probs": b}
            | more for i, (ids, a, b) in enumerate(zip(y.view(-1, 2).tolist(), mu, pi))]


def test_what_cannot_be_told_is_a_metric_and_an_exit_code(watch, tmp_path, capsys):
    bf16 = {"engine": "bfloat16", "trainer": "bfloat16", "experts": False}
    see(watch, noisy(), noisy(pair=bf16))
    assert [x["doctor/unsure"] for x in watch.logged] == [1, 0]
    assert "cannot tell: " in watch.lines[0] and watch.judge.alarms == 0
    append(tmp_path / "step-1.jsonl", noisy())
    follow = ["--watch", str(tmp_path), "--idle", "0"]
    assert main(follow) == 3 and main([*follow, "--precision", "bf16", "--no-experts"]) == 0
    assert main([str(tmp_path)]) == main([str(tmp_path / "step-1.jsonl")]) == 3
    with pytest.raises(SystemExit):
        main([*follow, "--json"])


def test_a_batch_without_a_token_that_counts_changes_nothing(watch):
    masked = [row | {"response_mask": [0, 0]} for row in HEALTHY]
    see(watch, HEALTHY, masked, rows(seed=1))
    assert len(watch.lines) == 1 and watch.logged[1]["doctor/alarm"] == 0 and not watch.broken


@pytest.mark.parametrize("fault", ["rows", "say", "log"])
def test_an_exception_is_one_warning_and_the_doctor_is_silent(watch, fault, caplog):
    def fails(*_):
        raise KeyError("rollout_log_probs")
    watch.say = fails if fault == "say" else watch.say
    for step in (1, 2):
        watch.see(step, fails if fault == "rows" else lambda: HEALTHY,
                  fails if fault == "log" else lambda *_: None)
    assert [r.message for r in caplog.records] == [
        "the doctor watches no longer: KeyError: 'rollout_log_probs'"]
    assert watch.batches == (fault != "rows")


def test_after_the_first_batches_it_takes_a_hundredth_of_the_time(watch, monkeypatch):
    """A step takes ten seconds, and the doctor one: it skips nine of ten, and more at first."""
    clock = [0.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: clock[0])
    watch.began, report = 0.0, Watch().judge.of([])
    monkeypatch.setattr(watch.judge, "of", lambda _: report)

    def batch():
        clock[0] += 1
        return []
    for step in range(2000):
        watch.see(step, batch)
        clock[0] += 10
        assert watch.spent <= max(FREE, SHARE * clock[0] + 1)
    assert watch.spent >= SHARE * clock[0] - 1 > FREE


def test_a_part_of_a_large_batch_is_examined_and_dumped(tmp_path):
    watch = Watch(tmp_path / "dumps", lambda _: None)
    many = HEALTHY * 20
    see_many = {}
    watch.see(3, lambda: many, see_many.__setitem__)
    written = (tmp_path / "dumps/step-000003.jsonl").read_text().splitlines()
    assert len(written) == EXAMINED // 2 < len(many) and see_many["doctor/e_rho"] == 1
    watch.see(3, lambda: HEALTHY)                               # the step is made again
    assert len((tmp_path / "dumps/step-000003.jsonl").read_text().splitlines()) == 400
    assert count([5, 5, 5], 10) == 2 and count([50], 10) == 1
    assert leading(torch.ones(3, 5000)) == slice(1)


# ------------------------------------------------------------------------------ in a terminal

@pytest.fixture
def followed(tmp_path):
    """A follower of a folder, the lines that it says, and the folder."""
    lines = []
    return Follower(tmp_path, lines.append), lines, tmp_path


def test_a_folder_of_dumps_that_grows_is_a_line_a_file(followed):
    follower, lines, place = followed
    append(place / "step-2.jsonl", HEALTHY)
    append(place / "step-10.jsonl", HOT)
    (place / "notes.txt").write_text("no dump")
    assert follower.look() == 0                                 # they may still be written
    assert follower.look() == 2 and follower.alarms == 1
    assert [line.split(":")[0] for line in lines] == ["doctor, step-2", "ALARM doctor, step-10"]
    append(place / "step-11.jsonl", rows(2.0, 1))
    assert (follower.look(), follower.look(), follower.look()) == (0, 1, 0)
    assert follower.alarms == 2


def test_a_file_that_grows_is_a_line_each_time_that_it_has(tmp_path):
    lines, place = [], tmp_path / "dump.jsonl"
    append(place, HEALTHY)
    follower = Follower(place, lines.append)
    assert follower.look(at_once=True) == 1
    with place.open("a") as file:
        text = "".join(json.dumps(row) + "\n" for row in HOT)
        file.write(text[:-7])                                   # the last line is not whole yet
    assert follower.look(at_once=True) == 1 and "ALARM" in lines[1]
    with place.open("a") as file:
        file.write(text[-7:])
    assert follower.look(at_once=True) == 1                     # the one row that was not whole
    place.write_text("")
    append(place, HEALTHY)                                      # another run's, of the same name
    assert follower.look(at_once=True) == 1 and "no cause found" in lines[-1]


def test_files_of_tensors_are_followed_too(followed):
    follower, lines, place = followed
    torch.save({"samples": [
        {"tokens": row["prompt_ids"] + row["token_ids"], "response_lengths": 2,
         "rollout_log_probs": row["rollout_log_probs"], "log_probs": row["train_log_probs"]}
        for row in HOT]}, place / "0.pt")
    assert (follower.look(), follower.look(), follower.look()) == (0, 1, 0)
    assert lines[0].startswith("ALARM doctor, 0: ")


def test_a_run_of_this_trainer_is_a_line_a_step_until_its_end(run, capsys):
    """It is found by its name and by its place; its dumps are of the first steps."""
    code, steps = run("run.dump=1", "train.steps=3")
    assert code == 0
    capsys.readouterr()
    for name in ("x", "runs/x"):
        assert main(["--watch", name]) in (0, 1)                # it ends, since the run has
        out = capsys.readouterr().out.splitlines()
        assert [n for n in (1, 2, 3) if any(f"step {n}: reward " in line for line in out)] == [
            1, 2, 3]
        assert sum("doctor, step-000001: " in line for line in out) == 1
    assert f"k3 {steps[0]['rollout_corr/k3_kl']:.3g}" in out[0]


def test_a_metric_that_looks_wrong_twice_running_is_an_alarm(followed):
    follower, lines, place = followed
    for step, k3 in enumerate((0.01, 0.4, 0.4, 0.01), 1):
        append(place / "metrics.jsonl", [{"step": step, "rollout_corr/k3_kl": k3}])
        follower.look(at_once=True)
    assert [line.startswith("ALARM") for line in lines] == [False, False, True, False]
    assert follower.alarms == 1 and "k3_kl is 0.4" in lines[1]


def test_a_picture_is_drawn_when_the_verdict_changes(tmp_path):
    append(tmp_path / "dump.jsonl", HOT)
    figure = tmp_path / "figure.png"
    assert main(["--watch", str(tmp_path), "--idle", "0", "--figure", str(figure)]) == 1
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize("given, sentence", [
    (["--watch", "none"], "there is no such file or folder, and no run runs/none"),
    (["--watch", ".", "--idle", "0"], "has no step and no dump so far"),
    (["--watch", "bad.jsonl", "--idle", "0"], "line 2: this is not JSON"),
    (["--watch", "text.jsonl", "--idle", "0"], "line 1: this is no table"),
    (["--watch", "short.jsonl", "--idle", "0"], "line 1: rollout_log_probs must be")])
def test_what_cannot_be_followed_is_one_sentence(given, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if given[1].endswith("jsonl"):
        (tmp_path / "bad.jsonl").write_text(json.dumps(HEALTHY[0]) + "\n{\n")
        (tmp_path / "text.jsonl").write_text('"x"\n')
        append(tmp_path / "short.jsonl", [HEALTHY[0] | {"rollout_log_probs": [-1]}])
    assert main(given) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@pytest.mark.parametrize("given, sentence", [
    (["--watch", "x", "--model", "y"], "--watch goes with --figure, --idle and what is"),
    (["--watch", "x", "--json"], "--watch goes with --figure, --idle and what is"),
    (["x", "--idle", "1"], "--idle MINUTES goes with --watch"),
    (["--watch", "x", "--idle", "-1"], "--idle MINUTES goes with --watch, and is 0 or more")])
def test_what_does_not_go_together_is_refused(given, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(given)
    assert sentence in capsys.readouterr().err


def test_ctrl_c_and_long_silence_end_it_with_the_code_of_its_alarms(tmp_path, monkeypatch):
    append(tmp_path / "x.jsonl", HOT)
    looks = []

    def wait(_):
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt
    monkeypatch.setattr(following.time, "sleep", wait)
    assert main(["--watch", str(tmp_path)]) == 1 and len(looks) == 3
    looks.clear()
    began = time.monotonic()
    monkeypatch.setattr(following.time, "monotonic", lambda: began + 60 * len(looks))
    assert main(["--watch", str(tmp_path), "--idle", "2"]) == 1 and looks


NULLS = [row | {"rollout_log_probs": [None, None]} for row in HEALTHY[:30]]
MASKED = [row | {"response_mask": [0, 0]} for row in HEALTHY[:30]]


@pytest.mark.parametrize("first, code", [(NULLS, 1), (noisy(), 3), (MASKED, 0), (HOT, 1)])
def test_it_ends_with_the_worst_answer_that_it_saw(first, code, tmp_path, capsys):
    """A later dump without a fault takes nothing back; one without a token says nothing."""
    append(tmp_path / "step-1.jsonl", first)
    append(tmp_path / "step-2.jsonl", noisy(size=0.005))
    assert main(["--watch", str(tmp_path), "--idle", "0"]) == code
    line, last = capsys.readouterr().out.splitlines()
    assert ("a fault" in line) == (code == 1) and "a fault" not in last
    assert line.startswith("ALARM") == (code == 1)


def test_a_last_line_without_its_end_is_read_at_the_end(tmp_path, capsys):
    """Unless it is no whole row, as of a run that was stopped while it wrote."""
    place = tmp_path / "dump.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in noisy(size=0.005))
    place.write_text(text + json.dumps(NULLS[0]))
    assert main(["--watch", str(place), "--idle", "0"]) == 1
    assert "1 of 2 " not in (said := capsys.readouterr().out) and "a fault" in said
    place.write_text(text + json.dumps(NULLS[0])[:-9])
    assert main(["--watch", str(place), "--idle", "0"]) == 0
    place.write_text(json.dumps(HEALTHY[0]))
    assert main(["--watch", str(place), "--idle", "0"]) == 3        # two tokens cannot tell


@pytest.mark.parametrize("rows, code, said", [
    (NULLS, 1, "sampled tokens have no finite log-prob"), (MASKED, 2, "no token that counts")])
def test_what_has_no_token_is_one_answer_in_each_mode(rows, code, said, tmp_path, capsys):
    """A log-prob that is not finite is a fault; where nothing was sampled, nothing can be read."""
    one, two = (str(tmp_path / f"step-{n}.jsonl") for n in (1, 2))
    append(one, rows)
    append(two, rows)
    for given in ([one], [one, "--json"], [one, two], [str(tmp_path)],
                  ["--watch", one, "--idle", "0"], ["--watch", str(tmp_path), "--idle", "0"]):
        assert main(given) == code, given
        found = capsys.readouterr()
        assert "--json" in given or said in found.out + found.err, given


def test_a_log_whose_gap_is_never_a_number_is_a_fault(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    append(path, [{"step": n, "rollout_corr/k3_kl": math.nan} for n in range(1, 9)])
    for given in ([str(path)], ["--watch", str(tmp_path), "--idle", "0"]):
        assert main(given) == 1
    assert "A fault: the gap is NaN or ∞ at 8 steps" in capsys.readouterr().out


def test_one_step_whose_gap_is_no_number_is_an_alarm(tmp_path, capsys):
    append(tmp_path / "metrics.jsonl", [
        {"step": n, "rollout_corr/k3_kl": math.nan if n == 2 else 1e-4} for n in range(1, 5)])
    assert main(["--watch", str(tmp_path), "--idle", "0"]) == 1
    alarmed = [n for n, line in enumerate(capsys.readouterr().out.splitlines(), 1)
               if line.startswith("ALARM") and "a fault" in line]
    assert alarmed == [2]


def test_step_10_comes_after_step_9(tmp_path):
    names = ["step-10.jsonl", "step-9.jsonl", "a.pt", "9_1.pt", "10_0.pt"]
    found = sorted((tmp_path / name for name in names), key=in_order)
    assert [path.name for path in found] == [
        "9_1.pt", "10_0.pt", "a.pt", "step-9.jsonl", "step-10.jsonl"]
