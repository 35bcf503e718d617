"""What a run asks of a GPU is arithmetic: its counts are those of real tensors, on a CPU.

`python tools/gpu_report.py` compares one update with a GPU; nothing here does.
"""

import math
import os
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config

from three_policies.book import tables
from three_policies.checks import UserError
from three_policies.policy import Policy
from three_policies.tests.support.launching import ROOT
from three_policies.tests.support.small import steady, weights
from three_policies.training import capacity, loading
from three_policies.training.capacity import (GIB, Sizes, host_bytes, judge_host, memory,
                                              require_room, smallest_engine, update_flops)
from three_policies.training.models import add_lora, use_attention
from three_policies.training.packing import Packing
from three_policies.training.settings import load_config

LENGTH = 768                           # of the longest prompt and response


def settings(name="gsm8k", *overrides):
    return load_config([str(ROOT / f"configs/{name}.yaml"), *overrides])


def small(kind, layers, dtype=torch.float32, **more):
    return AutoModelForCausalLM.from_config(kind(
        vocab_size=100, hidden_size=128, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=layers, **more), dtype=dtype)


# ------------------------------------------------------------------------- the counts are right

@pytest.mark.parametrize("size, parameters", [
    ("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", 3_085_938_688), ("7B", 7_615_616_512),
    ("14B", 14_770_033_664), ("32B", 32_763_876_352)])
def test_parameters_are_those_that_the_models_pages_state(size, parameters):
    model = tables.qwen(size)
    assert model.parameters == parameters == model.root + model.layers * model.layer


@pytest.mark.parametrize("ranks", [1, 8])
def test_weights_gradients_and_moments_are_as_large_as_adamws(ranks):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(num_hidden_layers=2))
    optimizer, total = torch.optim.AdamW(model.parameters(), foreach=False), dict.fromkeys(
        ("weights", "gradients", "moments"), 0)
    for x in model.parameters():
        x.grad = torch.empty_like(x)
    optimizer.step()
    for x in model.parameters():
        of = optimizer.state[x]
        total["weights"] += x.nbytes
        total["gradients"] += x.grad.nbytes
        total["moments"] += of["exp_avg"].nbytes + of["exp_avg_sq"].nbytes
    update, sampling = memory(Sizes.of(model), settings(), ranks, LENGTH, 1)
    found = {name: ranks * update[name] for name in total}
    assert found == total and "gradients" not in sampling
    reference, _ = memory(Sizes.of(model), settings("gsm8k", "loss.kl_coef=0.1"), ranks, LENGTH, 1)
    assert ranks * reference["weights"] == 2 * total["weights"]
    offloaded, _ = memory(Sizes.of(model), settings("gsm8k-24gb"), ranks, LENGTH, 1)
    assert not any(offloaded[name] for name in total)


def saved(model, rows, length, packed):
    """Return the bytes that a forward pass keeps for the backward pass, weights aside."""
    own, found = {x.untyped_storage().data_ptr() for x in model.parameters()}, {}

    def pack(x):
        storage = x.untyped_storage()
        found[storage.data_ptr()] = storage if storage.data_ptr() not in own else b""
        return x
    tokens = torch.zeros(rows, length, dtype=torch.long)
    mask = torch.arange(length).expand(rows, -1) >= torch.arange(rows)[:, None]        # padded
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        if packed:
            shape = Packing.of(tokens, torch.ones_like(tokens), 1, "cpu")
            result = Policy(model, 1.0).packed_hidden_states(tokens, shape)
        else:
            result = model.get_decoder()(input_ids=tokens, attention_mask=mask.long(),
                                         use_cache=False).last_hidden_state
    assert result.requires_grad
    return sum(len(storage) for storage in found.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Qwen2Config, LlamaConfig])
def test_activations_of_a_layer_are_what_a_forward_pass_keeps(kind, dtype, checkpointing, packed):
    """The difference of three layers and two is that of the arithmetic, and 24 bytes a token.

    Left out are two norms' divisors and the log-sums of four heads, in float32.
    """
    config = settings("gsm8k", f"policy.dtype={dtype}", "train.micro_batch_size=2",
                      f"policy.packed={packed}".lower(),
                      f"policy.gradient_checkpointing={checkpointing}".lower())
    measured, computed = [], []
    for layers in (2, 3):
        model = small(kind, layers, getattr(torch, dtype)).train()
        use_attention(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        measured.append(saved(model, 2, 64, packed))
        computed.append(memory(Sizes.of(model), config, 1, 64, 1)[0]["activations"])
    kept, by_arithmetic = measured[1] - measured[0], computed[1] - computed[0]
    print(f"{kind.__name__} {dtype}: {kept / 128:.0f} bytes a token, {by_arithmetic / 128:.0f}")
    assert kept == by_arithmetic + (0 if checkpointing else 24 * 128)


def test_the_smallest_engine_has_its_weights_and_one_cache():
    model, config = small(Qwen2Config, 3, torch.bfloat16), settings()
    cache = model(torch.zeros(1, 64, dtype=torch.long), use_cache=True).past_key_values
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    held += sum(x.nbytes for x in model.parameters())
    assert smallest_engine(Sizes.of(model), config, 64) == held
    wide = settings("gsm8k", "rollout.dtype=float32")      # whatever the policy's dtype is
    assert smallest_engine(Sizes.of(model), wide, 64) == 2 * held


def test_heads_may_be_wider_than_their_share_of_the_hidden_width():
    """Gemma's and Qwen3's are: four heads of 64 in a hidden width of 128."""
    model = small(LlamaConfig, 3, torch.bfloat16, head_dim=64)
    cache = model(torch.zeros(1, 16, dtype=torch.long), use_cache=True).past_key_values
    held = sum(x[0, :, 0].numel() for layer in cache.layers for x in (layer.keys, layer.values))
    sizes = Sizes.of(model)
    assert sizes.cached == held == 2 * 3 * 2 * 64 and sizes.attended == 4 * 64


@pytest.mark.parametrize("given, same", [
    ("train.micro_batch_size=100000", "train.micro_batch_size=64"),
    ("train.micro_batch_tokens=1", "train.micro_batch_size=1"),
    (f"train.micro_batch_tokens={3 * LENGTH - 1}", "train.micro_batch_size=2")])
def test_a_pass_has_a_row_at_least_and_a_ranks_mini_batch_at_most(given, same):
    """128 rows of a mini-batch, on two ranks."""
    of_step = ("rollout.prompts=64", "rollout.samples=8", "train.mini_batches=4")
    model = tables.qwen("0.5B")
    found, expected = (memory(model, settings("gsm8k", "policy.packed=false", *of_step, one), 2,
                              LENGTH, 1)[0]
                       for one in (given, same))
    assert found["activations"] == expected["activations"] > 0


def test_packed_rows_meet_a_budget_of_tokens_and_have_no_mask():
    """Padded rows of 768 tokens use 1536 of 2000; a longer row than the budget runs alone."""
    model, budget = tables.qwen("0.5B"), "train.micro_batch_tokens=2000"
    padded, packed, alone = (memory(model, settings("gsm8k", *given), 1, LENGTH, 1)[0]
                             for given in ([budget, "policy.packed=false"], [budget],
                                           ["train.micro_batch_tokens=1"]))
    mask = 2 * LENGTH                                      # bytes a token of bfloat16
    of_token = packed["activations"] / 2000
    assert padded["activations"] == 2 * LENGTH * (of_token + mask)
    assert alone["activations"] == LENGTH * of_token
    assert {**padded, "activations": 0} == {**packed, "activations": 0}


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_an_update_are_those_of_its_products(tied):
    """torch counts every product; those of attention are not of matrices of weights."""
    model = small(LlamaConfig, 2, tie_word_embeddings=tied)
    with FlopCounterMode(display=False) as counter:
        hidden = model.get_decoder()(torch.zeros(3, 20, dtype=torch.long)).last_hidden_state
        model.get_output_embeddings()(hidden[:, 8:]).sum().backward()
    products = sum(n for of, n in counter.get_flop_counts()["Global"].items()
                   if str(of) in ("aten.mm", "aten.addmm"))
    assert update_flops(Sizes.of(model), 3 * 8, 3 * 12) == products


def test_a_mixture_multiplies_by_the_experts_of_a_token_alone():
    model = small(MixtralConfig, 2, num_local_experts=8, num_experts_per_tok=2)
    attention, router = 128 * (4 + 2 + 2 + 4) * 32, 128 * 8
    assert Sizes.of(model).matrices == 2 * (attention + router + 2 * 3 * 128 * 512)


# ---------------------------------------------------------------------------------- what it judges

def judge(size, config, gib, ranks=1, length=LENGTH, vllm=True):
    return require_room(tables.qwen(size, config.policy), config, ranks, length,
                        tables.FREE * gib * GIB, gib * GIB, vllm)


def stated(name):
    """Return the figures of a configuration's first lines."""
    text = (ROOT / f"configs/{name}.yaml").read_text().split("task:")[0].split("arithmetic")[1]
    return [float(x) for x in re.findall(r"\d+\.\d", text)]


def test_gsm8k_fits_24_gb_and_a_model_three_times_as_large_does_not():
    assert judge("0.5B", settings(), 24) == []
    with pytest.raises(UserError, match=r"takes 25.7 GiB .* 22.1 are free .*weights 5.8, moments "
                       r"11.5, gradients 5.8.*take policy.lora_rank=8, policy.cpu_offload=true, "
                       "more ranks than 1"):
        judge("1.5B", settings(), 24)
    assert judge("1.5B", settings(), 24, ranks=8) == []


def test_what_is_offloaded_is_in_blocks_of_powers_of_two_but_for_the_moments():
    """So torch pins memory: CachingHostAllocator.h, PowerOf2Ceil."""
    model = small(Qwen2Config, 1)
    blocks = sum(2 ** math.ceil(math.log2(4 * x.numel())) for x in model.parameters())
    parameters = sum(x.numel() for x in model.parameters())
    assert 4 * parameters < blocks                         # some size is no power of two
    assert host_bytes(Sizes.of(model), settings("gsm8k-24gb")) == 3 * blocks + 8 * parameters


def test_an_offload_that_exceeds_the_hosts_memory_is_said():
    config, model = settings("gsm8k-24gb"), tables.qwen("1.5B")
    kept = host_bytes(model, config)
    assert judge_host(model, config, 1, kept) == judge_host(model, config, 1 / 2, kept / 2) == []
    said, = judge_host(model, config, 1, kept - 1)
    assert f"keeps {kept / GIB:.0f} GiB of weights, gradients and moments" in said
    assert judge_host(model, settings("gsm8k-24gb", "policy.cpu_offload=false"), 1, 0) == []
    both, = judge_host(model, settings("gsm8k-24gb", "loss.kl_coef=0.1"), 1, 0)        # π_ref, too
    assert f"keeps {(kept + model.pinned) / GIB:.0f} GiB" in both


def test_what_a_lora_keeps_on_the_host_is_one_copy_of_the_weights_and_its_own_moments():
    config = settings("gsm8k-lora-24gb", "policy.cpu_offload=true", "loss.kl_coef=0.1")
    model = tables.qwen("1.5B", config.policy)               # π_ref is the model without it
    kept = model.pinned + 2 * model.pinned_trained + 8 * model.trained
    assert 4 * model.trained <= model.pinned_trained < 8 * model.trained
    assert judge_host(model, config, 1, kept) == []
    said, = judge_host(model, config, 1, kept - 1)
    assert f"keeps {kept / GIB:.0f} GiB" in said


def test_a_run_judges_the_share_of_its_ranks_that_is_on_its_host(run, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(loading, "host_memory", lambda: 7.0)
    monkeypatch.setattr(loading, "judge_host", lambda *of: asked.append(of[2:]) or ["full"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run()[0] == 0 and asked == [(2.0, 7.0)] and "* full" in capsys.readouterr().err


def test_the_hosts_memory_is_all_that_it_has(monkeypatch):
    """Not what is free at that moment."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert capacity.host_memory() == 12_288


def test_the_configuration_for_24_gb_fits_and_states_its_figures():
    config, model = settings("gsm8k-24gb"), tables.qwen("1.5B")
    assert config.policy.path == "Qwen/Qwen2.5-1.5B-Instruct" and judge("1.5B", config, 24) == []
    share = config.rollout.gpu_memory_utilization * 24 * GIB
    update, sampling = memory(model, config, 1, LENGTH, share)
    without, _ = memory(model, settings("gsm8k-24gb", "policy.cpu_offload=false"), 1, LENGTH, share)
    bytes_of = [*(sum(x.values()) for x in (update, sampling, without)), host_bytes(model, config)]
    assert stated("gsm8k-24gb") == [round(x / GIB, 1) for x in bytes_of]


def test_the_loras_configuration_for_24_gb_fits_and_states_its_figures():
    name, size = "gsm8k-lora-24gb", "1.5B"
    config, whole = settings(name), settings(name, "policy.lora_rank=null")
    assert config.policy.path == "Qwen/Qwen2.5-1.5B-Instruct" and judge(size, config, 24) == []
    model, share = tables.qwen(size, config.policy), config.rollout.gpu_memory_utilization
    update, sampling = memory(model, config, 1, LENGTH, share * 24 * GIB)
    without, _ = memory(tables.qwen(size), whole, 1, LENGTH, share * 24 * GIB)
    bytes_of = [sum(x.values()) / GIB for x in (update, sampling, without)]
    assert stated(name) == [round(x, 1) for x in (*bytes_of, model.trained / 1e6)]


def test_the_arithmetic_beside_the_h100s_peak_is_that_of_its_gpu():
    config, share = settings("gsm8k-lora-24gb", "policy.packed=false"), 0.5 * 79.2 * GIB
    assert config.rollout.gpu_memory_utilization == 0.5
    found = memory(tables.qwen("1.5B", config.policy), config, 1, LENGTH, share)
    update, sampling = (sum(x.values()) / GIB for x in found)
    assert (f"by arithmetic {sampling:.1f} while it samples, {share / GIB:.1f} of them vLLM's, and "
            f"{update:.1f} in an update of rows of {LENGTH} tokens"
            in (ROOT / "math/appendix-measured.md").read_text())


def test_under_a_lora_its_own_weights_have_gradients_and_moments():
    """Counts are those of real tensors, FLOPs those of the products that torch counts."""
    config = settings("gsm8k", "policy.lora_rank=4", "policy.lora_targets=all-linear",
                      "loss.kl_coef=0.1")
    model = add_lora(small(LlamaConfig, 2), config.policy, 0)
    sizes = Sizes.of(model)
    update, _ = memory(sizes, config, 1, LENGTH, 1)
    with FlopCounterMode(display=False) as counter:
        hidden = model.get_decoder()(torch.zeros(3, 20, dtype=torch.long)).last_hidden_state
        model.get_output_embeddings()(hidden).sum().backward()
    assert update["gradients"] == sum(x.grad.nbytes for x in model.parameters()
                                      if x.grad is not None) == update["moments"] / 2
    assert update["weights"] == sum(x.nbytes for x in model.parameters())      # and π_ref is free
    products = sum(n for of, n in counter.get_flop_counts()["Global"].items()
                   if str(of) in ("aten.mm", "aten.addmm"))
    assert update_flops(sizes, 0, 60) == pytest.approx(products, rel=0.05)


def test_the_share_of_the_engine_is_bounded_from_both_sides():
    """1.5B on 48 GB, whose weights and moments leave 26.9 GiB; the smallest engine takes 2.9."""
    between = "set rollout.gpu_memory_utilization between 0.07 and 0.56, not "
    for share in ("0.06", "0.57"):
        with pytest.raises(UserError, match=between + share):
            judge("1.5B", settings("gsm8k", f"rollout.gpu_memory_utilization={share}"), 48)
    for share in ("0.07", "0.56"):                     # both ends are as they are said
        judge("1.5B", settings("gsm8k", f"rollout.gpu_memory_utilization={share}"), 48)
    assert judge("1.5B", settings("gsm8k", "rollout.gpu_memory_utilization=0.5"), 48) == []
    assert judge("1.5B", settings("gsm8k", "rollout.gpu_memory_utilization=0.9"), 48,
                 vllm=False) == []                     # no vLLM, no share


def test_near_the_limit_there_is_a_remark_and_no_refusal():
    [sentence] = judge("0.5B", settings("gsm8k", "train.micro_batch_size=200"), 24)
    assert "an update takes" in sentence and "lower train.micro_batch_size" in sentence
    [sentence] = judge("1.5B", settings("gsm8k", "rollout.gpu_memory_utilization=0.55"), 48)
    assert "sampling takes" in sentence and "lower rollout.gpu_memory_utilization" in sentence


def test_a_model_that_one_ranks_engine_cannot_hold_is_refused_on_any_number_of_gpus():
    for ranks in (1, 64):
        with pytest.raises(UserError, match="each rank has a whole engine: take a larger GPU"):
            judge("14B", settings("gsm8k-24gb"), 24, ranks)


def test_what_stays_while_a_rank_samples_counts_beside_its_engine():
    """7B in float32 takes 28.4 GiB under a LoRA, and its engine 14.2 more."""
    with pytest.raises(UserError, match=r"sampling takes .*as each rank has a whole engine"):
        judge("7B", settings("gsm8k", "policy.lora_rank=8"), 44)


def test_a_run_is_refused_before_anything_is_written(run, monkeypatch, capsys):
    monkeypatch.setattr(loading, "free_memory", lambda device: (1e6, 1e9))
    code, lines = run()
    said = capsys.readouterr().err
    assert code == 2 and lines == [] and not Path("runs").exists()
    assert "by arithmetic an update takes" in said and said.count("\n") == 1


def test_the_fullest_gpu_decides(monkeypatch):
    def with_another_rank(x, op):
        assert op == torch.distributed.ReduceOp.MIN
        x.copy_(x.minimum(torch.tensor([2, 5]) * GIB))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3 * GIB, 4 * GIB))
    monkeypatch.setattr(torch.distributed, "all_reduce", with_another_rank)
    assert capacity.free_memory(torch.device("cpu")) is None
    assert capacity.free_memory(torch.device("cuda", 0)) == (2 * GIB, 4 * GIB)


def test_offloaded_a_run_ends_with_the_same_bits_and_goes_on(run):
    """The memory of a CPU is the same one. Both runs have FSDP2, which bfloat16 asks for.

    Without checkpointing a last digit differs, since prompts and responses have a backward pass
    each: four gradients of two micro-batches are added in another order.
    """
    settings = ("loss.kl_coef=0.1", "policy.dtype=bfloat16", "policy.gradient_checkpointing=true")
    offloaded = (*settings, "policy.cpu_offload=true", "train.save_every=1")
    _, lines = run(*settings, "train.steps=3", name="here")
    run(*offloaded, name="there")
    code, others = run(*offloaded, "train.steps=3", name="there")
    assert code == 0 and steady(others)[2] == {**steady(lines)[2], "eval/accuracy":
                                               others[2]["eval/accuracy"]}
    assert all(torch.equal(x, weights("there")[name]) for name, x in weights("here").items())
