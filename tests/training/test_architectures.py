"""Engines sample from the weights of models that name, share or pack them in their own way.

What the policy cannot run is refused. Each model stands for others. Gemma 2 caps its attention
scores, and in vLLM it has no lm_head. Mixtral is saved under other names than it has in memory. The
experts of Qwen3-MoE are one tensor in memory, many in a checkpoint, and packed in vLLM. Olmo 2 is
run by vLLM with the code of transformers. Granite divides its logits, and Cohere multiplies them.
"""

import os
import random

import numpy
import pytest
import torch

from three_policies.engines.choice import make_engine
from three_policies.engines.vllm import as_guest, keep_class
from three_policies.policy import Policy, check, full_weights
from three_policies.rollout import every_weight_once
from three_policies.tests.support.architectures import OF_EXPERTS, make
from three_policies.training.demo import character_tokenizer
from three_policies.training.models import read_model

MODELS = {"Qwen2": {}, "Gemma2": dict(query_pre_attn_scalar=32, attn_logit_softcapping=1.0),
          "Mixtral": dict(num_local_experts=4), "Qwen3Moe": OF_EXPERTS, "Olmo2": {},
          "Granite": dict(logits_scaling=2.0), "Cohere": dict(logit_scale=0.5)}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module", params=[(name, tied) for name in MODELS for tied in (True, False)
                                        if tied or name not in ("Gemma2", "Cohere")],  # always are
                ids=lambda x: f"{x[0]}-{'tied' if x[1] else 'untied'}")
def model_path(request, tmp_path_factory):
    name, tied = request.param
    path = tmp_path_factory.mktemp("model")
    make(name, tie_word_embeddings=tied, **MODELS[name]).save_pretrained(path)
    character_tokenizer("0123456789+=").save_pretrained(path)
    return str(path)


@torch.no_grad()
def mismatch(engine, policy):
    """Return max |log μ − log π_θ|; see test_rollout.py for the sizes to expect."""
    samples = engine.generate([PROMPT] * 8, range(8), temperature=policy.temperature, max_tokens=9,
                              eos_ids=[])
    tokens = torch.tensor([PROMPT + s.tokens for s in samples])
    log_prob = policy(tokens, torch.ones_like(tokens), 9)
    return (log_prob - torch.tensor([s.rollout_log_prob for s in samples])).abs().max().item()


def test_an_engine_samples_from_the_weights_of_any_architecture(engine_name, model_path):
    policy = Policy(read_model(model_path), 0.7)       # before the engine, as in a run
    engine = make_engine(engine_name, model_path, dtype="float32", max_model_len=32, batch_size=8)
    try:
        check(policy)
        assert mismatch(engine, policy) < 1e-4
        for _ in range(2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
            assert mismatch(engine, policy) > 0.1
            engine.update_weights(full_weights(policy))
            assert mismatch(engine, policy) < 1e-4
    finally:
        engine.close()


def test_a_weight_that_its_author_froze_arrives():
    """A router's bias is such a weight, of Ernie 4.5's experts for one."""
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert dict(every_weight_once(model.named_parameters(), model)).keys() == {"weight", "bias"}


@pytest.mark.parametrize("model_path", [("Gemma2", True)], indirect=True, ids=["Gemma2"])
@torch.no_grad()
def test_a_cap_on_attention_scores_is_not_left_out(model_path):
    model, tokens = read_model(model_path), torch.tensor([[*PROMPT, 8, 9]])
    ours = model(tokens).logits
    model.set_attn_implementation("sdpa")
    assert (ours - model(tokens).logits).abs().max() > 0.01        # as transformers loads it
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    without = model(tokens).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens).logits, without, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name, settings, said", [
    ("HyperCLOVAX", dict(logits_scaling=2.0), "does more to its logits than policy.py knows of"),
    ("Jamba", dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1,
                   use_mamba_kernels=False), "does not continue from its cache by several tokens"),
    ("Mamba", {}, "does not run prompts first and then responses, .* has no attribute")])
def test_a_model_that_the_policy_cannot_run_is_refused(name, settings, said):
    with pytest.raises(ValueError, match=f"^{name}ForCausalLM .*{said}"):
        check(Policy(make(name, **settings), 1.0))


def test_a_model_that_does_not_see_what_is_padding_is_refused(monkeypatch):
    model = make("Qwen2")
    check(Policy(model, 1.0))
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **given: forward(
        **{**given, "attention_mask": None}))
    with pytest.raises(ValueError, match="its log-probs would be wrong"):
        check(Policy(model, 1.0))


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.made = True


def rewrite():
    """Change a class as vLLM's `support_torch_compile` does."""
    class Compiler:
        pass
    Decoder.__bases__ = (torch.nn.Module, Compiler)
    Decoder.__init__, Decoder.__call__ = lambda self: None, lambda self: "compiled"


def test_a_class_of_transformers_is_given_back_as_it_was():
    before, bases = dict(vars(Decoder)), Decoder.__bases__
    with keep_class(Decoder, eager=True):
        rewrite()
    assert dict(vars(Decoder)) == before and Decoder.__bases__ == bases and Decoder().made
    with pytest.raises(RuntimeError, match="no start"), keep_class(Decoder, eager=True):
        rewrite()
        raise RuntimeError("no start")
    assert dict(vars(Decoder)) == before and Decoder.__bases__ == bases
    with pytest.raises(ValueError, match="own for Decoder and .*: rollout.enforce_eager must be"):
        with keep_class(Decoder, eager=False):
            rewrite()
    assert dict(vars(Decoder)) == before and Decoder.__bases__ == bases
    with keep_class(Decoder, eager=False):
        pass


def states():
    return [random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist(),
            torch.set_num_threads, torch.get_num_threads()]


def change_what_is_the_trainers():
    """Reseed, replace a function and print from C++, as vLLM does when it starts."""
    for seed in random.seed, numpy.random.seed, torch.manual_seed:
        seed(7)
    torch.set_num_threads(3)
    torch.set_num_threads = None
    os.write(2, b"a warning\n")


def test_the_start_of_vllm_leaves_nothing_behind(monkeypatch, capfd):
    """What it prints is shown where it fails, and at any other level than ERROR."""
    before = states()
    for level, fails, shown in (("ERROR", None, ""), ("ERROR", MemoryError, "a warning\n"),
                                ("ERROR", KeyboardInterrupt, ""), ("INFO", None, "a warning\n")):
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
        try:
            with as_guest():
                change_what_is_the_trainers()
                if fails:
                    raise fails
        except (MemoryError, KeyboardInterrupt):
            assert fails
        assert states() == before and capfd.readouterr().err == shown
        os.write(2, b"and then")
        assert capfd.readouterr().err == "and then"
