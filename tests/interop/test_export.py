"""A correction written for verl, SkyRL or TRL is read back as itself, or a sentence says why not.

interop/README.md says how the command is called. The readers are tested by test_dialects.py
against what those systems' documents print; test_exported.py hands what is written to their code.
"""

import errno
import math
import re
import shlex
import warnings
from dataclasses import fields, replace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from three_policies import __main__ as commands
from three_policies.correction import correct
from three_policies.interop.dialects import from_dialect, own_keys
from three_policies.interop.export import SYSTEMS, to_dialect
from three_policies.interop.given import block_of
from three_policies.interop.lacks import opened
from three_policies.interop.meanings import READ
from three_policies.oracle import f64
from three_policies.presets import PRESETS
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA
from three_policies.surrogates import LOSSES
from three_policies.tests.support.examples import STEADY, bound_of
from three_policies.tests.support.launching import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FIELDS = [field.name for field in fields(Config)]
WHOLE = {"metrics_only", "bypass_mode"}         # without these the rest would mean another thing
OF_WEIGHTS = {"rollout_is_threshold", "rollout_is_batch_normalize"}


def read_back(export):
    """Return what the keys mean to from_dialect, by way of their YAML."""
    return from_dialect(yaml.safe_load(yaml.safe_dump(export.block)))


def changed(config, other):
    """Return the fields that differ; bounds may differ by rounding, as 1/(1/x) does."""
    mine, theirs = ({**c.__dict__, "rollout_rs": dict(c.rollout_rs)} for c in (config, other))
    return {name for name in FIELDS if not same(mine[name], theirs[name])}


def same(x, y):
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(same(x[key], y[key]) for key in x)
    if isinstance(x, tuple) and isinstance(y, tuple):
        return all(map(same, x, y))
    numbers = all(type(z) is float for z in (x, y))
    return math.isclose(x, y, rel_tol=1e-12) if numbers else x == y


def assert_nothing_is_lost_in_silence(config, system):
    export = to_dialect(config, system)
    sentences = [*export.left_out, *export.remarks]
    named = {name for sentence in sentences for name in FIELDS
             if name in re.findall(r"\w+", sentence.split(":")[0])}
    named |= OF_WEIGHTS if "rollout_is" in named else set()
    named |= set(FIELDS) if named & WHOLE and not export.keys else set()

    assert not changed(read_back(export), export.config)
    assert changed(config, export.config) <= named
    if not sentences:
        assert not changed(read_back(export), config)
    assert (export.recipe is None) == (not export.left_out)
    for sentence in sentences:
        assert "\n" not in sentence and re.match(r"\w+", sentence)[0] in FIELDS
    return export


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_read_back_or_a_sentence_says_why_not(preset, system):
    assert_nothing_is_lost_in_silence(PRESETS[preset](), system)


NUMBERS = st.sampled_from([1.0, 1.5, 2.0, 5.0, 1e4, math.inf]) | st.floats(1, 1e6)
LOW = st.none() | st.sampled_from([0.5, 1e-4]) | st.floats(1e-6, 1)
HIGH = st.none() | NUMBERS
PAIRS = st.tuples(LOW, HIGH).filter(any)
OF_CRITERIA = st.dictionaries(st.sampled_from([*CRITERIA]), st.tuples(PAIRS, NUMBERS), max_size=3)


@st.composite
def configurations(draw):
    """Draw a valid configuration: with the loss, the modes and the numbers that go together."""
    loss = draw(st.sampled_from([*LOSSES]))
    criteria = draw(OF_CRITERIA)
    made = Config(
        draw(st.sampled_from([None, "token", "prefix", "sequence", "geometric"])),
        draw(NUMBERS | PAIRS), draw(st.booleans()),
        {name: bound_of(name, *bounds) for name, bounds in criteria.items()},
        bypass_mode=LOSSES[loss].level is None or draw(st.booleans()), loss_type=loss,
        metrics_only=draw(st.integers(0, 5)) == 0,
        rollout_is_count_below=draw(st.none() | st.just(0.3)))
    try:
        return replace(made, score_centering=draw(st.integers(0, 3)) == 0)
    except ValueError:
        return made


@settings(STEADY, max_examples=1000)
@given(configurations(), st.sampled_from([*SYSTEMS]))
def test_any_configuration_is_read_back_or_a_sentence_says_why_not(config, system):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_nothing_is_lost_in_silence(config, system)


@settings(STEADY, max_examples=300)
@given(configurations(), st.sampled_from([*SYSTEMS]))
def test_a_remark_changes_no_product_of_weight_and_mask(config, system):
    """eq:correction: where nothing is left out, the lines correct as the configuration does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export = to_dialect(config, system)
    if export.left_out:
        return
    generator = torch.Generator().manual_seed(0)
    rollout, noise, advantages = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    mask = f64([[1, 1, 1, 1, 1]] * 5 + [[1, 1, 0, 0, 0]])
    given = rollout + noise, rollout, mask
    weights = []
    for one in (config, export.config):
        w, kept, _ = correct(*given, one, advantages)
        unweighted = w is None or not one.applies_weights
        weights.append(kept * (1 if unweighted else w))
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda system: system.name)
def test_every_field_of_ours_has_a_row_or_a_lack(system):
    """A field that is added has to be written, or said to be left out."""
    named = re.findall(r"\w+", " ".join(row.field for row in (*system.rows, *system.lacks)))
    assert set(FIELDS) <= set(named) <= {*FIELDS, *CRITERIA, "and"}
    assert len({row.key for row in system.rows}) == len(system.rows)


# ------------------------------------------------------------------- what each system writes

@pytest.mark.parametrize("preset, system, keys", [
    ("decoupled_token_icepop", "verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
    ("decoupled_k3_rs", "verl", {
        "rollout_is": None, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}),
    ("seq_mis", "verl", {
        "rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_rs": "seq_sum_k1",
        "rollout_rs_threshold": "0.5_inf"}),                            # on 1/ρ
    ("bypass_pg_is", "verl", {
        "rollout_is": "sequence", "rollout_is_threshold": 2.0, "bypass_mode": True,
        "loss_type": "reinforce", "loss_mode": "bypass_mode",
        "rollout_correction": "${algorithm.rollout_correction}"}),
    ("geo_rs", "skyrl", {
        "tis_ratio_type": None, "sequence_mask_metric": "geometric", "geo_mask_low": 0.999,
        "geo_mask_high": 1.001, "outlier_token_is_threshold_low": 1e-4,
        "outlier_token_is_threshold_high": None, "logprobs": 1}),
    ("decoupled_token_icepop", "skyrl", {
        "tis_ratio_type": "token", "token_tis_ratio_clip_high": 5.0,
        "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 5.0, "logprobs": 1}),
    ("bypass_pg_token_icepop", "skyrl", {
        "tis_ratio_type": None, "policy_loss_type": "rollout_is", "eps_clip_low": 0.5,
        "eps_clip_high": 4.0, "logprobs": 1}),
    ("decoupled_seq_is", "trl", {
        "use_vllm": True, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 2.0}),
    ("seq_is_rs", "trl", {
        "use_vllm": True, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2.0}),
    ("disabled", "trl", {"use_vllm": True, "vllm_importance_sampling_correction": False}),
    ("decoupled_token_is", "openrlhf", {
        "is_correction_level": "token", "is_correction_mode": "clip",
        "is_correction_gating": "ratio", "is_correction_threshold": [0.0, 2.0]}),
    ("decoupled_token_icepop", "openrlhf", {
        "is_correction_level": "token", "is_correction_mode": "mask",
        "is_correction_gating": "ratio", "is_correction_threshold": [0.5, 5.0]}),
    ("decoupled_token_is", "slime", {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0}),
    ("bypass_ppo_clip", "slime", {"use_tis": False, "use_rollout_logprobs": True}),
    ("decoupled_token_icepop", "nemo-rl", {
        "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 5.0,
        "truncated_importance_sampling_ratio_min": 0.5}),
    ("disabled", "nemo-rl", {"use_importance_sampling_correction": False})])
def test_a_preset_is_written_as_that_system_writes_it(preset, system, keys):
    export = to_dialect(PRESETS[preset](), system)
    assert {key.split(".")[-1]: value for key, value in export.keys.items()} == keys
    assert not export.left_out


@pytest.mark.parametrize("config, system, words", [
    (Config.geo_rs(), "verl", "rollout_rs.seq_max_k1: verl 0.9 has seq_max_k2"),
    (Config("geometric"), "verl", "rollout_is: verl 0.9 has weights of tokens and of sequences"),
    (Config("token", 2.0, True, bypass_mode=True, loss_type="reinforce"), "verl",
     "rollout_is_batch_normalize: in bypass mode .* micro-batch.*#use-it-in-your-own-loop"),
    (Config(rollout_rs={"token_k2": 0.1}, bypass_mode=True, loss_type="gspo"), "verl",
     "rollout_rs: .*loss_mode=three_policies.: interop/README.md#verl-09"),
    (Config.ppo_is_bypass(), "verl", "metrics_only, rollout_is and rollout_rs: verl measures no"),
    (Config.bypass_pg_is(), "skyrl", "bypass_mode: .*cispo_anchor.*#skyrl-04"),
    (Config.bypass_pg_is(), "openrlhf", "bypass_mode: OpenRLHF clips around π_old"),
    (Config("token", 2.0, rollout_rs={"token_tv": 0.1}), "openrlhf",
     "rollout_rs.token_tv: .* beside token weights that nothing caps"),
    (Config(rollout_rs={"opsm": 0.1}), "slime", "rollout_rs.opsm: slime's --use-opsm compares"),
    (Config("sequence"), "slime", "rollout_is: slime has weights of tokens"),
    (Config("sequence"), "nemo-rl", "rollout_is: NeMo-RL has weights .* of sequences with gspo"),
    (Config.bypass_ppo_clip(), "nemo-rl", "bypass_mode: NeMo-RL clips around π_old"),
    (Config("sequence", rollout_rs={"token_k1": (0.5, 2.0)}), "skyrl", "rollout_rs.token_k1: bes"),
    (Config(rollout_rs={"seq_sum_k1": (0.5, 2.0), "seq_mean_k1": (0.9, 1.1)}), "skyrl",
     "rollout_rs.seq_mean_k1: SkyRL has one sequence_mask_metric"),
    (Config("token", (0.5, 2.0), rollout_rs={"token_k1": (0.5, 3.0)}), "skyrl",
     "rollout_is: .* a mask is in the way"),
    (Config(rollout_rs={"opsm": 0.1}), "trl", "rollout_rs.opsm: TRL's off_policy_mask_threshold"),
    (Config("token", loss_type="gspo"), "trl", "loss_type: .*PolicyLossGRPOTrainer does it"),
    (Config("sequence", 1.5, rollout_rs={"seq_sum_k1": (0.5, 2.0)}), "trl",
     "rollout_rs.seq_sum_k1: TRL rejects by a bound .*WeightedGRPOTrainer"),
    (Config.bypass_ppo_clip(), "trl", "bypass_mode: .*PolicyLossGRPOTrainer does it: interop")])
def test_what_a_system_lacks_is_one_sentence_with_a_recipe(config, system, words):
    export = to_dialect(config, system)
    (sentence,) = export.left_out
    whole = f"{sentence}; {export.recipe.what}: {export.recipe.place}"
    assert re.match(words, whole), whole
    place, _, anchor = export.recipe.place.partition("#")
    headings = [line.lstrip("# ").lower().replace(".", "").replace(" ", "-")
                for line in (ROOT / place).read_text().splitlines() if line.startswith("#")]
    assert anchor in headings


def test_a_bound_of_infinity_is_an_open_end():
    config = Config("token", (0.5, math.inf), rollout_rs={
        "token_k1": (None, math.inf), "seq_sum_k1": (0.1, math.inf), "token_k2": math.inf})
    assert opened(config) == Config("token", (0.5, None), rollout_rs={
        "seq_sum_k1": (0.1, None), "token_k2": math.inf})


# -------------------------------------------------------------------------------- TRL's own block

@pytest.mark.parametrize("block, expected", [
    ({"use_vllm": True}, Config("sequence", (None, 3.0))),              # TRL's default
    ({"vllm_importance_sampling_mode": "token_truncate"}, Config("token", 3.0)),
    ({"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5,
      "vllm_importance_sampling_clip_max": None, "loss_type": "dapo"},
     Config("token", (0.5, None))),
    ({"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None},
     Config("token", math.inf)),
    ({"vllm_importance_sampling_correction": False, "loss_type": "cispo"},
     Config(loss_type="cispo")),
    ({"use_vllm": False}, Config())])
def test_trls_block_is_read(block, expected):
    assert from_dialect(block) == expected


@pytest.mark.parametrize("block, words", [
    ({"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5},
     "clip_min must be null with .*token_truncate"),
    ({"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode cannot be 'token'"),
    ({"use_vllm": True, "loss_type": "vespo"}, "loss_type cannot be 'vespo'"),
    ({"use_vllm": True, "rollout_is": "token"}, "'rollout_is' here: it belongs to another dialect"),
    ({"loss_mode": "gspo", "loss_type": "sapo"}, "loss_mode 'gspo' and loss_type 'sapo' are two"),
    ({"loss_mode": "clip_cov"}, "loss_mode cannot be 'clip_cov'"),
    ({"policy_loss_type": "rollout_is", "tis_ratio_type": "token"}, "is around π_rollout, and"),
    ({"policy_loss_type": "rollout_is", "eps_clip_low": 2}, "eps_clip_low must be a positive")])
def test_a_block_that_cannot_be_meant_is_refused(block, words):
    with pytest.raises(ValueError, match=words):
        from_dialect(block)


# ------------------------------------------------------------------------------------ the command

def parts(out):
    """Return what stands below each comment that heads a paragraph."""
    return {text.split("\n", 1)[0]: text.split("\n", 1)[-1] for text in out.split("\n\n# ")}


def arguments(lines):
    """Return the arguments that a shell would make of lines that end in a backslash."""
    return shlex.split(lines.replace("\\\n", ""))


@pytest.mark.parametrize("system", ["verl", "skyrl", "openrlhf", "slime", "nemo-rl"])
@pytest.mark.parametrize("preset", ["decoupled_token_is", "decoupled_token_icepop",
                                    "bypass_ppo_clip", "seq_mis"])
def test_the_printed_arguments_can_be_fed_back(preset, system, capsys):
    """As one text, as a file's text, and as the words that a shell makes of them."""
    commands.main(["translate", "--to", system, preset])
    lines = parts("\n\n" + capsys.readouterr().out).get("on the command line")
    if lines is None:
        return
    meant = to_dialect(PRESETS[preset](), system).config
    for words in ([lines], arguments(lines)):
        block, remarks = block_of(words)
        assert not changed(from_dialect(block), meant) and not remarks


@pytest.mark.parametrize("system", ["verl", "skyrl"])
@pytest.mark.parametrize("preset", ["seq_mis", "decoupled_token_icepop", "geo_rs", "disabled"])
def test_the_lines_are_read_by_a_shell_and_by_yaml_alike(preset, system, capsys):
    """Hydra would read a bare 0.5_5.0 as another number, and a bare comma as a sweep."""
    code = commands.main(["translate", "--to", system, preset])
    said = capsys.readouterr()
    found = parts("\n\n" + said.out)
    export = to_dialect(PRESETS[preset](), system)
    assert code == (1 if export.left_out else 0)
    assert said.err.count("! ") == (len(export.left_out) + 1 if export.left_out else 0)
    assert yaml.safe_load(found["or in YAML"]) == export.block
    given = dict(word.split("=", 1) for word in arguments(found["on the command line"]))
    assert {key: yaml.safe_load(value.replace("=inf", "=.inf")) for key, value in given.items()
            } == export.keys
    for value in given.values():
        assert value[0] == value[-1] == '"' or not {"_", ","} & set(value) or value.isidentifier()


def test_the_recipe_for_trl_is_python_that_runs(capsys):
    config = Config("token", math.inf, rollout_rs={"seq_max_k1": (1e-4, None)})
    block = yaml.safe_dump({"correction": {**own_keys(config), "rollout_rs": {
        "seq_max_k1": [1e-4, None]}}})
    assert commands.main(["translate", "--to", "trl", block]) == 1
    code = parts("\n\n" + capsys.readouterr().out)["or all of it, in Python"]
    made = code.strip().split("correction=")[1].removesuffix(")")
    assert eval(made, {"RolloutCorrectionConfig": Config}) == config


def test_a_block_of_one_system_is_written_for_another(capsys):
    block = "{tis_ratio_type: token, token_tis_ratio_clip_high: 3}"
    assert commands.main(["translate", "--to", "trl", block]) == 0
    assert 'vllm_importance_sampling_mode="token_truncate"' in capsys.readouterr().out
    assert commands.main(["translate", "use_vllm: true"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["correction"] == {
        "rollout_is": "sequence", "rollout_is_threshold": [None, 3.0]}


def test_own_is_the_default_and_a_presets_name_is_a_block(capsys):
    assert commands.main(["translate", "geo_rs"]) == 0
    own = capsys.readouterr().out
    assert commands.main(["translate", "--to", "own", "preset: geo_rs"]) == 0
    assert capsys.readouterr().out == own and "seq_max_k1: [0.0001, null]" in own
    assert commands.main(["translate", "geo_r"]) == 2
    assert "did you mean 'geo_rs'?" in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints(capsys):
    page = (ROOT / "interop/README.md").read_text()
    commands.main(["translate", "--to", "verl", "decoupled_token_icepop"])
    shown = re.search(r"```\n(# on the command line\n.*?)```", page, re.DOTALL)[1]
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize("text", [
    "[" * 3000 + "]" * 3000, "rollout_is: 2020-13-45", "a: [", b"\xff\xfe"])
def test_what_is_no_yaml_is_a_sentence_with_its_source(text, tmp_path, capsys):
    place = tmp_path / "block.yaml"
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert commands.main(["translate", str(place)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"translate: {place} cannot be read as YAML: ") and len(said) < 400


@pytest.mark.parametrize("text, code, words", [
    ("rollout_is: token\nrollout_is: sequence\n", 2, "rollout_is is given twice, in line 2 again"),
    ("just words", 2, "must be a mapping of settings"),
    ("correction: geo_rs\nmodel: x\n", 0, "only correction is read, not model"),
    ("correction: geo_r\n", 2, "correction cannot be 'geo_r'; did you mean 'geo_rs'?"),
    ("data: {a: 1}\nalgorithm: {adv: x, rollout_correction: {rollout_is: token}}\n", 0,
     "no part of a correction, and not read: data, algorithm.adv"),
    ("algorithm: {adv: x, rollout_correction: {rollout_iss: token}}\n", 2, "'rollout_is'?"),
    ("data: {a: 1}\n", 2, "has no key 'data'; the nearest are "),
    ("--use-tis --tis-clip 3 --lr 1e-6", 0, "not read: lr"),
    ("--use-tis --use-tis", 2, "use-tis is given twice"),
    ("--use-tiss --tis-clip 3", 2, "did you mean 'use_tis'?"),
    ("a.b=1 a.b.c=2 use_tis=true", 2, "a.b.c: b is a value already")])
def test_what_is_given_is_read_or_a_sentence_says_why_not(text, code, words, tmp_path, capsys):
    (tmp_path / "given.conf").write_text(text)
    assert commands.main(["translate", str(tmp_path / "given.conf")]) == code
    said = capsys.readouterr().err
    assert words in said and all(line.startswith(("*", "translate: ")) for line in
                                 said.splitlines())


def test_each_key_has_a_sentence_of_what_it_means_here(capsys):
    for table in READ.values():
        assert all(phrase and "\n" not in phrase for phrase in table.values())
    assert commands.main(["translate", "--use-tis", "--tis-clip", "3"]) == 0
    assert capsys.readouterr().out.startswith("# use_tis: rollout_is: token\n# tis_clip: C: ")


def test_an_output_that_cannot_be_written_is_a_sentence(capsys, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("three_policies.interop.translate.in_own_keys", full)
    monkeypatch.setattr("os.dup2", lambda *ends: None)
    assert commands.main(["translate", "geo_rs"]) == 2
    assert capsys.readouterr().err == (
        "translate: the output cannot be written: No space left on device\n")


def test_without_a_key_trls_own_default_is_named(capsys):
    assert commands.main(["translate", "--to", "trl", "decoupled_geo_rs "]) == 1
    assert "no key of TRL 1.16 is written, so TRL's default stands: " in capsys.readouterr().out
