"""interop/dialects.py reads configurations as others print them, and finds contradictions."""

import math
import re
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from three_policies.correction import correct
from three_policies.interop.dialects import from_dialect, kl_kind
from three_policies.kl import kl_estimate
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA
from three_policies.tests.support.examples import STEADY


# --------------------------------------------------------------------------- verl, SkyRL and others

VETO = {"seq_max_k1": (1e-4, None)}


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("block, expected", [
    ({}, Config()),
    ({"preset": "seq_mis"}, Config.seq_mis()),
    ({"preset": "decoupled_seq_is", "rollout_is_threshold": 5}, Config("sequence", 5.0)),
    ({"preset": None, "score_centering": True, "bypass_mode": True, "loss_type": "reinforce"},
     Config(score_centering=True, bypass_mode=True, loss_type="reinforce")),
    ({"rollout_is": "geometric", "rollout_rs": {"seq_max_k1": [1e-4, None]}},
     Config("geometric", rollout_rs={"seq_max_k1": (1e-4, None)})),
    ({"tis_imp_ratio_cap": 2.0}, Config("token", 2.0)),
    ({"tis_imp_ratio_cap": -1}, Config()),
    ({"tis_imp_ratio_cap": 0}, Config()),
    ({"tis_imp_ratio_cap": None}, Config()),
    ({"rollout_rs": "token_k2, token_k3", "rollout_rs_threshold": 0.25},
     Config(rollout_rs={"token_k2": 0.25, "token_k3": 0.25})),
    ({"use_tis": True, "tis_imp_ratio_cap": 3.0}, Config("token", 3.0)),
    ({"use_tis": False, "tis_imp_ratio_cap": -1.0}, Config()),
    ({"rollout_is": True, "rollout_is_level": "sequence", "rollout_is_mode": "mask",
      "rollout_is_threshold": 2.0},                                     # PR 3984's guide, example 2
     Config("sequence", 2.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)} | VETO)),
    ({"algorithm": {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_level": "token",
                    "rollout_is_mode": "truncate"},                     # its quick start
      "actor_rollout_ref": {"rollout": {"calculate_log_probs": True}}},
     Config("token", 2.0, rollout_rs=VETO)),
    ({"rollout_is": True, "rollout_is_threshold": 5.0, "rollout_is_threshold_lower": 0.8,
      "rollout_is_level": "token", "rollout_is_mode": "clip"},          # its example 5
     Config("token", 5.0, rollout_rs={"token_k1": (0.8, 5.0)} | VETO)),
    ({"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_veto_threshold": None},
     Config("token", 2.0)),
    ({"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_veto_threshold": 1e-6},
     Config("token", 2.0, rollout_rs={"seq_max_k1": (1e-6, None)})),
    ({"rollout_is": False, "rollout_is_level": "token", "rollout_is_threshold": 2.0},
     Config("token", 2.0, rollout_rs=VETO, metrics_only=True)),
    ({"rollout_is_level": "token", "rollout_is_threshold": None, "rollout_is_veto_threshold": 1e-4},
     Config()),
    ({"rollout_is_level": "token", "rollout_is_mode": "clip", "rollout_is_threshold": 2.0,
      "rollout_is_veto_threshold": "1e-4"},                             # zero outside both
     Config("token", 2.0, rollout_rs={"token_k1": (0.5, 2.0)} | VETO)),
    ({"rollout_is_mode": "mask", "rollout_is_level": "geometric", "rollout_is_threshold": 1.25},
     Config("geometric", 1.25, rollout_rs={"seq_mean_k1": (0.8, 1.25)} | VETO)),
    ({"algorithm": {"rollout_is_level": "token", "rollout_is_threshold": 2.0}},
     Config("token", 2.0, rollout_rs=VETO, metrics_only=True)),         # rollout_is: false
    ({"algorithm": {"rollout_is_level": "token", "rollout_is_threshold": 2.0, "rollout_is": True}},
     Config("token", 2.0, rollout_rs=VETO)),
    ({"rollout_rs": "token"}, Config(rollout_rs={"token_k1": (0.5, 2.0)})),            # PR 3984
    ({"rollout_is": "token", "rollout_is_threshold": 4.0, "rollout_rs": "sequence"},
     Config("token", 4.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)})),  # 2.0, whatever the weights' is
    ({"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_rs": "geometric",
      "rollout_rs_threshold_lower": 0.9},
     Config("token", 5.0, rollout_rs={"seq_mean_k1": (0.9, 2.0)})),
    ({"_target_": "verl.trainer.config.algorithm.RolloutCorrectionConfig", "rollout_is": "token"},
     Config("token", 2.0)),
    ({"rollout_is": "token", "rollout_is_threshold": None}, Config()),
    ({"rollout_is": "token", "rollout_rs": None, "rollout_rs_threshold": None},
     Config("token", 2.0)),
    ({"behav_imp_weight_cap": 2.0}, Config("token", 2.0)),
    ({"imp_ratio_cap": 3}, Config("token", 3.0)),
    ({"imp_ratio_cap": -1}, Config()),
    ({"algorithm": {"rollout_correction": {"rollout_is": None, "rollout_rs": "geometric",
                                           "rollout_rs_threshold": 1.25,
                                           "rollout_token_veto_threshold": 1e-4}},
      "actor_rollout_ref": {"rollout": {"calculate_log_probs": True}}},
     Config(rollout_rs={"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)})),
    ({"rollout_is": "token", "bypass_old_logprob_for_rollout": True,
      "use_pure_rollout_correction": True},
     Config("token", 2.0, bypass_mode=True, loss_type="reinforce")),
    ({"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0",
                             "bypass_mode": True}},
     Config("token", (0.5, 5.0), bypass_mode=True)),
    ({"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,0.01"},
     Config(rollout_rs={"token_k1": (0.5, 2.0), "seq_mean_k3": 0.01})),
    ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.25},
     Config(rollout_rs={"seq_mean_k1": (0.8, 1.25)})),
    ({"off_policy_correction": {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric"}},
     Config("sequence", 5.0, rollout_rs={"seq_mean_k1": (0.99, 1.01)})),
    ({"tis_ratio_type": "token", "sequence_mask_metric": "product"},
     Config("token", 2.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)})),
    ({"rollout_is": "token", "rollout_is_threshold": "1_4", "rollout_is_batch_normalize": True},
     Config("token", (1.0, 4.0), True)),
    ({"rollout_is_level": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True,
      "rollout_is_veto_threshold": None}, Config("token", 2.0, True)),
    ({"outlier_token_is_threshold_low": 1e-4}, Config(rollout_rs=VETO)),
    ({"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100,
      "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
     Config(rollout_rs={"seq_max_k1": (1e-4, 100.0), "token_k1": (0.5, 2.0)})),
    ({"outlier_token_is_threshold_low": 0.0, "outlier_token_is_threshold_high": 100,
      "token_mask_is_threshold_low": 0, "token_mask_is_threshold_high": 2.0,
      "sequence_mask_metric": "product", "product_mask_low": 0.0},        # an open end
     Config(rollout_rs={"seq_max_k1": (None, 100.0), "token_k1": (None, 2.0),
                        "seq_sum_k1": (None, 2.0)})),
])
@pytest.mark.filterwarnings("ignore:token_mask_is_threshold_low")         # which has its own test
def test_dialects_as_they_stand_in_their_documents(block, expected):
    assert from_dialect(block) == expected


VERLS_DEFAULTS = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None,
                  "rollout_rs_threshold": None, "rollout_is_batch_normalize": False,
                  "bypass_mode": False, "loss_type": "ppo_clip"}


@pytest.mark.parametrize("own, expected", [
    ({"rollout_rs": {"token_k1": [0.5, 2.0]}}, Config(rollout_rs={"token_k1": (0.5, 2.0)})),
    ({"rollout_is": "token", "rollout_is_threshold": [0.5, 5.0]}, Config("token", (0.5, 5.0)))])
def test_our_words_may_stand_in_verls_block(own, expected):
    """verl's Hydra block has all of its own keys, some of them null, and lists of OmegaConf."""
    lists = pytest.importorskip("omegaconf").OmegaConf.create
    block = {"algorithm": {"rollout_correction": VERLS_DEFAULTS | own}}
    assert from_dialect(block) == from_dialect(lists(block)) == expected
    block["algorithm"]["rollout_correction"]["rollout_rs_threshold"] = 2.0
    with pytest.raises(ValueError, match="rollout_rs_threshold.*belongs to another dialect"):
        from_dialect(block)


def test_an_open_end_of_verls_is_one():
    with pytest.warns(UserWarning, match=re.escape("which on ρ is [0, 2]")):
        assert from_dialect({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_inf"}) == (
            Config(rollout_rs={"token_k1": (None, 2.0)}))


def test_verls_bounds_on_one_over_rho_are_inverted_and_it_is_said():
    with pytest.warns(UserWarning, match=r"1/ρ.*\[0.714286, 1.66667\]"):
        config = from_dialect({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"})
    assert config.rollout_rs["token_k1"] == pytest.approx((1 / 1.4, 1 / 0.6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a symmetric pair is the same on both sides
        from_dialect({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"})


@pytest.mark.parametrize("block, words", [
    ({"presets": "seq_is"}, "presets"), ({"preset": "seq_iss"}, "preset.*did you mean 'seq_is"),
    ({"rollout_is_threshhold": 2.0}, "rollout_is_threshhold.*did you mean 'rollout_is_threshold'"),
    ({"rollout_rs": "token_k1"}, "rollout_rs_threshold is missing"),
    ({"rollout_rs": "token", "rollout_rs_threshold": None},
     "rollout_rs is 'token', but rollout_rs_threshold is null"),
    ({"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_rs": "sequence",
      "rollout_rs_threshold": None},
     "rollout_rs_threshold is null: it must be a bound, such as 2.0"),
    ({"rollout_rs": "token_k1", "rollout_rs_threshold": None}, "rollout_rs_threshold is null"),
    ({"rollout_is_threshold": 2.0, "rollout_is_veto_threshold": 0},
     "rollout_is_veto_threshold must be a positive number"),
    ({"rollout_is_mode": "mask", "rollout_is_threshold": 0.5, "rollout_is_threshold_lower": 0.8},
     "rollout_is_threshold_lower must have lo ≤ hi"),
    ({"rollout_rs": "token_k9", "rollout_rs_threshold": 1}, "rollout_rs.*token_k9"),
    ({"rollout_rs": "token_k2,token_k3,seq_sum_k2", "rollout_rs_threshold": "1,2"},
     "rollout_rs_threshold needs one bound or 3"),
    ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "rollout_rs_threshold"),
    ({"rollout_is": "token", "loss_type": "reinforce"}, "loss_type"),
    ({"rollout_is": "token", "use_policy_gradient": True}, "use_policy_gradient needs bypass_mode"),
    ({"tis_imp_ratio_cap": 2.0, "calculate_log_probs": False}, "calculate_log_probs is false"),
    ({"bypass_mode": True, "calculate_log_probs": False}, "calculate_log_probs is false"),
    ({"score_centering": True}, "score_centering needs loss_type reinforce"),
    ({"rollout_rs": "token_k2,token_k2", "rollout_rs_threshold": "1,2"}, "needs one bound or 1"),
    ({"tis_imp_ratio_cap": False}, "tis_imp_ratio_cap must be a positive number, not False"),
    ({"tis_imp_ratio_cap": 2.0, "rollout_is": "token"}, "rollout_is.*another dialect"),
    ({"imp_ratio_cap": 2.0, "behav_imp_weight_cap": 2.0},
     "imp_ratio_cap and behav_imp_weight_cap are one setting"),
    ({"use_tis": True}, "tis_imp_ratio_cap"), ({"tis_ratio_type": "geo"}, "tis_ratio_type"),
    ({"sequence_mask_metric": "mean"}, "sequence_mask_metric"),
    ({"token_mask_is_threshold_low": 0.5}, "token_mask_is_threshold_high"),
    ({"rollout_correction": 3}, "mapping"), ([], "mapping"), ({3: 4}, "3"),
    ({"rollout_is": "token", "algorithm": {"rollout_is": "token"}}, "rollout_is.*twice"),
])
def test_contradictions_are_one_sentence_that_names_the_key(block, words):
    with pytest.raises(ValueError, match=words) as error:
        from_dialect(block)
    assert "\n" not in str(error.value)


KEYS = st.sampled_from([
    "preset", "rollout_is", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold",
    "rollout_is_threshold_lower", "rollout_rs", "rollout_rs_threshold",
    "rollout_rs_threshold_lower", "rollout_token_veto_threshold", "rollout_is_veto_threshold",
    "rollout_is_batch_normalize", "bypass_mode", "loss_type", "use_policy_gradient",
    "tis_imp_ratio_cap", "use_tis", "tis_ratio_type", "sequence_mask_metric", "geo_mask_low",
    "outlier_token_is_threshold_low", "rollout_correction", "algorithm", "calculate_log_probs",
    "nonsense", "loss", "type", "eps", "ratio_low", "dppo_mask_high", "kl_tau", "score_centering"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["token", "sequence", "geometric", "mask", "truncate", "product",
                       "token_k1,seq_mean_k3", "0.5_2.0,0.01", "0.5_2.0", "seq_is", "reinforce",
                       "ipo", "icepop", 2.0, 1e-4, "1e400", "1_2_3", "nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        KEYS | st.sampled_from([*CRITERIA]), inner, max_size=3), max_leaves=4)


@settings(STEADY, max_examples=1500)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_mapping_is_a_valid_configuration_or_a_valueerror(block):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = from_dialect(block)
        except ValueError as error:
            said, names = str(error), [*_keys(block), "correction"]
            assert "\n" not in said.rstrip() and any(str(name) in said for name in names), said
            return
    assert isinstance(config, Config) and replace(config) == config      # it survives validation
    x = torch.zeros(1, 2)
    correct(x, x, x + 1, config, x)


def _keys(block):
    for key, value in block.items():
        yield key
        if isinstance(value, dict):
            yield from _keys(value)


# ------------------------------------------------- OpenRLHF, slime, NeMo-RL, and who is only named

@pytest.mark.parametrize("block, expected", [
    ({"is_correction_level": "off"}, Config()), ({"is_correction_level": False}, Config()),
    ({"is_correction_level": "token"}, Config("token", (0.5, 5.0))),
    ({"algo": {"advantage": {"is_correction_level": "token", "is_correction_mode": "clip",
                             "is_correction_threshold": [0, 2]}}}, Config("token", 2.0)),
    ({"is_correction_level": "seq", "is_correction_threshold": [0.999, 1.002]},
     Config("token", math.inf, rollout_rs={"seq_mean_k1": (0.999, 1.002)})),
    ({"is_correction_level": "seq", "is_correction_gating": "binary_kl",
      "is_correction_threshold": 5e-3},                                 # FlashREINFORCE
     Config("token", math.inf, rollout_rs={"seq_mean_binary_kl": 5e-3})),
    ({"is_correction_level": "token", "is_correction_gating": "tv", "is_correction_threshold": .2},
     Config("token", math.inf, rollout_rs={"token_tv": 0.2})),
    ({"is_correction_level": "token", "actor": {"policy_loss_type": "gspo"}},
     Config(bypass_mode=True, loss_type="gspo")),
    ({"is_correction_enable": True, "is_correction_type": "seq-mask-tis",
      "is_correction_threshold": [0.999, 1.002]},
     Config("token", math.inf, rollout_rs={"seq_mean_k1": (0.999, 1.002)})),
    ({"is_correction_enable": True, "is_correction_threshold": [0.0, 2.0]}, Config("token", 2.0)),
    ({"use_tis": True, "tis_clip_low": 0}, Config("token", 2.0)),
    ({"use_tis": True, "tis_clip": 5, "tis_clip_low": 0.5, "custom_tis_function_path":
      "slime.backends.megatron_utils.loss.icepop_function"}, Config("token", (0.5, 5.0))),
    ({"slime": {"use_rollout_logprobs": True, "use_opsm": True, "advantage_estimator": "gspo"}},
     Config(rollout_rs={"opsm": 1e-4}, bypass_mode=True, loss_type="gspo")),
    ({"loss_fn": {"use_importance_sampling_correction": True, "ratio_clip_min": 0.2,
                  "truncated_importance_sampling_ratio": None}}, Config("token", math.inf)),
    ({"loss_fn": {"use_importance_sampling_correction": True,
                  "truncated_importance_sampling_type": "seq-mask-tis",
                  "truncated_importance_sampling_ratio": 1.002,
                  "truncated_importance_sampling_ratio_min": 0.999}},
     Config("token", math.inf, rollout_rs={"seq_mean_k1": (0.999, 1.002)})),
    ({"use_importance_sampling_correction": True, "sequence_level_importance_ratios": True,
      "truncated_importance_sampling_ratio": 5, "truncated_importance_sampling_type": "tis",
      "token_level_loss": False}, Config("sequence", 5.0, loss_type="gspo")),
    ({"vllm_importance_sampling_cap": 2.0}, Config("sequence", (None, 2.0))),
])
def test_openrlhf_slime_and_nemo_rl_are_read(block, expected):
    assert from_dialect(block) == expected


@pytest.mark.parametrize("block, words", [
    ({"is_correction_level": "seq", "is_correction_mode": "clip"}, "clip requires"),
    ({"is_correction_level": "token", "is_correction_mode": "clip"}, "raises small ratios"),
    ({"is_correction_level": "seq", "is_correction_gating": "tv"}, "must be one upper bound"),
    ({"use_tis": True, "tis_clip_low": 0.5}, "tis_clip_low must begin at 0"),
    ({"use_opsm": True}, "use_opsm needs use_rollout_logprobs"),
    ({"use_tis": True, "use_rollout_logprobs": True}, "cannot both be true"),
    ({"use_tis": True, "custom_tis_function_path": "mine.f"}, "a function of your own"),
    ({"loss_fn": {"disable_ppo_ratio": True}}, "disable_ppo_ratio must be false"),
    ({"loss_fn": {"truncated_importance_sampling_ratio": 2}}, "needs use_importance_sampling_cor"),
    ({"use_vllm": True, "off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold must be nul"),
    ({"loss_type": "dapo"}, "is TRL's: put use_vllm: true beside it"),
    ({"behave_imp_weight_cap": 5.0}, "a block of AReaL.*rollout_is_threshold"),
    ({"actor": {"rejection_sampling": {"metric": "ratio"}}}, "a block of AReaL"),
    ({"rollout_importance_sampling_mode": "token_truncate"}, "ms-swift.*rollout_is: token"),
    ({"truncated_importance_sampling_ratio_cap": 2.0}, "open-instruct.*0 is off"),
    ({"rollout_is": {"rollout_is_level": "token"}}, "xtuner"),
    ({"tis_mode": "token", "tis_cap": 2.0}, "rllm.*tis_cap: rollout_is_threshold"),
    ({"tis_level": "token", "rs_level": "token"}, "slime's train_infer_mismatch_helper")])
def test_what_cannot_be_read_is_named(block, words):
    with pytest.raises(ValueError, match=words) as error:
        from_dialect(block)
    assert "\n" not in str(error.value)


def test_openrlhfs_binary_kl_of_tokens_has_one_direction():
    with pytest.warns(UserWarning, match="the larger of both directions"):
        assert from_dialect({"is_correction_level": "token", "is_correction_gating": "binary_kl",
                             "is_correction_threshold": [0, 5e-3]}) == Config(
            "token", math.inf, rollout_rs={"token_binary_kl": 5e-3})


# ----------------------------------------------------------------------------- prime-rl's own words

IPO = dict(bypass_mode=True, loss_type="reinforce")


@pytest.mark.parametrize("block, expected", [
    ({"type": "ipo"}, Config("token", 1e4, rollout_rs={"token_tv": 0.3}, **IPO)),
    ({"trainer": {"loss": {"type": "ipo", "eps": 0.1, "adv_tau": 1.0, "kl_tau": 0.0}}},
     Config("token", 1e4, rollout_rs={"token_tv": 0.1}, **IPO)),
    ({"loss": {"eps": 0.2, "max_importance_ratio": 100, "score_centering": True}},
     Config("token", 100.0, rollout_rs={"token_tv": 0.2}, **IPO, score_centering=True)),
    ({"loss": {"max_importance_ratio": 1}},
     Config("token", 1.0, rollout_rs={"token_tv": 0.3}, **IPO)),
    ({"loss": {"type": "ipo", "ipo_threshold": 0.1}},                   # a release without a cap
     Config("token", math.inf, rollout_rs={"token_tv": 0.1}, **IPO)),
    ({"loss": {"type": "icepop"}}, Config("token", (0.2, 5.0), **IPO)),
    ({"loss": {"type": "icepop", "ratio_low": 0.5, "ratio_high": 2.0}},
     Config("token", (0.5, 2.0), **IPO)),
    ({"loss": {"type": "default"}},
     Config("token", math.inf, rollout_rs={"token_tv_outward": 0.2}, **IPO)),
    ({"loss": {"type": "default", "dppo_mask_low": 0.1, "dppo_mask_high": 0.1}},
     Config("token", math.inf, rollout_rs={"token_tv_outward": 0.1}, **IPO))])
def test_prime_rls_block_is_read(block, expected):
    assert from_dialect(block) == expected


@pytest.mark.parametrize("block", [{"loss": {}}, {"trainer": {"loss": None}},
                                   {"preset": None, "loss": {}},
                                   {"trainer": {"loss": {"kl_tau": 0.0}}}])
def test_prime_rls_section_has_its_default_where_it_says_nothing(block):
    """IPO is on there; as a block of verl's, which no key contradicts, it was no correction."""
    assert from_dialect(block) == from_dialect({"type": "ipo"})
    centered = {"loss": {"score_centering": True}}
    assert from_dialect(centered) == replace(from_dialect({"type": "ipo"}), score_centering=True)
    with pytest.raises(ValueError, match="geo_mask_low.*another dialect"):
        from_dialect({"loss": {"geo_mask_low": 0.1}})


@pytest.mark.parametrize("block, said", [
    (dict(tis_ratio_type="sequence"), True), (dict(tis_ratio_type="token"), False),
    (dict(sequence_mask_metric="product"), True), ({}, False)])
def test_skyrls_token_mask_beside_a_sequences_ratio_is_said_to_differ(block, said):
    """SkyRL takes the ratio of the tokens that this mask left."""
    mask = dict(token_mask_is_threshold_low=0.5, token_mask_is_threshold_high=2.0)
    with pytest.warns(UserWarning, match="what its mask left") if said else no_warning():
        from_dialect(block | mask)


@pytest.mark.parametrize("block, said", [
    ({"rollout_rs": "geometric"}, True), ({"rollout_rs": "geometric", "bypass_mode": False}, False),
    ({"rollout_rs": "geometric", "use_policy_gradient": True}, False),
    ({"rollout_rs": "geometric", "loss_type": "ppo_clip"}, False),              # 0.7.0
    ({"rollout_rs": "seq_mean_k3"}, False)])
def test_verl_0_6_1_rejects_nothing_in_bypass_mode_and_it_is_said(block, said):
    with pytest.warns(UserWarning, match="rejects nothing") if said else no_warning():
        found = from_dialect({"bypass_mode": True, "rollout_rs_threshold": 1.001} | block)
    assert found.rollout_rs


def test_a_switch_that_is_null_is_off_and_a_bound_of_0_is_open_as_in_verl():
    off = {"rollout_is": "token", "bypass_mode": None, "rollout_is_batch_normalize": None,
           "use_policy_gradient": None}
    assert from_dialect(off) == Config("token")
    assert from_dialect({"rollout_rs": "token", "rollout_rs_threshold": 2.0,
                         "rollout_rs_threshold_lower": 0.0}).rollout_rs == {"token_k1": (None, 2.0)}
    with pytest.raises(ValueError, match="'inf' bounds nothing: leave that criterion out"):
        from_dialect({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "inf"})


def test_a_verl_key_beside_the_default_preset_says_how_to_switch_it_off():
    with pytest.raises(ValueError, match="'tis_ratio_type' here.*correction.preset=null"):
        from_dialect({"preset": "decoupled_token_is", "tis_ratio_type": "token"})
    with pytest.raises(ValueError, match="section 'loss' here.*correction.preset=null"):
        from_dialect({"preset": "decoupled_token_is", "loss": {}})


@pytest.mark.parametrize("block, words", [
    ({"type": "ippo"}, "type cannot be 'ippo'; did you mean 'ipo'?"),
    ({"type": "ipo", "kl_tau": 1e-3}, "kl_tau must be 0"),
    ({"type": "ipo", "adv_tau": 0.5}, "adv_tau must be 1"),
    ({"type": "ipo", "ratio_low": 0.5}, "ratio_low is no setting of prime-rl's loss type ipo"),
    ({"type": "icepop", "eps": 0.5}, "eps is no setting of prime-rl's loss type icepop"),
    ({"type": "default", "dppo_mask_low": 0.1}, "dppo_mask_low and dppo_mask_high must be equal"),
    ({"eps": 0.0}, "eps must be a positive number"),
    ({"eps": 0.1, "ipo_threshold": 0.1}, "eps and ipo_threshold are one setting: give one of them"),
    ({"max_importance_ratio": math.inf},
     "max_importance_ratio must be a finite number of at least 1, not inf"),
    ({"max_importance_ratio": 0.5},
     "max_importance_ratio must be a finite number of at least 1, not 0.5"),
    ({"max_importance_ratio": None}, "max_importance_ratio must be a positive number, not None"),
    ({"type": "default", "max_importance_ratio": 2.0},
     "max_importance_ratio is no setting of prime-rl's loss type default"),
    ({"type": "ipo", "rollout_is": "token"}, "another dialect")])
def test_what_prime_rl_means_otherwise_is_one_sentence(block, words):
    with pytest.raises(ValueError) as error:
        from_dialect({"loss": block})
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("block, words", [
    ({"outlier_token_is_threshold_high": -1}, "outlier_token_is_threshold_high must be"),
    ({"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": "x"},
     "token_mask_is_threshold_high must be"),
    ({"sequence_mask_metric": "geometric", "geo_mask_high": -1}, "geo_mask_high must be"),
    ({"type": "icepop", "ratio_high": "x"}, "ratio_high must be"),
    ({"algorithm": {"rollout_correction": 2}}, "rollout_correction must be a mapping"),
    ({"off_policy_correction": True}, "off_policy_correction must be a mapping"),
    ({"type": "custom", "import_path": "x"},
     "type cannot be 'custom'; allowed: ipo, icepop, default")])
def test_the_key_that_is_wrong_is_the_one_that_is_named(block, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        from_dialect(block)


def test_skyrls_lower_end_of_0_alone_rejects_nothing():
    assert from_dialect({"outlier_token_is_threshold_low": 0.0}) == Config()
    with pytest.raises(ValueError, match="outlier_token_is_threshold_low .*not False"):
        from_dialect({"outlier_token_is_threshold_low": False})


# --------------------------------------------------------------------- names of the KL's estimators

@pytest.mark.parametrize("verls, ours", [
    ("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")])
def test_verls_names_of_the_estimators(verls, ours):
    one = torch.zeros(1, 1)
    assert kl_kind(verls) == kl_kind(ours) == ours
    with pytest.raises(ValueError, match=f"not {verls!r}".replace("+", r"\+")):
        kl_estimate(one, one, verls)
    with pytest.raises(ValueError, match="'full': that takes the whole vocabulary"):
        kl_estimate(one, one, "full")
