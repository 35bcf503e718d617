"""The GPU report says what failed and goes on, and runs tiny without a GPU.

A broken row fails before it has imported anything: a torch that raises is put in torch's place.
"""

import re
import sys

import pytest

from three_policies.tools import gpu_report

BROKEN = """
import os, sys, time
name, rank, begun = sys.argv[-1], os.environ.get("RANK"), __file__ + ".begun"
print(f"| {name} | begins |\\n", end="", flush=True)      # one write, where nothing is buffered
if name == os.environ["BROKEN"]:
    if rank == "0":
        open(begun, "w")
        time.sleep(600)                    # it waits for the rank that fails
    while rank and not os.path.exists(begun): time.sleep(0.01)         # which fails after that
    print("a line of a traceback", file=sys.stderr)
    {fault}
os._exit(0)
"""
RAISES = "raise MemoryError('CUDA | out of memory, with a bar')"
CASES = [*((gpu_report.ROWS, 1, name) for name in gpu_report.ROWS),
         *((gpu_report.OF_RANKS, 2, name) for name in gpu_report.OF_RANKS)]


@pytest.fixture
def reported(tmp_path, monkeypatch, capfd):
    """reported(rows, name, fault) breaks a row: (status, lines of the table, stderr)."""
    def call(rows, name, fault=RAISES, ranks=1):
        (tmp_path / "torch.py").write_text(BROKEN.replace("{fault}", fault))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("BROKEN", name)
        status = gpu_report.report(rows, ranks)
        out, err = capfd.readouterr()
        return status, [line for line in out.splitlines() if line.startswith("| ")], err
    monkeypatch.setattr(gpu_report, "ON_GPU", True)            # all rows are for it
    monkeypatch.setattr(gpu_report, "DISK", 0)
    return call


@pytest.mark.parametrize("rows, ranks, name", CASES)
def test_a_row_that_fails_is_a_row_and_the_next_one_follows(rows, ranks, name, reported):
    two = {name: rows[name], "the next": rows["machine"]}
    status, table, stderr = reported(two, name, ranks=ranks)
    assert status == 1 and "a line of a traceback" in stderr
    assert table[1:] == [
        *[f"| {name} | begins |"] * (1 if name == "machine" else ranks),   # it writes the models
        f"| {name} | FAILED: MemoryError: CUDA / out of memory, with a bar (status 1) |",
        *["| the next | begins |"] * ranks]


PADDING = {"padding": gpu_report.ROWS["padding"]}


CUDAS = "raise RuntimeError('CUDA error: invalid device ordinal\\nCompile with `TORCH_USE_…`')"


@pytest.mark.parametrize("fault, words", [
    ("os.kill(os.getpid(), 9)", "a line of a traceback (status -9)"),
    ("os._exit(3)", "a line of a traceback (status 3)"),
    (CUDAS, "RuntimeError: CUDA error: invalid device ordinal (status 1)")])
def test_a_row_that_is_killed_is_a_row(fault, words, reported):
    status, table, _ = reported(PADDING, "padding", fault)
    assert status == 1 and f"| padding | FAILED: {words} |" in table


def test_a_row_that_takes_too_long_is_ended(reported):
    """A limit of 0 minutes ends every row: nothing here depends on a clock."""
    rows = {"padding": PADDING["padding"]._replace(minutes=0)}
    status, table, _ = reported(rows, "padding", "time.sleep(600)")
    assert status == 1 and table[-1] == "| padding | FAILED: not done after 0 minutes |"


def test_a_full_disk_that_swallows_the_last_words_is_said(reported, monkeypatch):
    usage = gpu_report.shutil.disk_usage
    found = iter([usage("."), usage(".")._replace(free=0)])
    monkeypatch.setattr(gpu_report.shutil, "disk_usage", lambda _: next(found))
    monkeypatch.setitem(globals(), "BROKEN", BROKEN.replace("a line of a traceback", ""))
    _, table, _ = reported(PADDING, "padding", "os._exit(1)")
    assert re.search(r"FAILED: no word, and \S+ is full .status 1. \|$", table[-1])


def test_a_report_that_is_ended_ends_its_row(reported, monkeypatch):
    started, popen = [], gpu_report.subprocess.Popen

    def interrupt(_):
        raise SystemExit(143)
    monkeypatch.setattr(gpu_report.subprocess, "Popen",
                        lambda *args, **given: started.append(popen(*args, **given)) or started[-1])
    monkeypatch.setattr(gpu_report.time, "sleep", interrupt)
    with pytest.raises(SystemExit):
        reported(PADDING, "padding", "time.sleep(600)")
    assert len(started) == 1 and started[0].poll() == -9


def test_without_a_fault_the_status_is_0(reported):
    status, table, _ = reported(PADDING, "none")
    assert status == 0 and table[1:] == ["| padding | begins |"]


def test_memory_time_and_disk_are_said_before_and_a_full_disk_ends_it(monkeypatch, capfd):
    monkeypatch.setattr(gpu_report, "ON_GPU", True)
    monkeypatch.setattr(gpu_report, "DISK", 10 ** 6)
    assert gpu_report.main([]) == 1
    out = capfd.readouterr().out
    most = max(row.gigabytes for row in gpu_report.ROWS.values())
    minutes = sum(row.minutes for row in gpu_report.ROWS.values())
    assert f"about {minutes:g} minutes; the largest takes {most} GB of each GPU" in out
    assert "Needs 1e+06 GiB in" in out and "|" not in out and most <= 24


def test_it_wants_at_least_one_rank(capsys):
    with pytest.raises(SystemExit):
        gpu_report.main(["--ranks", "0"])
    assert "--ranks=0 must be at least 1" in capsys.readouterr().err


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None             # it takes ten seconds to import; test_rollout.py has it
from three_policies.tools import gpu_report
sys.exit(gpu_report.main(sys.argv[1:]))
"""


@pytest.fixture
def tiny(forks, tmp_path, monkeypatch, capfd):
    """tiny(argument …) runs the whole report without a GPU, every row in a fork: its output."""
    def call(*argv):
        status = gpu_report.main(list(argv))
        out, err = capfd.readouterr()
        assert status == 0, out + err
        return out
    (tmp_path / "report.py").write_text(WITHOUT_VLLM)
    program = [sys.executable, *forks, str(tmp_path / "report.py")]
    monkeypatch.setattr(gpu_report, "PROGRAM", program)
    monkeypatch.setattr(gpu_report, "ON_GPU", False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return call


@pytest.mark.long
def test_the_report_runs_tiny_without_a_gpu_and_says_so(tiny):
    out = tiny()
    assert "NO GPU: tiny shapes" in out and "0 of 14 rows failed" in out
    assert "one that did not | the same bits |" in out
    gaps = re.findall(r"gradient, padded against alone, \w+ \| (\S+) of its length", out)
    assert len(gaps) == 2 and max(map(float, gaps)) < 0.1      # what bfloat16 rounds is 0.005
    assert float(re.search(r"k3 \S+, gradient (\S+) \|", out)[1]) > 0.1         # some are rewarded
    assert "two steps of configs/gsm8k.yaml" in out and out.count("left out: ") == 6


@pytest.mark.long
def test_two_ranks_share_a_model_and_take_a_step(tiny):
    out = tiny("--ranks", "2")
    assert "weights on 2 ranks (gloo) | the same bits |" in out
    assert out.count("weights pushed while asleep | arrive, log-probs at most 0.0e+00 apart |") == 1
    assert "one step and its weights in the engine | gradient" in out
