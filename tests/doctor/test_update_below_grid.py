"""An update below the engine's grid is named, with the share of weights that are still the first.

The trainer is float32, its first weights are numbers of bfloat16, and the engine is the trainer
rounded to bfloat16. Each test prints how far its pair stands from the limits.
"""

import copy
import json

import pytest
import torch
import transformers

from three_policies.doctor.command import main
from three_policies.doctor.dumps import append, read
from three_policies.doctor.hypotheses import COARSE, Scorer
from three_policies.doctor.rescore import ARRIVED, Grid, rescore
from three_policies.doctor.rescore_rates import in_bfloat16, sample, score

PROMPTS = [[3 + i, 5, 7, 9 + i] for i in range(8) for _ in range(2)]


def first_model():
    """Return a model in float32 whose weights are numbers of bfloat16, of one size each matrix."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=60, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=1, pad_token_id=0,
        bos_token_id=2, initializer_range=0.05, tie_word_embeddings=False)
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.load_state_dict({k: w.bfloat16().float() for k, w in model.state_dict().items()})
    return model


def plain(z, *_):
    return z


def trained(first, step, steps=8):
    """Return the model after steps of sign descent towards its own samples: Adam's size, `step`."""
    torch.manual_seed(1)
    model, liked = copy.deepcopy(first), sample(first, PROMPTS, 16, plain)
    rows = torch.tensor([p + y + [0] * (16 - len(y)) for p, y in zip(PROMPTS, liked)])
    for _ in range(steps):
        model.zero_grad()
        log_p = model(rows).logits.log_softmax(-1)[:, 3:-1]
        (-log_p.gather(-1, rows[:, 4:, None]).mean()).backward()
        with torch.no_grad():
            for w in model.parameters():
                w -= step * w.grad.sign()
    return model.requires_grad_(False)


def pair(tmp_path, engine, trainer, *older):
    """Dump the engine's samples; return the command's arguments, and rounding over kernels."""
    torch.manual_seed(2)
    drawn = sample(engine, PROMPTS, 24, plain)
    mu, pi = (score(model, PROMPTS, drawn) for model in (engine, trainer))
    paths = [str(tmp_path / f"model-{k}") for k in range(1 + len(older))]
    for model, path in zip((trainer, *older), paths):
        model.save_pretrained(path)
    rows = [{"prompt_ids": p, "token_ids": y, "rollout_log_probs": a.clamp(max=0).tolist(),
             "train_log_probs": b.clamp(max=0).tolist()}
            for p, y, a, b in zip(PROMPTS, drawn, mu, pi)]
    (tmp_path / "dump.jsonl").unlink(missing_ok=True)
    append(tmp_path / "dump.jsonl", rows)
    rounding, kernels = Scorer(trainer, [], [(p, y) for p, y in zip(PROMPTS, drawn)]).grid
    print(f"rounding the weights moves a token by {rounding:.4f}, kernels by {kernels:.4f}: "
          f"{rounding / kernels:.2f}, limit {COARSE}")
    return [str(tmp_path / "dump.jsonl"), "--model", paths[0],
            *(["--older", *paths[1:]] if older else [])], rounding / kernels


def rescored(dump, _, model, *older):
    """Return what rescoring says, given the command's arguments."""
    return rescore(model, older[1:], read(dump))


def test_an_update_below_the_grid_is_named_with_the_share_that_is_still_the_first(
        tmp_path, capsys):
    first = first_model()
    now = trained(first, 7e-6)
    given, ratio = pair(tmp_path, in_bfloat16(now), now, first)
    found = rescored(*given)
    grid = found.rollout.grid
    assert ratio > 2 * COARSE and grid.arrived < 0.7 * ARRIVED
    assert (found.guilty, found.rollout.cause, found.train.cause) == ("rollout", "below-grid", None)
    with torch.no_grad():
        whole = [torch.cat([w.flatten() for w in m.parameters()]) for m in (now, first)]
    stays = whole[0].bfloat16() == whole[1].bfloat16()
    assert grid.same == stays.double().mean().item() > 0.7
    assert grid.changed == (whole[0] != whole[1])[stays].double().mean().item() > 0.9
    capsys.readouterr()
    assert main(given) == 1
    said = capsys.readouterr().out
    assert "Cause   the update is below the engine's grid" in said
    assert f"{grid.same:.1%} of the weights in bfloat16 are still the first ones" in said
    assert "another sync of the same weights brings nothing" in said
    assert main([*given, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [f["cause"] for f in told["causes"]] == ["below-grid"]
    assert told["model"]["rollout"]["grid"] == pytest.approx(grid._asdict(), rel=1e-6)


def test_without_an_older_model_the_rounding_is_named_and_what_would_tell(tmp_path, capsys):
    first = first_model()
    now = trained(first, 7e-6)
    given, ratio = pair(tmp_path, in_bfloat16(now), now)
    found = rescored(*given)
    assert ratio > 2 * COARSE and found.rollout.cause == "weights"
    capsys.readouterr()
    assert main([*given, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert "--older DIR, of an earlier step, tells whether" in told["causes"][0]["evidence"]
    assert told["model"]["rollout"]["grid"]["same"] is None


@pytest.mark.parametrize("step", [0, 1e-9])
def test_a_pair_in_order_is_not_accused_though_nearly_all_weights_are_the_first(
        tmp_path, capsys, step):
    """Nothing was trained, or so little that the gap is of kernels alone."""
    first = first_model()
    now = trained(first, step)
    given, ratio = pair(tmp_path, in_bfloat16(now), now, first)
    assert ratio < COARSE / 4
    capsys.readouterr()
    assert main([*given, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["model"]
    assert told["guilty"] == "none" and "grid" not in told["rollout"]
    same = torch.cat([(a.bfloat16() == b.bfloat16()).flatten()
                      for a, b in zip(now.parameters(), first.parameters())])
    assert same.double().mean() > 0.99


def test_updates_far_above_the_grid_arrive(tmp_path):
    """Weights whose roundings are of all signs move the policy by as much as kernels do."""
    first = first_model()
    now = trained(first, 3e-6)
    with torch.no_grad():
        for w in now.parameters():
            w += 0.01 * w.std().nan_to_num(0) * torch.randn(w.shape, generator=torch.Generator(
                ).manual_seed(3))
    given, ratio = pair(tmp_path, in_bfloat16(now), now, first)
    found = rescored(*given)
    assert ratio < 0.75 * COARSE and found.guilty == "none"


@pytest.mark.parametrize("step", [7e-6, 5e-5])
def test_weights_that_were_not_synchronised_are_stale_and_not_below_the_grid(tmp_path, step):
    """The engine still has the first weights, though many have moved on its grid, too."""
    first = first_model()
    now = trained(first, step)
    given, _ = pair(tmp_path, in_bfloat16(first), now, first)
    found = rescored(*given)
    assert (found.guilty, found.rollout.cause) == ("rollout", "weights")
    assert found.rollout.name == "1 updates stale" and found.rollout.grid is None


def test_where_the_whole_update_is_lost_a_sync_would_bring_nothing(tmp_path):
    """Rounded, the trainer's weights are the first ones: stale and rounded are one engine."""
    first = first_model()
    with torch.no_grad():
        for w in first.parameters():                    # far from 0, where the grid is coarse
            w.copy_((w.sign() + (w == 0)) * w.abs().clamp(min=1.25 * 2 ** -6))
    now = trained(first, 7e-6)
    given, ratio = pair(tmp_path, in_bfloat16(first), now, first)
    found = rescored(*given)
    assert ratio > 2 * COARSE and found.rollout.cause == "below-grid"
    assert found.rollout.grid.same > 0.999 and abs(found.rollout.grid.arrived) < 0.01


def test_where_nothing_was_trained_no_update_can_be_lost():
    assert not Grid(1.0, 0.1).below and Grid(1.0, 0.1, 1.0, 1.0, 0.2).below
    assert "--older DIR" in str(Grid(1.0, 0.1)) and "still the first" in str(
        Grid(1.0, 0.1, 1.0, 1.0, 0.2))
