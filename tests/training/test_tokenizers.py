"""A tokenizer splits text as its own file says; what cannot be right, or be loaded, is told."""

import json
import re
import shutil

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from three_policies.training.models import read_tokenizer
from three_policies.training.loading import check_ends, ends_of


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
def test_a_text_is_split_as_tokenizer_json_says(kind, tmp_path):
    """transformers takes a tokenizer of its own for Qwen2, which drops "+" and "?" here."""
    own = Tokenizer(models.BPE(unk_token="[UNK]"))
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
    own = Tokenizer(models.BPE(unk_token="[UNK]"))
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
