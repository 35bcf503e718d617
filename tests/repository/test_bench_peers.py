"""A part of tools/bench_peers.py that fails is a row, and the others go on."""

import pytest

from three_policies.tools import bench_peers


@pytest.mark.parametrize("error, words", [
    (MemoryError("CUDA | out of memory\nand four lines more"),
     "MemoryError: CUDA / out of memory"),
    (RuntimeError(), "RuntimeError: no word")])
def test_a_part_that_fails_is_a_row_and_the_next_one_runs(
        error, words, tmp_path, monkeypatch, capsys):
    def fails(given):
        raise error
    parts = {"correct": fails, "update": lambda given: bench_peers.row("the next", 1)}
    monkeypatch.setattr(bench_peers, "PARTS", parts)
    monkeypatch.setattr(bench_peers, "failed", [])
    monkeypatch.setattr(bench_peers.torch, "set_num_threads", lambda n: None)
    monkeypatch.chdir(tmp_path)                                # where the test goes back from
    assert bench_peers.main(["--model", str(tmp_path)]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows == [f"| correct | FAILED: {words} |", "| the next | 1 |"]
