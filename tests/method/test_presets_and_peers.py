"""The presets of RolloutCorrectionConfig have verl's names and bounds, and take its arguments."""

import pytest

from three_policies.presets import HISTORICAL, PRESETS, RolloutCorrectionConfig as Config
from three_policies.tests.support.launching import ROOT


def test_presets_by_todays_and_historical_names():
    for name, make in PRESETS.items():
        config = make()
        assert config.bypass_mode == name.startswith(("bypass", "pure", "pg", "ppo"))
        assert (config.loss_type == "reinforce") == ("pg" in name or "pure" in name)
    assert set(HISTORICAL.values()) <= set(PRESETS)
    assert {*("token_is token_tis seq_is seq_is_rs seq_mis geo_mis ppo_is_bypass pure_is pg_is "
              "pure_rs").split()} <= set(PRESETS)
    assert PRESETS["geo_mis"]().rollout_rs == {"seq_mean_k1": (0.999, 1.001),
                                               "seq_max_k1": (1e-4, None)}
    assert PRESETS["pg_rs"]().rollout_rs == PRESETS["geo_rs"]().rollout_rs
    assert Config.decoupled_token_icepop().rollout_is_threshold == (0.5, 5.0)
    assert Config.decoupled_k3_rs_seq_tis() == Config(
        "sequence", 2.0, rollout_rs={"seq_mean_k3": 0.01})
    assert Config.bypass_pg_geo_rs_token_tis() == Config(
        "token", 2.0, False, {"seq_mean_k1": (0.999, 1.001)}, True, "reinforce")


def test_presets_have_the_documents_bounds():
    """Each number equals its second copy here: a default that slips changes training silently."""
    narrow, wide, icepop = {"seq_mean_k1": (0.999, 1.001)}, {"seq_sum_k1": (0.5, 2.0)}, (0.5, 5.0)
    k3, veto = {"seq_mean_k3": 0.01}, {"seq_max_k1": (1e-4, None)}
    expected = {
        "decoupled_token_is": ("token", 2.0, {}), "decoupled_seq_is": ("sequence", 2.0, {}),
        "decoupled_seq_is_rs": ("sequence", 2.0, wide),
        "decoupled_token_icepop": ("token", icepop, {}),
        "decoupled_geo_rs": (None, 2.0, narrow),
        "decoupled_geo_rs_seq_tis": ("sequence", 2.0, narrow),
        "decoupled_geo_rs_token_tis": ("token", 2.0, narrow), "decoupled_k3_rs": (None, 2.0, k3),
        "decoupled_k3_rs_seq_tis": ("sequence", 2.0, k3),
        "decoupled_k3_rs_token_tis": ("token", 2.0, k3),
        "bypass_ppo_clip": (None, 2.0, {}), "bypass_ppo_clip_geo_rs": (None, 2.0, narrow),
        "bypass_ppo_clip_k3_rs": (None, 2.0, k3), "bypass_pg_is": ("sequence", 2.0, {}),
        "bypass_pg_token_icepop": ("token", icepop, {}), "bypass_pg_geo_rs": (None, 2.0, narrow),
        "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, narrow),
        "bypass_pg_geo_rs_token_tis": ("token", 2.0, narrow), "disabled": (None, 2.0, {}),
        "geo_rs": (None, 2.0, narrow | veto), "pg_rs": (None, 2.0, narrow | veto),
        "seq_mis": ("sequence", 2.0, {"seq_sum_k1": (None, 2.0)}),
        "ppo_is_bypass": ("token", 2.0, {})}
    found = {name: make() for name, make in PRESETS.items() if name not in HISTORICAL}
    assert {name: (c.rollout_is, c.rollout_is_threshold, c.rollout_rs)
            for name, c in found.items()} == expected
    assert {name for name, c in found.items() if c.bypass_mode} == {
        name for name in expected if name.startswith("bypass") or name in (
            "pg_rs", "ppo_is_bypass")}
    assert [name for name, c in found.items() if c.metrics_only] == ["ppo_is_bypass"]


@pytest.mark.parametrize("made, expected", [
    (Config.token_is(threshold=3.0), Config("token", 3.0)),
    (Config.token_is(), Config.decoupled_token_is()),
    (Config.seq_is_rs(is_threshold=3.0, rs_threshold=2.0),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.5, 2.0)})),
    (Config.seq_is_rs(3.0, (0.25, 4.0)),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.25, 4.0)})),
    (Config.seq_is_rs(3.0, rs_threshold=4.0, rs_threshold_lower=0.5),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (0.5, 4.0)})),
    (Config.seq_mis(threshold=3.0),
     Config("sequence", 3.0, rollout_rs={"seq_sum_k1": (None, 3.0)})),
    (Config.geo_rs(rs_threshold=1.001, rs_threshold_lower=0.999, veto_threshold=1e-5),
     Config(rollout_rs={"seq_mean_k1": (0.999, 1.001), "seq_max_k1": (1e-5, None)})),
    (Config.geo_rs(veto_threshold=None), Config(rollout_rs={"seq_mean_k1": (0.999, 1.001)})),
    (Config.decoupled_geo_rs(1.25), Config(rollout_rs={"seq_mean_k1": (0.8, 1.25)})),
    (Config.decoupled_geo_rs(rs_threshold=(0.999, 1.002)),
     Config(rollout_rs={"seq_mean_k1": (0.999, 1.002)})),
    (Config.decoupled_geo_rs(1.25, veto_threshold=1e-4),
     Config(rollout_rs={"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)})),
    (Config.decoupled_k3_rs_seq_tis(3.0, 0.1),
     Config("sequence", 3.0, rollout_rs={"seq_mean_k3": 0.1})),
    (Config.decoupled_token_icepop(4.0), Config("token", (0.5, 4.0))),
    (Config.decoupled_token_icepop(4.0, 0.25), Config("token", (0.25, 4.0))),
    (Config.decoupled_token_icepop(threshold_lower=0.25), Config("token", (0.25, 5.0))),
    (Config.bypass_pg_token_icepop([0.1, 9]),
     Config("token", (0.1, 9.0), bypass_mode=True, loss_type="reinforce")),
    (Config.ppo_is_bypass(threshold=3.0),
     Config("token", 3.0, bypass_mode=True, metrics_only=True)),
    (Config.pure_is(threshold=3.0),
     Config("sequence", 3.0, bypass_mode=True, loss_type="reinforce")),
    (Config.pg_rs(rs_threshold=1.25, veto_threshold=1e-4), Config(
        None, 2.0, False, {"seq_mean_k1": (0.8, 1.25), "seq_max_k1": (1e-4, None)}, True,
        "reinforce")),
])
def test_presets_take_the_arguments_of_verls_documents(made, expected):
    """Today's names and the migration guide's are taken; a single bound u of ρ is [1/u, u]."""
    assert made == expected


@pytest.mark.parametrize("call, words", [
    (lambda: Config.decoupled_token_is(rs_threshold=2.0), "decoupled_token_is.*'rs_threshold'"),
    (lambda: Config.geo_rs(rs_treshold=2.0), "geo_rs.*'rs_treshold'"),
    (lambda: Config.decoupled_geo_rs(-1), "rs_threshold.*positive"),
    (lambda: Config.decoupled_geo_rs("0.999_1.002"),
     "rs_threshold.*positive number, not '0.999_1.002'"),
    (lambda: Config.bypass_pg_geo_rs((0.9, 1.1), 0.5), "leave rs_threshold_lower out"),
])
def test_a_presets_wrong_argument_is_one_sentence(call, words):
    """An unknown argument is Python's TypeError; only interop/dialects.py reads "lo_hi"."""
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_preset_is_a_def_and_an_older_name_the_same_method():
    """`grep` finds each preset, a type checker knows it, and their order is that of the tables."""
    for name, preset in PRESETS.items():
        method = getattr(Config, HISTORICAL.get(name, name))
        assert preset.__doc__ and preset.__func__ is method.__func__
        assert PRESETS[name]() == PRESETS[HISTORICAL.get(name, name)]()
    today = [name for name in PRESETS if name not in HISTORICAL]
    assert today[:3] == ["decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs"]
    assert set(HISTORICAL) == {"token_is", "token_tis", "seq_is", "seq_is_rs", "geo_mis", "pure_is",
                               "pg_is", "pure_rs"}


def test_each_preset_has_a_file_of_its_own():
    """Files of `configs/presets/` are of today's names, as the appendix of settings says."""
    files = {path.stem for path in (ROOT / "configs/presets").glob("*.yaml")}
    assert {name for name in PRESETS if name not in HISTORICAL} - {
        "geo_rs", "pg_rs", "seq_mis", "ppo_is_bypass"} == files
