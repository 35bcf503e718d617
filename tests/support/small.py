"""A tiny model from a seed, the settings of a short run, and what a test asks of either."""

import importlib.util
import os

import pytest

CHARACTERS = "0123456789+-*/=?() abcd"
ENGINES = ["transformers", "vllm"]     # what rollout.engine names, auto aside
SMALL = ["task.size=1", "task.eval_size=8", "rollout.prompts=4", "rollout.samples=4",
         "rollout.max_tokens=5", "rollout.quantize=4", "train.mini_batches=2",
         "train.micro_batch_size=4", "train.steps=2"]


def make_tiny_model(directory):
    """Write a tiny model with `save_pretrained`: Qwen2, 2 layers, 26 tokens, float32, from a seed.

    The embeddings are tied, as in most small models. The weights are ten times the usual size, so
    that the distributions are far from uniform and a wrong distribution is noticed.
    """
    # The core's own tests must run without transformers. And without torch, the process that shares
    # the tests among workers starts them a second earlier.
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from three_policies.training.demo import character_tokenizer
    tokenizer = character_tokenizer(CHARACTERS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
            tie_word_embeddings=True, initializer_range=0.2, dtype="float32",
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def steady(lines):
    """Return metrics without those of the clock or the memory."""
    return [{key: x for key, x in line.items()
             if not key.startswith(("time/", "tokens_per", "memory/"))} for line in lines]


def weights(name):
    """Load the finished model of a run."""
    from safetensors.torch import load_file
    return load_file(f"runs/{name}/model/model.safetensors")


def required(package, what, switch, enter=lambda: None):
    """Skip where a package is missing or does not run; fail where the switch is 1, as in CI."""
    try:
        if importlib.util.find_spec(package) is not None:
            return enter()
        hint = f"{package} is not installed ({what})"
    except ImportError as error:
        hint = str(error)
    if os.environ.get(switch) == "1":
        pytest.fail(f"{hint}, and {switch}=1 makes that a failure")
    pytest.skip(hint)


def need(engine, request):
    """Skip the test of an engine whose package is missing; transformers is never missing."""
    if engine != "transformers":
        request.getfixturevalue(f"{engine}_required")


OWN = ["task.kind=jsonl", "task.path=train.jsonl", "policy.path=a/model"]
