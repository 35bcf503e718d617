"""verl's and SkyRL's documents are read as they are written, and a run says what it took them for.

Each test holds one statement of a document: a preset's bounds, an argument, "compute metrics only",
a metric's name. Where a document and the released code differ, interop/README.md has a row.
"""

import json
import math
import random
import warnings

import pytest
import torch
import yaml

from three_policies.checks import UserError
from three_policies.correction import correct
from three_policies.doctor import diagnose
from three_policies.interop import names
from three_policies.interop.dialects import from_dialect, own_keys
from three_policies.losses import LossConfig, policy_loss
from three_policies.metrics import merge, to_host
from three_policies.oracle import f64
from three_policies.presets import PRESETS
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.surrogates import LOSSES
from three_policies.tests.support.launching import ROOT
from three_policies.training.remarks import remarks
from three_policies.training.settings import correction_of, in_own_keys, load_config

RATIOS = f64([[3.0, 1.0, 1.0], [0.5, 0.6, 1.0], [1.0, 1.1, 0.9]]).log()   # products 3, 0.3, 0.99
ZERO, MASK = torch.zeros_like(RATIOS), torch.ones_like(RATIOS)


def metrics_of(config, ratios=RATIOS, named=lambda metrics: metrics):
    """Return the metrics of ρ = exp(ratios), without "rollout_corr/"."""
    found = named(to_host(correct(ratios, ZERO, MASK, config).metrics))
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


# --------------------------------------------------------------------------------------- presets

@pytest.mark.parametrize("threshold, products", [(5.0, [3.0, 0.3, 0.99]), (2.0, [0.0, 0.3, 0.99])])
def test_seq_mis_has_one_threshold_and_rejects_above_it_alone(threshold, products):
    """The weight times the mask is ρ(y)·1[ρ(y) ≤ C]: nothing is rejected for being small."""
    weights, mask, _ = correct(RATIOS, ZERO, MASK, Config.seq_mis(threshold))
    torch.testing.assert_close((weights * mask)[:, 0], f64(products))


@pytest.mark.parametrize("given, kept", [
    ({"rs_threshold": 4.0, "rs_threshold_lower": 0.5}, (0.5, 4.0)), ({}, (0.5, 2.0)),
    ({"rs_threshold": 4.0}, (0.25, 4.0)), ({"rs_threshold": (0.1, 9.0)}, (0.1, 9.0))])
def test_the_call_that_the_mathematical_document_prints_is_taken(given, kept):
    assert Config.seq_is_rs(**given).rollout_rs == {"seq_sum_k1": kept}
    assert Config.seq_is_rs(**given) == Config.decoupled_seq_is_rs(**given)


def test_ppo_is_bypass_measures_the_weights_that_its_source_names():
    """The source has rollout_is token there; PPO's own ratio is the weight, so none is applied."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Config.ppo_is_bypass(threshold=3.0)
    found = metrics_of(config)
    assert config.ratio_is_the_weight and correct(RATIOS, ZERO, MASK, config).weights is None
    assert found["rollout_is_raw_max"] == pytest.approx(3.0) and "rollout_is_mean" not in found
    loss, _ = policy_loss(RATIOS, None, ZERO, MASK, MASK, config)
    assert loss == policy_loss(RATIOS, None, ZERO, MASK, MASK, Config.bypass_ppo_clip())[0]


# ------------------------------------------------------------------------- measure and do not apply

@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_metrics_only_measures_the_weights_of_its_level_and_applies_none(level, mode):
    """verl 0.6.0's `rollout_is: false`: its documents recommend it as the first step."""
    block = {"rollout_is": False, "rollout_is_level": level, "rollout_is_mode": mode,
             "rollout_is_threshold": 1.4, "rollout_is_veto_threshold": 0.55}
    measured, applied = from_dialect(block), from_dialect(block | {"rollout_is": True})
    weights, mask, _ = correct(RATIOS, ZERO, MASK, measured)
    assert weights is None and mask is MASK and not measured.corrects and applied.corrects

    raw, both = metrics_of(measured), metrics_of(applied)
    for name, value in both.items():
        if name.startswith(("rollout_is_raw_", "rollout_rs_seq_max_k1_", "rollout_rs_token_k1_")):
            assert raw[name] == value, name
    assert both["rollout_is_raw_ratio_fraction_high"] > 0 and both["all_rejected"] == 0
    assert raw["rollout_rs_masked_fraction"] == 0 < both["rollout_rs_masked_fraction"]
    assert not {"rollout_is_mean", "rollout_is_masked_fraction"} & set(raw)

    theirs = metrics_of(measured, named=names.verl_06)
    for name in ("mean", "std", "max", "min", "eff_sample_size", "ratio_fraction_high",
                 "ratio_fraction_low", "seq_mean"):
        assert theirs[f"rollout_is_{name}"] == raw[f"rollout_is_raw_{name}"]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_metrics_only_leaves_the_loss_of_every_mode_as_it_is_without_a_correction(preset):
    config = PRESETS[preset]()
    only = Config(**{**config.__dict__, "metrics_only": True})
    plain = Config(bypass_mode=config.bypass_mode, loss_type=config.loss_type)
    given = RATIOS / 2, RATIOS, ZERO, f64([[1.0], [-1.0], [0.5]]).expand(3, 3), MASK
    assert policy_loss(*given, only)[0] == policy_loss(*given, plain)[0]
    measured = merge([correct(RATIOS, ZERO, MASK, only)])
    assert config.rollout_is is None or "rollout_corr/rollout_is_raw_std" in measured
    with pytest.raises(ValueError, match="one configuration"):
        merge([correct(RATIOS, ZERO, MASK, only), correct(RATIOS, ZERO, MASK, plain)]
              if config.rollout_is else [])


def test_what_metrics_only_cannot_go_with_is_one_sentence():
    with pytest.raises(ValueError, match="score_centering needs metrics_only false"):
        Config("token", bypass_mode=True, loss_type="reinforce", score_centering=True,
               metrics_only=True)
    with pytest.raises(ValueError, match="write null for no weights; to measure without"):
        from_dialect({"preset": "decoupled_token_is", "rollout_is": False})


def test_a_lower_bound_is_the_one_that_is_counted():
    """verl 0.6.0 counts what is below rollout_is_threshold_lower, which truncates nothing."""
    block = {"rollout_is": True, "rollout_is_level": "token", "rollout_is_threshold": 2.0,
             "rollout_is_threshold_lower": 0.55}
    assert metrics_of(from_dialect(block), named=names.verl_06)[
        "rollout_is_ratio_fraction_low"] == pytest.approx(1 / 9)
    del block["rollout_is_threshold_lower"]                                    # 1/2, which is met
    assert metrics_of(from_dialect(block | {"rollout_is_threshold": 1 / 0.51}))[
        "rollout_is_raw_ratio_fraction_low"] == pytest.approx(1 / 9)
    open_end = metrics_of(from_dialect(block | {"rollout_is_threshold_lower": 0}))
    assert open_end["rollout_is_raw_ratio_fraction_low"] == 0


def test_at_geometric_level_one_share_counts_tokens_and_the_other_responses():
    """verl's released figure counts tokens; the share of responses is rollout_is_seq_fraction_*."""
    mask = f64([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    found = to_host(correct(f64([[1.2] * 3, [1.0] * 3, [1.0] * 3]).log() * mask, ZERO, mask,
                            Config("geometric", 1.1)).metrics)
    assert found["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(3 / 6)
    assert found["rollout_corr/rollout_is_raw_seq_fraction_high"] == pytest.approx(1 / 3)


# The names that verl 0.6.0's document on rollout importance sampling prints.
OF_THE_DOCUMENT = """rollout_is_mean rollout_is_std rollout_is_min rollout_is_max
    rollout_is_eff_sample_size rollout_is_veto_fraction rollout_is_catastrophic_token_fraction
    rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low rollout_is_seq_mean
    rollout_is_seq_std rollout_is_seq_min rollout_is_seq_max rollout_is_seq_max_deviation
    rollout_is_seq_fraction_high rollout_is_seq_fraction_low rollout_is_masked_fraction
    rollout_is_seq_masked_fraction mismatch_training_ppl mismatch_rollout_ppl mismatch_ppl_ratio
    mismatch_training_log_ppl mismatch_rollout_log_ppl mismatch_log_ppl_diff
    mismatch_log_ppl_abs_diff mismatch_log_ppl_diff_max mismatch_log_ppl_diff_min mismatch_kl
    mismatch_k3_kl""".split()


@pytest.mark.parametrize("applied", [True, False])
def test_the_names_of_the_rollout_importance_sampling_document(applied):
    config = from_dialect({"rollout_is": applied, "rollout_is_level": "token",
                           "rollout_is_mode": "mask", "rollout_is_threshold": 2.0})
    ours = to_host(correct(RATIOS, ZERO, MASK, config).metrics)
    theirs = names.mismatch(ours)
    assert {f"mismatch/{name}" for name in OF_THE_DOCUMENT} <= set(theirs)
    assert theirs["mismatch/mismatch_k3_kl"] == ours["rollout_corr/k3_kl"]
    assert theirs["mismatch/rollout_is_max"] == ours["rollout_corr/rollout_is_raw_max"]
    assert theirs["mismatch/rollout_is_masked_fraction"] == pytest.approx(1 / 9)
    assert ours.items() <= theirs.items()


# ------------------------------------------------------------------------------ what is pasted

@pytest.mark.parametrize("block", [
    {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"}, {"rollout_is": "token"},
    {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,0.01"},
    {"tis_ratio_type": "sequence"}, {"type": "ipo"}, {"preset": "geo_rs"}, {},
    {"rollout_is": False, "rollout_is_level": "token", "rollout_is_threshold": 2.0}])
def test_a_block_is_shown_in_our_keys_which_are_read_as_the_same(block):
    config = from_dialect(block)
    assert from_dialect(own_keys(config)) == config


def test_a_run_says_what_a_block_was_taken_for(tmp_path):
    """The second example of verl's migration guide, as it is printed, corrects nothing."""
    file = tmp_path / "pasted.yaml"
    file.write_text("""correction:
  algorithm:
    rollout_is_threshold: 2.0
    rollout_is: false
    rollout_is_level: token
    rollout_is_mode: truncate
""")
    config = load_config([str(file)])
    assert in_own_keys(config) == ("{rollout_is: token, rollout_is_threshold: 2.0, bypass_mode: "
                                   "false, loss_type: ppo_clip, rollout_rs: {seq_max_k1: [0.0001, "
                                   "null]}, metrics_only: true}")
    assert ("correction: weights and criteria are measured, and none of them is applied"
            ) in remarks(config)
    nothing = load_config(["correction={rollout_is: null, rollout_is_threshold: 2.0}"])
    assert "correction: these keys correct nothing: they ask" in " ".join(remarks(nothing))
    assert not [x for x in remarks(load_config(["correction.preset=disabled"])) if "nothing" in x]


@pytest.mark.parametrize("given, expected", [
    (["correction.preset=null", "correction.rollout_rs=token"],
     Config(rollout_rs={"token_k1": (0.5, 2.0)})),
    (["correction.preset=null", "correction.rollout_rs=token_k1,seq_mean_k3",
      "correction.rollout_rs_threshold='0.5_2.0,0.01'"],
     Config(rollout_rs={"token_k1": (0.5, 2.0), "seq_mean_k3": 0.01})),
    (["+correction.preset=null", "++correction.rollout_is=sequence"], Config("sequence"))])
def test_verls_text_and_hydras_plus_are_read_on_the_command_line(given, expected):
    assert correction_of(load_config(given)) == expected


def test_an_override_of_hydras_is_answered_without_its_plus():
    with pytest.raises(UserError, match=r"^algorithm.rollout_correction.rollout_is is a setting of "
                       ".*: put its block under correction:"):
        load_config(["+algorithm.rollout_correction.rollout_is=token"])


@pytest.mark.parametrize("make, words", [
    (lambda: Config(rollout_rs="token", rollout_rs_threshold=2.0), "'rollout_rs_threshold'.*from_"),
    (lambda: Config(use_tis=True), "'use_tis'; it has rollout_is, .*from_dialect"),
    (lambda: Config(rollout_rs="token_k1"), "not 'token_k1' .from_dialect of interop/dialects")])
def test_verls_constructor_is_answered_with_the_function_that_reads_it(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize("block, said", [
    ({"rollout_is": "token", "rollout_is_threshold": 0.55}, "rollout_is_threshold=0.55 leaves out"),
    ({"tis_imp_ratio_cap": 0.55}, "rollout_is_threshold=0.55 leaves out ρ = 1.*in quotes"),
    ({"rollout_is": "token", "rollout_is_threshold": [2, 5]}, r"\[2.0, 5.0\] leaves out"),
    ({"rollout_rs": {"token_k1": [0.1, 0.9]}}, r"rollout_rs.token_k1=\[0.1, 0.9\] leaves out")])
def test_bounds_that_exclude_equal_policies_are_said(block, said):
    with pytest.warns(UserWarning, match=said):
        from_dialect(block)


@pytest.mark.parametrize("rejects", ["token", "token_k1"])
def test_a_pair_that_yaml_read_as_a_number_is_refused_with_the_reason(rejects):
    with pytest.raises(ValueError, match="rollout_rs_threshold 0.55 is below 1.*in quotes"):
        from_dialect({"rollout_rs": rejects, "rollout_rs_threshold": 0.55})


def test_skyrls_outlier_thresholds_alone_are_said_to_have_had_two_meanings():
    """Since SkyRL 0.3 they act alone; in SkyRL's pull request 849 they did not."""
    block = {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100}
    with pytest.warns(UserWarning, match="pull request 849"):
        assert from_dialect(block).rollout_rs == {"seq_max_k1": (1e-4, 100.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_dialect(block | {"tis_ratio_type": "token"})
        assert not from_dialect({"tis_ratio_type": "token"}).rollout_rs


# ----------------------------------------------------------------- one loss's number in another

@pytest.mark.parametrize("file", ["gsm8k", "gsm8k-24gb", "gsm8k-lora-24gb"])
def test_a_file_for_ppo_gives_no_other_loss_its_clip(file):
    """GSPO clips a geometric mean: with PPO's 0.28 it would not clip at all."""
    config = load_config([str(ROOT / "configs" / f"{file}.yaml"), "correction.loss_type=gspo"])
    how = LossConfig(config.loss.clip_low, config.loss.clip_high)
    assert how.numbers(LOSSES["gspo"]) == LOSSES["gspo"].own
    assert [x for x in remarks(config) if "take loss.aggregation=seq-mean-token-mean" in x]


@pytest.mark.parametrize("loss, number, said", [
    ("gspo", "clip_high=0.28", "suits ppo_clip"), ("ppo_clip", "clip_low=3e-4", "suits gspo"),
    ("gspo", "clip_high=1e-3", None), ("ppo_clip", "clip_high=0.28", None),
    ("cispo", "clip_high=5", None), ("gspo", "clip_low=0", None)])
def test_a_number_of_another_losss_size_is_said(loss, number, said):
    config = load_config([f"correction.loss_type={loss}", f"loss.{number}",
                          "loss.aggregation=seq-mean-token-mean"])
    found = [x for x in remarks(config) if "suits" in x]
    assert len(found) == (said is not None) and all(said in x for x in found)


@pytest.mark.parametrize("given, said", [
    (["loss.kl_kind=k3", "loss.kl_correction=none"], True), (["loss.kl_kind=k3"], False),
    (["loss.kl_kind=low_var_kl", "loss.kl_correction=none"], True),
    (["loss.kl_kind=abs"], True), (["loss.kl_kind=abs+"], False), (["loss.kl_kind=k3+"], False),
    (["loss.kl_kind=abs", "loss.kl_correction=none"], True)])
def test_a_kl_whose_gradient_is_another_is_said_with_its_distance(given, said):
    """The numbers are those of the table in chapter 13."""
    found = [x for x in remarks(load_config(["loss.kl_coef=0.1", *given])) if "chapter 13" in x]
    assert len(found) == said
    if found:
        kind = "abs" if "abs" in given[0] else "k3"
        row = next(line for line in (ROOT / "math/13-kl.md").read_text().splitlines()
                   if line.startswith(f"| `{kind}` | loss"))
        of_policy, off_policy = (row.split("|")[i].strip() for i in (5, 9))
        assert f" {of_policy} ‖∇KL‖" in found[0] and (kind == "abs" or off_policy in found[0])
        assert not math.isclose(float(of_policy), 0)


# ------------------------------------------------------------------------------ what goes together

def test_metrics_only_goes_beside_a_block_of_any_system():
    for block in ({"rollout_is": "token"}, {"tis_ratio_type": "sequence"}, {"type": "icepop"},
                  {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}, {}):
        only = from_dialect(block | {"metrics_only": True})
        assert only == Config(**{**from_dialect(block).__dict__, "metrics_only": True})


@pytest.mark.parametrize("seed", range(200))
def test_any_configuration_can_be_written_in_our_keys_and_read_again(seed):
    rng = random.Random(seed)
    pair = rng.choice([(0.5, 2.0), (None, 3.0), (0.1, None)])
    made = {"rollout_is": rng.choice([None, "token", "prefix", "sequence", "geometric"]),
            "rollout_is_threshold": rng.choice([2.0, 5.0, pair, math.inf]),
            "rollout_is_batch_normalize": rng.random() < 0.3,
            "rollout_rs": rng.choice([{}, {"token_k1": pair}, {"seq_mean_k3": 0.01}]),
            "bypass_mode": rng.random() < 0.5, "metrics_only": rng.random() < 0.3,
            "loss_type": rng.choice(["ppo_clip", "gspo", "cispo"]),
            "rollout_is_count_below": rng.choice([None, 0, 0.3])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = Config(**made)
        again = from_dialect(own_keys(config))
        shown = from_dialect(yaml.safe_load(in_own_keys(load_config(
            [f"correction={json.dumps(own_keys(config)).replace('Infinity', '.inf')}",
             "correction.preset=null"]))))
    assert config == again == shown
    assert config.rollout_is_count_below == again.rollout_is_count_below


@pytest.mark.parametrize("low", ["x", "", [], {}, False, -1, math.nan])
def test_a_lower_bound_that_is_no_number_is_refused(low):
    with pytest.raises(ValueError, match="rollout_is_count_below must be a positive number"):
        Config("token", rollout_is_count_below=low)
    assert Config("token", rollout_is_count_below="0.5").rollout_is_count_below == 0.5


def test_the_doctor_judges_what_is_only_measured_by_responses_too():
    """A long response alone has a large ρ(y): over tokens its weight would seem common."""
    mask = torch.zeros(400, 40)
    mask[:, :1] = mask[0] = 1
    mu = -torch.ones_like(mask)
    pi = mu + mask * (torch.arange(400) == 0)[:, None] * 15 / 40
    for only in (False, True):
        found = diagnose(correct(pi, mu, mask, Config("sequence", 1e6, metrics_only=only)).metrics)
        assert any("rollout_is_raw_seq_eff_sample_size is 0.0025" in x for x in found)
        assert any("set correction.metrics_only=false" in x for x in found) == only


@pytest.mark.parametrize("given, said", [
    (["correction.preset=disabled", "correction.metrics_only=true"], "measures nothing more"),
    (["correction.preset=ppo_is_bypass"], "the loss's own ratio to π_rollout is"),
    (["correction.rollout_is_batch_normalize=true", "correction.metrics_only=true"],
     "is applied|batch_normalize has no effect: correction.metrics_only is true"),
    (["loss.denominator=kept"], "loss.denominator has no effect: nothing is rejected"),
    (["correction.preset=seq_mis", "correction.rollout_is_threshold=5"], "still rejects above 2"),
    (["loss.kl_coef=1", "loss.kl_in=reward", "loss.kl_kind=k1+"], None),
    (["correction.loss_type=gspo", "loss.clip_low=1", "loss.clip_high=1e9",
      "loss.aggregation=seq-mean-token-mean"], "loss.clip_low=1 suits"),
    (["correction.preset=decoupled_geo_rs", "correction.metrics_only=true", "loss.kl_coef=1",
      "loss.kl_in=reward", "loss.kl_correction=token"], "none of them is applied")])
def test_a_remark_is_of_what_is_done(given, said):
    found = remarks(load_config(given))
    parts = said.split("|") if said else []
    assert len(found) == len(parts) and all(part in x for part, x in zip(parts, found)), found


@pytest.mark.parametrize("given, words", [
    (lambda: Config.decoupled_token_icepop((0.6, 2.0), threshold_lower=0.3), "threshold_lower out"),
    (lambda: Config.geo_rs([1.001]), "rs_threshold must be a pair"),
    (lambda: Config.seq_mis((0.5, 2.0)), "^threshold must be a positive number"),
    (lambda: from_dialect({"rollout_is": True, "rollout_is_mode": "mask",
                           "rollout_is_threshold": 0.5}), "rollout_is_threshold 0.5 is below 1"),
    (lambda: load_config(["~correction.preset"]), "write correction.preset=null")])
def test_what_cannot_be_meant_is_one_sentence(given, words):
    with pytest.raises((ValueError, UserError), match=words):
        given()


@pytest.mark.parametrize("given, expected", [
    (["correction.rollout_is=token", "correction.rollout_is_threshold='0.5_5.0'"],
     Config("token", (0.5, 5.0))),
    (["correction.rollout_is=false", "correction.rollout_is_threshold=2.0"],
     Config("token", 2.0, rollout_rs={"seq_max_k1": (1e-4, None)}, metrics_only=True)),
    (["correction.rollout_is=token", "correction.rollout_is_threshold=null"], Config())])
def test_a_preset_that_is_switched_off_leaves_verls_block(given, expected):
    assert correction_of(load_config(["correction.preset=null", *given])) == expected
