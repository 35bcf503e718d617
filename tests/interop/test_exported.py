"""verl 0.9.1 and TRL 1.16.0 take the keys that are written for them, and do what ours does."""

import shlex

import pytest
import torch

from three_policies import __main__ as commands
from three_policies.correction import correct
from three_policies.interop.export import to_dialect
from three_policies.oracle import f64
from three_policies.presets import PRESETS
from three_policies.presets import RolloutCorrectionConfig as Config

DECOUPLED = [name for name in PRESETS if name.startswith("decoupled")]


def batch(seed):
    """Return log π_old, log μ and a mask, of sequences that are ever farther apart."""
    generator = torch.Generator().manual_seed(seed)
    rollout, noise = torch.randn(2, 40, 6, generator=generator, dtype=torch.float64)
    mask = f64([[1] * 6] * 30 + [[1, 1, 0, 0, 0, 0]] * 10)
    return rollout + noise * torch.logspace(-4, 0, 40, dtype=torch.float64)[:, None], rollout, mask


@pytest.mark.usefixtures("verl_required")
@pytest.mark.parametrize("config", [
    *(PRESETS[name]() for name in DECOUPLED), Config("sequence", (None, 2.0)),
    Config("token", float("inf"), True, {"token_k1": (None, 1.5), "seq_sum_k1": (0.2, None)})])
def test_verl_does_what_the_configuration_does(config):
    """eq:correction: verl's driver, with the keys written for it, has our weights and our mask."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    export, rejected = to_dialect(config, "verl"), 0
    assert not export.left_out
    block = export.block["algorithm"]["rollout_correction"]
    for seed in range(5):
        old, rollout, mask = batch(seed)
        theirs, kept, _ = compute_rollout_correction_and_rejection_mask(old, rollout, mask, **block)
        weights, ours, _ = correct(old, rollout, mask, config)
        assert torch.equal(kept, ours)
        rejected += int((kept != mask).sum())
        if weights is not None:
            torch.testing.assert_close(theirs.batch["rollout_is_weights"], weights)
    assert bool(config.rollout_rs) == bool(rejected)


@pytest.mark.usefixtures("verl_required")
@pytest.mark.parametrize("preset", [*DECOUPLED, "bypass_ppo_clip", "bypass_pg_token_icepop",
                                    "bypass_pg_geo_rs", "seq_mis"])
def test_hydra_composes_verls_configuration_from_the_lines(preset, capsys):
    from hydra import compose, initialize_config_module
    assert commands.main(["translate", "--to", "verl", preset]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].split("\n", 1)[1]
    with initialize_config_module("verl.trainer.config", version_base=None):
        found = compose("ppo_trainer", overrides=shlex.split(lines.replace("\\\n", "")))
    for key, value in to_dialect(PRESETS[preset](), "verl").keys.items():
        whole = found
        for name in key.split("."):
            whole = whole[name]
        assert whole == (found.algorithm.rollout_correction if str(value)[0] == "$" else value)


@pytest.mark.usefixtures("trl_required")
@pytest.mark.parametrize("preset", ["decoupled_token_is", "seq_mis", "decoupled_token_icepop",
                                    "disabled"])
def test_trl_takes_the_fields(preset, tmp_path):
    import trl
    keys = to_dialect(PRESETS[preset](), "trl").keys
    args = trl.GRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False,
                          **keys)
    assert {name: getattr(args, name) for name in keys} == keys
