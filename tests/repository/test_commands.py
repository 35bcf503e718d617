"""The commands of an installation: each is found by its name, and says what it cannot do."""

import shlex

import pytest
import yaml

from three_policies import __main__ as commands
from three_policies.interop.dialects import from_dialect
from three_policies.presets import HISTORICAL, PRESETS


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_has_a_help(name, capsys):
    try:
        assert commands.main([name, "--help"]) == 0
    except SystemExit as end:                      # argparse's way
        assert end.code == 0
    assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize("given, code", [([], 2), (["--help"], 0), (["trian"], 2)])
def test_without_a_command_they_are_listed(given, code, capsys):
    assert commands.main(given) == code
    said = capsys.readouterr()
    assert all(name in (said.err if code else said.out) for name in commands.COMMANDS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in HISTORICAL])
def test_a_preset_written_out_is_the_same_configuration(preset, capsys):
    assert commands.main(["translate", f"preset: {preset}"]) == 0
    block = yaml.safe_load(capsys.readouterr().out)["correction"]
    assert from_dialect(block) == PRESETS[preset]()


@pytest.mark.parametrize("block, expected, remark", [
    ("'rollout_rs: token_k1' 'rollout_rs_threshold: \"0.5_4.0\"'",
     {"rollout_rs": {"token_k1": [0.25, 2.0]}}, "bounds 1/ρ"),
    ("'{tis_ratio_type: sequence, sequence_tis_ratio_clip_high: 3}'",
     {"rollout_is": "sequence", "rollout_is_threshold": 3.0}, ""),
    ("'loss: {type: icepop}'",
     {"rollout_is": "token", "rollout_is_threshold": [0.2, 5.0], "bypass_mode": True,
      "loss_type": "reinforce"}, ""),
    ("'{}'", {}, "")])
def test_other_systems_blocks_are_translated(block, expected, remark, capsys):
    assert commands.main(["translate", *shlex.split(block)]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out)["correction"] == expected
    assert remark in said.err and bool(remark) == bool(said.err)


@pytest.mark.parametrize("block, words", [
    ("rollout_iss: token", "did you mean 'rollout_is'?"), ("[1]", "must be a mapping"),
    ("a: [", "no YAML"), ("none.yaml", "none.yaml cannot be read"), ("text", "must be a mapping")])
def test_what_cannot_be_translated_is_one_sentence(block, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.main(["translate", block]) == 2
    said = capsys.readouterr()
    assert not said.out and words in said.err and said.err.count("\n") == 1


def test_a_file_is_translated_as_its_lines_are(tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("correction: {rollout_is: token, rollout_is_threshold: 3}")
    assert commands.main(["translate", str(tmp_path / "own.yaml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {
        "correction": {"rollout_is": "token", "rollout_is_threshold": 3.0}}


def test_a_run_is_reported_by_its_name_and_by_its_directory(run, capsys):
    code, lines = run("train.steps=3", "train.eval_every=1", draw=True)
    assert code == 0 and len(lines) == 3
    capsys.readouterr()
    said = []
    for name in ("x", "runs/x"):
        assert commands.main(["report", name]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "steps 1 to 3" in said[0] and "reward/mean" in said[0]
    assert commands.main(["report", "another"]) == 2
    assert "runs/another/metrics.jsonl" in capsys.readouterr().err
