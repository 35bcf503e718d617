"""Rows that lie one after the other give the log-probs and gradients of padded ones, in float64.

Attention in rows is a loop on a CPU. The kernel that takes its place on a GPU is called as torch
declares it, and is compared with the loop where there is a GPU.
"""

import inspect
import itertools

import pytest
import torch
from torch import Tensor

from three_policies import trainer
from three_policies.policy import Policy, check
from three_policies.rollout import Sample
from three_policies.tests.support.architectures import OF_EXPERTS, make
from three_policies.tests.support.tolerances import norm
from three_policies.training import packing
from three_policies.training.models import add_lora, attend, use_attention
from three_policies.training.packing import Packing, attend_in_rows
from three_policies.training.settings import PolicyConfig
from three_policies.training.shapes import Shape, pad_rows

PROMPTS, RESPONSES = [4, 1, 2, 1, 4, 3], [3, 1, 0, 40, 3, 7]     # tokens of each row
WIDTH, K = 41, 3                                                 # one more than the longest has


def batch(prompts=PROMPTS, responses=RESPONSES):
    """Return tokens, attention [B, P + T], where the responses are [B, T], and ids [B, T, K]."""
    g = torch.Generator().manual_seed(0)

    def draw(lengths):
        return [torch.randint(2, 64, (n,), generator=g).tolist() for n in lengths]
    before, after = pad_rows(draw(prompts), "left"), pad_rows(draw(responses), "right", WIDTH)
    tokens, attention = (torch.cat(pair, 1) for pair in zip(before, after))
    ids = torch.randint(2, 64, (len(prompts), WIDTH, K), generator=g)
    return tokens, attention, after[1].bool(), ids


def exact(model, monkeypatch):
    """Return the model in float64, its norms included, which round to float32 otherwise."""
    for kind in {type(m) for m in model.modules() if type(m).__name__.endswith("RMSNorm")}:
        monkeypatch.setattr(kind, "forward",
                            norm_of_gemma if kind.__name__ == "GemmaRMSNorm" else norm)
    model.double()
    use_attention(model)
    return Policy(model, 0.7).train()


def norm_of_gemma(self, x):
    """Compute GemmaRMSNorm.forward in the type that it is given."""
    return (1 + self.weight) * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def with_lora(model):
    add_lora(model, PolicyConfig(lora_rank=2, lora_targets="all-linear"), 0)
    for name, x in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(x, std=0.1)
    return model


def outcome(policy, of, tokens, attention, inside, ids, kept, candidates):
    """Return log-probs, those of candidates, and gradients of a sum of both with weights."""
    kept_ids = torch.cat([tokens[:, -WIDTH:, None], ids], -1) if kept else None
    found = policy(tokens, attention, WIDTH, of(tokens, attention, WIDTH, "cpu"), kept_ids,
                   ids if candidates else None)
    log_prob, others = found if candidates else (found, None)
    weights = torch.randn(inside.shape, generator=torch.Generator().manual_seed(1)).double()
    total = (weights * log_prob)[inside].sum()
    if others is not None:                                     # those that μ did not keep are −∞
        others = others.where(inside[..., None] & others.isfinite(), 0.0)
        total = total + (weights[..., None] * others).sum()
    policy.zero_grad()
    total.backward()
    return log_prob, others, {name: x.grad for name, x in policy.named_parameters()
                              if x.grad is not None}


@pytest.mark.parametrize("kept, candidates", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Granite", "lora"])
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(
        name, checkpointing, kept, candidates, monkeypatch):
    model = with_lora(make("Llama")) if name == "lora" else make(name)
    policy, given = exact(model, monkeypatch), batch()
    if checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    padded, packed = (outcome(policy, of, *given, kept, candidates)
                      for of in (Shape.of, Packing.of))
    inside, scale = given[2], max(g.abs().max() for g in padded[2].values())
    assert packed[0].dtype == torch.float64 and scale > 0.1
    torch.testing.assert_close(packed[0][inside], padded[0][inside], rtol=1e-12, atol=1e-12)
    assert (packed[0][~inside] == 0).all() and (packed[0][inside] != 0).any()
    if candidates:
        torch.testing.assert_close(packed[1], padded[1], rtol=1e-12, atol=1e-12)
    assert packed[2].keys() == padded[2].keys()
    for weight, g in padded[2].items():
        assert (packed[2][weight] - g).abs().max() <= 1e-12 * scale, weight


def test_a_batch_without_a_response_has_zeros_and_a_gradient_of_zero(monkeypatch):
    """FSDP asks every weight for a gradient, whatever there is to learn from."""
    policy = exact(make("Qwen2"), monkeypatch)
    log_prob, _, gradient = outcome(policy, Packing.of, *batch(responses=[0] * 6), True, False)
    assert log_prob.shape == (6, WIDTH) and (log_prob == 0).all()
    assert gradient.keys() == dict(policy.named_parameters()).keys()
    assert all((g == 0).all() for g in gradient.values())


def test_a_row_sees_nothing_of_the_others():
    """A row of NaN leaves the bits of all others, and of the gradient of their own tokens."""
    model = make("Llama", tie_word_embeddings=False)
    use_attention(model)
    policy, (tokens, attention, inside, _) = Policy(model, 0.7), batch()
    tokens[0] = tokens[0].where(attention[0] == 0, 63)                 # in this row alone
    tokens[1:] = tokens[1:].where(tokens[1:] != 63, 5)
    others, found = inside.clone(), []
    others[0], table = False, model.get_input_embeddings().weight
    for value in (1.0, torch.nan):
        table.data[63] = value
        log_prob = policy(tokens, attention, WIDTH, Packing.of(tokens, attention, WIDTH, "cpu"))
        policy.zero_grad()
        log_prob[others].sum().backward()
        found += [(log_prob, table.grad[:63].clone())]
    (whole, own), (broken, same) = found
    assert broken[0][inside[0]].isnan().all() and whole[0][inside[0]].isfinite().all()
    assert torch.equal(whole[1:], broken[1:]) and torch.equal(own, same) and own.abs().max() > 0


def test_a_packing_says_where_tokens_lie():
    """Two rows, "12|34" and "5|", with two columns for prompts and three for responses."""
    attention = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 0, 0, 0]])
    found = Packing.of(torch.zeros(2, 5, dtype=torch.long), attention, 3, "cpu")
    assert found.lengths == [4, 1] and found.starts.tolist() == [0, 4, 5]
    assert found.starts.dtype == torch.int32                           # as the kernel wants them
    assert found.read.tolist() == [0, 1, 2, 3, 6] and found.positions.tolist() == [0, 1, 2, 3, 0]
    assert found.before.tolist() == [1, 2] and found.responses.tolist() == [0, 1]
    x = torch.arange(12).view(2, 3, 2)
    assert found.take(x).tolist() == [[0, 1], [2, 3]]
    assert found.put(found.take(x), 3).tolist() == [[[0, 1], [2, 3], [0, 0]], [[0, 0]] * 3]


def test_a_budget_of_tokens_is_of_those_that_are_there(monkeypatch):
    """Rows of 2 to 40 tokens. Padded to the longest of a part, fewer would be within it."""
    config, lengths = trainer.Config(), [1, 9, 39, 8, 5, 5, 30, 7, 1, 1]
    config.rollout.samples, config.train.micro_batch_tokens = 2, 41
    samples = [Sample([3] * n, [-1.0] * n, True) for n in lengths]
    given = trainer.pad([[3]] * 10, samples, torch.zeros(10), torch.device("cpu"))
    monkeypatch.setattr(trainer.dist, "all_reduce", lambda x, how: x)
    parts = {}
    for config.policy.packed in (False, True):
        parts[config.policy.packed] = found = [
            part.tolist() for part in trainer.micro_batches(given, config)]
        assert sorted(itertools.chain(*found)) == list(range(10))
    assert len(parts[True]) < len(parts[False])
    sizes = [sum(lengths[i] + 1 for i in part) for part in parts[True]]
    assert max(sizes) <= 41
    for part, (i, *_) in itertools.pairwise(parts[True]):              # a part is full
        assert sum(lengths[j] + 1 for j in part) + lengths[i] + 1 > 41
    config.train.micro_batch_tokens = 1                                # less than any row has
    assert [len(part) for part in trainer.micro_batches(given, config)] == [1] * 10


@pytest.mark.parametrize("settings", [
    ("loss.kl_coef=0.1", "train.dump=1"), ("policy.lora_rank=2", "loss.kl_coef=0.1")])
def test_a_packed_run_pads_nothing(settings, run, monkeypatch):
    """π_old, π_θ and π_ref are packed, and a prompt's samples need not stay together."""
    asked, split = [], trainer.micro_batches
    monkeypatch.setattr(trainer, "micro_batches", lambda batch, config, together=False: (
        asked.append(together) or split(batch, config, together)))
    monkeypatch.setattr(Policy, "hidden_states", lambda *_: pytest.fail("padded"))
    code, lines = run("policy.packed=true", *settings)
    assert code == 0 and len(lines) == 2 and lines[0]["grad_norm"] > 0
    assert len(asked) > 4 and not any(asked)


# ------------------------------------------------------------------------------ what is refused

@pytest.mark.parametrize("name, settings, has", [
    ("Gemma2", dict(attn_logit_softcapping=1.0, attn_implementation="eager"),
     "sliding_attention, eager attention"),
    ("Mistral", dict(sliding_window=8), "sliding_attention"),
    ("Jamba", dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1), "linear_attention")])
def test_layers_that_do_not_attend_to_all_earlier_tokens_are_refused(name, settings, has):
    model = make(name, **settings)
    use_attention(model)
    with pytest.raises(ValueError, match=f"^policy.packed=true .*{name}ForCausalLM has {has}$"):
        check(Policy(model, 1.0), packed=True)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Qwen3Moe", "Cohere"])
def test_other_models_are_checked_with_packed_rows(name, monkeypatch):
    """Its attention sees all rows, or does not hear of rows at all."""
    model = make(name, **OF_EXPERTS if name == "Qwen3Moe" else {})
    use_attention(model)
    policy = Policy(model, 0.7)
    check(policy, packed=True)
    with monkeypatch.context() as patches:
        patches.setattr("three_policies.training.models.attend_in_rows", see_all_rows)
        with pytest.raises(ValueError, match="does not keep packed rows apart"):
            check(policy, packed=True)
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda packing=None, **given: forward(**given))
    with pytest.raises(ValueError, match=f"^{name}ForCausalLM does not run packed rows"):
        check(policy, packed=True)


def see_all_rows(query, key, value, packing, scale):
    whole = Packing(**{**vars(packing), "lengths": [sum(packing.lengths)]})
    return attend_in_rows(query, key, value, whole, scale)


def test_a_run_refuses_such_a_model_with_one_sentence(tmp_path, run, capsys):
    from three_policies.tests.support.small import CHARACTERS
    from three_policies.training.demo import character_tokenizer
    make("Mistral", sliding_window=8).save_pretrained(tmp_path / "model")
    character_tokenizer(CHARACTERS).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    code, _ = run("policy.packed=true", f"policy.path={tmp_path / 'model'}")
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and "policy.packed=true needs layers" in said


# ------------------------------------------------------------------------------------- the kernel

def heads(dtype=torch.float32, device: torch.device | str = "cpu"):
    """Return queries, keys, values of six heads and two, [1, H, N, 16], of rows of 1 to 40."""
    tokens, attention, *_ = batch()
    shape, g = Packing.of(tokens, attention, WIDTH, device), torch.Generator().manual_seed(2)
    drawn = [torch.randn(1, sum(shape.lengths), h, 16, generator=g).to(device, dtype)
             .transpose(1, 2).requires_grad_() for h in (6, 2, 2)]
    return drawn, shape


def plain(query, key, value, bounds, scale):
    """Attend in each row by products of matrices: [N, H, d] → [N, H, d]."""
    out = torch.zeros_like(query)
    for first, last in itertools.pairwise(bounds):
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = (scale * q @ k.mT).masked_fill(
            ~torch.ones(last - first, last - first).tril().bool(), -torch.inf)
        out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


def test_the_loop_attends_in_rows():
    given, shape = heads(torch.float64)
    found = attend_in_rows(*given, shape, 0.3)
    expected = plain(*(x[0].transpose(0, 1) for x in given), shape.starts.tolist(), 0.3)
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-12)


def test_the_kernel_is_called_as_torch_declares_it(monkeypatch):
    """Its place is taken by what its documentation says of it, argument by argument."""
    real, calls = inspect.signature(packing.varlen_attn), []

    def varlen_attn(*args, **settings):
        given = real.bind(*args, **settings).arguments
        calls.append(given.keys())
        query, key, value, starts = (given[x] for x in ("query", "key", "value", "cu_seq_q"))
        assert given["cu_seq_k"] is starts and starts.dtype == torch.int32
        assert given["max_q"] == given["max_k"] == starts.diff().max() == 41
        assert all(type(given[x]) is int for x in ("max_q", "max_k"))
        assert given["window_size"] == (-1, 0) and given["enable_gqa"] is True       # causal
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        return plain(query, key, value, starts.tolist(), given["scale"])

    given, shape = heads(torch.float64)
    expected = attend_in_rows(*given, shape, 0.3)
    monkeypatch.setattr(packing, "varlen_attn", varlen_attn)
    monkeypatch.setattr(packing, "has_kernel", lambda *_: True)
    found = attend_in_rows(*given, shape, 0.3)
    assert len(calls) == 1 and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    attended, none = attend(None, *given, None, packing=shape, scaling=0.3, dropout=0.0)
    assert torch.equal(attended, found) and none is None


class OnGpu:
    """What `has_kernel` looks at of a tensor, on a GPU."""
    is_cuda = True

    def __init__(self, dtype, width):
        self.dtype, self.shape = dtype, (1, 2, 3, width)


@pytest.mark.parametrize("dtype, widths, expected", [
    (torch.bfloat16, (64, 64), True), (torch.float16, (256, 256), True),
    (torch.float32, (64, 64), False), (torch.bfloat16, (192, 128), False),
    (torch.bfloat16, (36, 36), False), (torch.bfloat16, (264, 264), False)])
def test_the_kernel_is_for_16_bits_and_heads_of_one_width(dtype, widths, expected):
    query, value = (OnGpu(dtype, width) for width in widths)
    assert packing.has_kernel(query, value) == expected  # pyright: ignore[reportArgumentType]
    assert not packing.has_kernel(torch.zeros(1, 2, 3, 64, dtype=dtype), torch.zeros(1, 2, 3, 64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn runs on CUDA alone; where "
                    "there is a GPU: CUDA_VISIBLE_DEVICES=0 pytest tests/training/test_packing.py")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernel_errs_no_more_than_twice_as_much_as_the_loop(dtype, monkeypatch):
    """Both are compared with the loop in float64: outputs and gradients, as FlashAttention does."""
    def run(wide, kernel):
        given, shape = heads(dtype, "cuda")
        given = [x.detach().to(torch.float64 if wide else dtype).requires_grad_() for x in given]
        monkeypatch.setattr(packing, "has_kernel", lambda *_: kernel)
        out = attend_in_rows(*given, shape, 0.3)
        return [out, *torch.autograd.grad(out.square().sum(), given)]

    exact, loop, kernel = run(True, False), run(False, False), run(False, True)
    for right, one, other in zip(exact, loop, kernel):
        assert other.dtype == dtype and other.shape == right.shape
        assert error(other, right) <= 2 * error(one, right)


def error(found: Tensor, right: Tensor) -> float:
    return (found.double() - right).abs().max().item()
