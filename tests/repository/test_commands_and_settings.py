"""The commands and settings of the README and of what it leads to exist, and do what they say.

Each `python trainer.py …` or `torchrun … trainer.py …` in them is checked as the trainer would
check it, before anything is loaded. test_trainer.py runs what can be run, test_labels_and_tables.py
tests the tables between markers. An installation's commands say what they cannot do.
"""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from three_policies import __main__ as commands, losses, tiny
from three_policies.interop.dialects import from_dialect
from three_policies.presets import HISTORICAL, PRESETS
from three_policies.surrogates import LOSSES
from three_policies.training.settings import OTHER_NAMES, Config, leaves, load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INTEROP = (ROOT / "interop/README.md").read_text(encoding="utf-8")
DOCUMENTS = "\n".join([README, INTEROP, *(
    path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("math/appendix-*.md")))])
COMMANDS = sorted({command for command in re.findall(
                       r"(?:python |torchrun [^`\n]*?)trainer\.py[^`\n#|]*", DOCUMENTS)
                   if "NAME" not in command and "…" not in command and "--help" not in command})


def test_the_two_commands_come_first():
    first_block = re.search(r"```bash\n(.*?)```", README, re.DOTALL).group(1)
    assert [line.split("#")[0].strip() for line in first_block.strip().splitlines()] == [
        "pip install -r requirements.txt && python trainer.py",
        "pip install -r requirements.txt && pytest"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_a_valid_configuration(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    assert load_config(words[words.index("trainer.py") + 1:]).train.steps >= 1


def test_commands_were_found():
    assert len(COMMANDS) >= 6


def test_the_sample_of_the_readme_corrects_once_and_is_right(monkeypatch):
    """eq:decoupled-ppo: the README's sample computes the same as `policy_loss` on its own.

    It does not call `correct` a second time.
    """
    (sample,) = re.findall("```python\n(from three_policies import.*?)```", README, re.DOTALL)
    old, mu = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    given = dict(log_prob=old.clone().requires_grad_(), old_log_prob=old, rollout_log_prob=mu,
                 advantages=torch.ones(4, 5).double(), response_mask=torch.ones(4, 5))
    namespace = dict(given)
    calls = []
    monkeypatch.setattr(losses, "correct", lambda *args: calls.append(args))
    exec(sample, namespace)
    monkeypatch.undo()
    expected, _ = losses.policy_loss(*given.values(), namespace["config"])
    assert not calls and torch.equal(namespace["loss"], expected)
    assert {"rollout_corr/kl", "rollout_corr/rollout_is_mean"} <= set(namespace["metrics"])


def test_the_written_out_correction_is_valid():
    chapter = (ROOT / "math" / "6-correction.md").read_text(encoding="utf-8")
    block = yaml.safe_load(re.search(r"```yaml\n(correction:.*?)```", chapter, re.DOTALL).group(1))
    assert from_dialect(block["correction"]).rollout_rs["seq_max_k1"] == (1e-4, None)


def test_settings_named_in_the_documents_exist():
    known = [*(key for key, *_ in leaves(Config)), *OTHER_NAMES]
    named = set(re.findall(r"`((?:task|policy|rollout|advantage|loss|train)\.[a-z_]+)", DOCUMENTS))
    assert named - {"rollout.py", "policy.py"} <= set(known), named - set(known)


def test_every_setting_is_read():
    """A loss's own numbers, such as loss.clip_low, are read by name, from its row."""
    read = {node.attr for path in [*ROOT.glob("*.py"), *ROOT.glob("training/*.py")]
            for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    read |= {name for row in LOSSES.values() for name in row.own}
    assert {key.split(".")[-1] for key, *_ in leaves(Config)} <= read


def test_the_readme_shows_what_tiny_prints(capsys):
    tiny.main()
    [shown] = re.findall(r"\$ python tiny.py\n(.*?)```", README, re.DOTALL)
    assert shown and capsys.readouterr().out.endswith(shown)


def test_the_readme_is_short():
    """It has at most 150 lines of at most 120 characters; intervals stand in the chapters."""
    lines = README.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120 and "±" not in README


def test_requirements_named_in_the_documents_exist():
    for name in re.findall(r"requirements[a-z/-]*\.txt", DOCUMENTS):
        assert (ROOT / name).is_file(), name


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
    ("a: [", "the block cannot be read as YAML: "), ("none.yaml", "none.yaml cannot be read"),
    ("text", "must be a mapping")])
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
