"""A model is complete, or it is refused by name and at once.

This holds for its weights, dropout, vocabulary, tokenizer and place.
"""

import json
import shutil

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from three_policies.checks import UserError
from three_policies.policy import Policy, check
from three_policies.tests.support.tolerances import gamma
from three_policies.training import models

UP = "model.layers.0.mlp.up_proj.weight"


def spoiled(tiny_model, place, change):
    """Return a copy of the tiny model whose weights are changed by `change(weights)`."""
    shutil.copytree(tiny_model, place)
    change(weights := load_file(place / "model.safetensors"))
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.parametrize("change, said", [
    (lambda w: w.pop(UP), f"weights are missing: {UP}"),
    (lambda w: w.update(extra=torch.zeros(3)), "weights are unknown to this architecture: extra"),
    (lambda w: w.update({UP: torch.zeros(3, 64)}),
     f"weights have another shape: {UP} [3, 64] instead of [128, 64]"),
    (lambda w: w["model.norm.weight"].fill_(torch.nan),
     "weights are not finite: model.norm.weight"),
    (lambda w: w["model.norm.weight"][:1].fill_(torch.inf),
     "weights are not finite: model.norm.weight"),
    (lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}),
     "weights differ from the embeddings that config.json ties them to: lm_head"),
    (lambda w: [w.pop(name) for name in list(w) if ".0." in name], " and 7 more"),
    (lambda w: (w.pop(UP), w.update(extra=torch.zeros(3))),
     f"missing: {UP}; weights are unknown to this architecture: extra"),
])
def test_weights_that_are_not_right_are_named(change, said, tiny_model, tmp_path, run, capsys):
    code, lines = run(f"policy.path={spoiled(tiny_model, tmp_path / 'spoiled', change)}")
    error = capsys.readouterr().err
    assert code == 2 and lines == [] and said in error and error.count("\n") == 1, error


def test_a_head_that_is_saved_beside_its_embeddings_is_no_other_weight(tiny_model, tmp_path):
    place = spoiled(tiny_model, tmp_path / "twice",
                    lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    model = models.read_model(str(place))
    assert model.lm_head.weight is model.model.embed_tokens.weight


SIZES = dict(vocab_size=26, eos_token_id=1, bos_token_id=None, pad_token_id=0)
DRAWING = {
    "gpt2": (
        transformers.GPT2LMHeadModel, transformers.GPT2Config,
        dict(n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0),
        {"resid_pdrop", "embd_pdrop", "summary_first_dropout"}),
    "llama": (
        transformers.LlamaForCausalLM, transformers.LlamaConfig,
        dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             attention_dropout=0.1),
        {"attention_dropout"}),
    "mixtral": (
        transformers.MixtralForCausalLM, transformers.MixtralConfig,
        dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, num_local_experts=2, router_jitter_noise=0.1),
        {"router_jitter_noise"})}

@pytest.mark.parametrize("name", DRAWING)
def test_nothing_is_drawn_at_random_in_training(name, tmp_path):
    model, config, sizes, expected = DRAWING[name]
    model(config(**SIZES, **sizes)).save_pretrained(tmp_path)
    assert set(models.configuration(str(tmp_path))[1]) == expected
    policy = Policy(models.read_model(str(tmp_path)), 1.0).train()
    check(policy)
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    scored = [policy(tokens, torch.ones_like(tokens), 3) for _ in range(2)]
    assert torch.equal(*scored) and policy.training


def test_a_run_with_dropout_says_so_and_its_policies_agree(tiny_model, tmp_path, run, capsys):
    """k3 is float32's rounding as in test_trainer.py, where nothing else differs.

    Dropout gave 4.6e-5.
    """
    place = shutil.copytree(tiny_model, tmp_path / "dropout")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    code, lines = run(f"policy.path={place}", "rollout.quantize=null", "train.steps=1")
    assert (code == 0 and abs(lines[0]["rollout_corr/k3_kl"]) < gamma(16)
            and lines[0]["grad_norm"] > 0)
    assert "policy.path: attention_dropout=0.1 of config.json is 0 here" in capsys.readouterr().err


def test_a_model_that_draws_all_the_same_is_refused(tiny_model):
    model = models.read_model(str(tiny_model))
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="^Qwen2ForCausalLM draws at random in training"):
        check(Policy(model, 1.0).train())


def without_tokenizer(tiny_model, place):
    shutil.copytree(tiny_model, place, ignore=shutil.ignore_patterns("tokenizer*"))
    return place


def smaller(tiny_model, place, vocabulary):
    """Return the tiny model with fewer tokens than its tokenizer has, 26."""
    shutil.copytree(tiny_model, place)
    config = transformers.AutoConfig.from_pretrained(tiny_model, vocab_size=vocabulary)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def test_no_tokenizer_is_a_sentence(tiny_model, tmp_path, run, capsys):
    place = without_tokenizer(tiny_model, tmp_path / "mute")
    assert run(f"policy.path={place}")[0] == 2
    error = capsys.readouterr().err
    assert "it has no tokenizer: tokenizer.json" in error and error.count("\n") == 1, error


@pytest.mark.parametrize("vocabulary, code", [(9, 2), (25, 0)])
def test_a_token_beyond_the_vocabulary_is_named(
        vocabulary, code, tiny_model, tmp_path, run, capsys):
    """A vocabulary of 9 of the 26 tokens is too small for the questions, one of 25 is enough.

    Questions have digits and "+" (3 to 13) and "=", number 17.
    """
    place = smaller(tiny_model, tmp_path / "small", vocabulary)
    assert run(f"policy.path={place}")[0] == code
    error = capsys.readouterr().err
    said = ("its vocabulary has 9 tokens, and its tokenizer makes number 9 of '6'" if code else
            "the tokenizer's last token is number 25, the model has rows for 25 tokens")
    assert said in error, error


@pytest.mark.parametrize("path, said", [
    ("./nowhere", "is no directory, and no name on the hub"),
    ("/no/where", "is no directory, and no name on the hub"),
    ("a/b/c", "is no directory, and no name on the hub"),
    ("", "is no model: it has no config.json"),
    ("nowhere/at-all", "is no directory here, and the hub did not return it"),
    ("empty", "is no model: it has no config.json")])
def test_a_place_without_a_model_is_asked_for_once(path, said, tmp_path, monkeypatch):
    """There are no retries: huggingface_hub makes a single request."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = []

    def refused(url, timeout):
        asked.append(url)
        raise ConnectionError("Name or service not known")
    monkeypatch.setattr(models, "get_hf_file_metadata", refused)
    with pytest.raises(UserError) as error:
        models.require_place(path)
    assert f"policy.path={path} {said}" in str(error.value)
    assert len(asked) == (path == "nowhere/at-all")
