"""A LoRA is peft's: its log-probs and gradients, what an engine gets of it, what is kept."""

import math
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from three_policies.checks import UserError
from three_policies.engines.choice import make_engine
from three_policies.oracle import close
from three_policies.policy import Policy, full_weights, load_policy
from three_policies.tests.support.architectures import OF_EXPERTS, make
from three_policies.tests.support.launching import shell, torchrun
from three_policies.tests.support.small import SMALL, steady
from three_policies.tests.support.tolerances import gamma
from three_policies.training.faults import process_group
from three_policies.training.files import read_metrics
from three_policies.training.models import add_lora, read_model
from three_policies.training.settings import PolicyConfig

TOKENS = torch.arange(21).view(3, 7) + 2
ALL = torch.ones_like(TOKENS)
LORA = ["policy.lora_rank=4", "policy.lora_alpha=16", "train.lr=0.02", "train.warmup_steps=0",
        "train.steps=4"]
EXACT = ["rollout.quantize=null"]


def settings(**given):
    return PolicyConfig(lora_rank=4, lora_alpha=16, **given)


def moved(model, size=0.3):
    """Give B, which is 0 at first, numbers of this size."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if ".lora_B." in name:
                x.copy_(size * torch.randn(x.shape, generator=generator))
    return model


@pytest.fixture
def policy(tiny_model):
    """Return a policy of the trainer whose LoRA has moved."""
    with process_group() as device:
        yield load_policy(str(tiny_model), 0.7, "float32", device,
                          lora=lambda model: moved(add_lora(model, settings(), 0)))


# ----------------------------------------------------------------------------- the policy is peft's

@pytest.mark.parametrize("targets", [None, "all-linear", "k_proj, down_proj"])
def test_log_probs_and_gradients_are_those_of_pefts_own_model(tiny_model, targets):
    """Policy with a LoRA against `get_peft_model` and autograd alone, in float64."""
    ours = Policy(moved(add_lora(read_model(str(tiny_model)).double(),
                                    settings(lora_targets=targets), 0)), 0.7)
    modules = targets if targets in (None, "all-linear") else targets.split(", ")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model).double(), LoraConfig(
        r=4, lora_alpha=16, target_modules=modules, task_type="CAUSAL_LM"))
    theirs = theirs.double()                           # peft keeps a LoRA in float32
    own = dict(ours.model.double().named_parameters())
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            x.copy_(own[name.removeprefix("base_model.model.")])
    log_prob = ours(TOKENS, ALL, 4)
    right = (theirs(TOKENS).logits / 0.7).log_softmax(-1)[:, 2:-1].gather(
        -1, TOKENS[:, 3:, None])[..., 0]
    assert close(log_prob, right)
    (log_prob ** 2).sum().backward()
    (right ** 2).sum().backward()
    learned = [name for name, x in theirs.named_parameters() if x.requires_grad]
    assert learned and all(".lora_" in name for name in learned)
    assert {name for name, x in own.items() if x.grad is not None} == {
        name.removeprefix("base_model.model.") for name in learned}
    for name in learned:
        theirs_grad = theirs.get_parameter(name).grad
        assert theirs_grad.abs().max() > 1e-6
        assert close(own[name.removeprefix("base_model.model.")].grad, theirs_grad)


def test_without_its_lora_a_policy_is_the_model_and_learns_afterwards(policy, tiny_model):
    with torch.no_grad():
        first = policy.without_lora(TOKENS, ALL, 4)         # the first forward pass of all
        assert torch.equal(first, Policy(read_model(str(tiny_model)), 0.7)(TOKENS, ALL, 4))
    log_prob = policy(TOKENS, ALL, 4)
    assert (log_prob - first).abs().max() > 0.1
    log_prob.sum().backward()
    assert all((x.grad is not None) == (".lora_" in name) == x.requires_grad
               for name, x in policy.named_parameters())


def test_the_seed_decides_the_lora(tiny_model):
    def drawn(seed):
        model = add_lora(read_model(str(tiny_model)), settings(), seed)
        return {name: x for name, x in model.named_parameters() if "lora_A" in name}
    state = torch.get_rng_state()
    first, same, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(x, same[name]) for name, x in first.items())
    assert not any(torch.equal(x, other[name]) for name, x in first.items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("targets, said", [
    ("q_porj", "has q_porj, .*linear layers are .*q_proj"),
    ("q_proj, v_porj", "has v_porj, which this model does not have"),
    ("q_proj,lm_head", "leave out embeddings and head"),
    ("embed_tokens", "leave out embeddings and head")])
def test_what_cannot_have_a_lora_is_refused(tiny_model, targets, said):
    with pytest.raises(UserError, match=f"policy.lora_targets.*{said}"):
        add_lora(read_model(str(tiny_model)), settings(lora_targets=targets), 0)


@pytest.mark.parametrize("name, targets, said", [
    ("Olmo2", None, "peft has no layers of its own for olmo2: set policy.lora_targets to some "
                    "of down_proj, .*q_proj, up_proj, v_proj$"),
    ("Qwen3Moe", "all-linear", "policy.lora_targets=all-linear reaches experts, whose packed "
                               "weights no engine here can merge: set .* to layers of attention "
                               r"\(k_proj, o_proj, q_proj, v_proj\)$")])
def test_models_whose_layers_have_to_be_named_say_which_there_are(name, targets, said):
    model = make(name, **(OF_EXPERTS if name == "Qwen3Moe" else {}))
    with pytest.raises(UserError, match=said):
        add_lora(model, settings(lora_targets=targets), 0)


# ----------------------------------------------------------------------------- what an engine gets

def test_merged_weights_are_the_sum(policy, tiny_model):
    """W + (α/r) B A: in float32 to its rounding, and on bfloat16's grid of the rounded summands."""
    apart, merged, coarse = (dict(full_weights(policy, how))
                             for how in ("apart", "merged", "merged-bfloat16"))
    base = load_file(tiny_model / "model.safetensors")
    assert set(merged) == set(coarse) == set(base)
    changed = {name.split(".lora_A.")[0] for name in apart if ".lora_A." in name}
    assert {name.removesuffix(".weight") for name, w in base.items()
            if not torch.equal(merged[name], w)} == changed
    for name in changed:
        w = base[f"{name}.weight"]
        a, b = (apart[f"{name}.lora_{x}.default.weight"].double() for x in "AB")
        delta, size = 4 * b @ a, 4 * b.abs() @ a.abs()     # sums of four products
        error = (merged[f"{name}.weight"].double() - (w.double() + delta)).abs()
        assert (error <= gamma(6) * (size + w.abs())).all()
        found = coarse[f"{name}.weight"]
        right = w.bfloat16() + delta.float().bfloat16()
        assert found.dtype == torch.bfloat16 and (found != right).float().mean() < 0.001   # ties


@pytest.mark.made_here
@pytest.mark.parametrize("how", ["merged", "apart"])
def test_engines_sample_from_the_adapted_model(engine_name, how, policy, tiny_model):
    """Each engine gets two LoRAs, the second in the place of the first."""
    def lora(model):
        return add_lora(model, settings(), 5)
    made = make_engine(engine_name, tiny_model, dtype="float32", max_model_len=16, batch_size=4,
                       lora=lora if how == "apart" else None)
    try:
        for _ in range(2):
            with torch.no_grad():
                for name, x in policy.named_parameters():
                    x.mul_(-1.5 if ".lora_B." in name else 1)
            made.update_weights(full_weights(policy, how))
            [sample] = made.generate([[5, 6, 7]], [3], temperature=0.7, max_tokens=8, eos_ids=())
            tokens = torch.tensor([[5, 6, 7, *sample.tokens]])
            with torch.no_grad():
                log_prob = policy(tokens, torch.ones_like(tokens), 8)[0]
                base = policy.without_lora(tokens, torch.ones_like(tokens), 8)[0]
            error = (torch.tensor(sample.rollout_log_prob) - log_prob).abs().max()
            assert 1000 * error < (base - log_prob).abs().max()
    finally:
        made.close()


# ---------------------------------------------------------------------------------- a run's LoRA

def test_a_run_with_everything_is_resumed_bit_for_bit(engine_name, run, tmp_path):
    """Four bits, stale weights, a cut, π_ref: a checkpoint has the LoRA, and what waits."""
    more = ["rollout.staleness=2", "rollout.top_p=0.9", "rollout.top_k=8", "loss.kl_coef=0.1",
            "policy.lora_save_merged=true", "train.save_every=2", "train.eval_every=2"]
    code, whole = run(*LORA, *more, engine=engine_name, name="whole")
    assert code == 0
    run(*LORA, *more, "train.steps=2", engine=engine_name, name="parts")
    code, parts = run(*LORA, *more, engine=engine_name, name="parts")
    assert code == 0 and steady(parts) == steady(whole)
    for file in "model/adapter_model.safetensors", "merged/model.safetensors":
        first, second = (load_file(tmp_path / "runs" / name / file) for name in ("whole", "parts"))
        assert all(torch.equal(x, second[name]) for name, x in first.items())
    assert whole[0]["loss/kl"] == 0 or abs(whole[0]["loss/kl"]) < abs(whole[-1]["loss/kl"])


KILLED = """
import os, signal, sys
from three_policies import trainer
from three_policies.training import run
from three_policies.training.tasks import Task
Task.reward = lambda self, problem, response: float(len(response) % 2)     # untaught models earn it
log = run.Run.log
def last(self, step, metrics):
    log(self, step, metrics)
    if step == 3: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "killed": run.Run.log = last
sys.exit(trainer.main(sys.argv[2:]))
"""


@pytest.mark.long
def test_two_ranks_that_were_killed_end_with_the_same_bits(
        engine_name, forks, tiny_model, tmp_path):
    """They train a LoRA with four bits, stale weights, a replayed cut and π_ref."""
    (tmp_path / "driver.py").write_text(KILLED)
    begin = forks if engine_name == "transformers" else []    # vLLM expects a process of its own
    given = [*SMALL, *LORA, "rollout.staleness=2", "rollout.top_p=0.9", "rollout.top_k=8",
             "loss.kl_coef=0.1", "train.save_every=2", f"rollout.engine={engine_name}",
             f"policy.path={tiny_model}"]

    def train(how, name):
        return shell(torchrun(2, begin, "driver.py", how, *given, f"run={name}"), tmp_path)
    ends = [train("whole", "whole"), train("killed", "parts"), train("goes on", "parts")]
    assert [end.returncode == 0 for end in ends] == [True, False, True], ends[-1].stderr
    assert "continuing after step 2" in ends[-1].stderr
    whole, parts = ((tmp_path / "runs" / name) for name in ("whole", "parts"))
    first, second = (load_file(x / "model/adapter_model.safetensors") for x in (whole, parts))
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    lines, others = (steady(read_metrics(x / "metrics.jsonl")) for x in (whole, parts))
    assert lines == others and len(lines) == 4


def test_a_finished_run_leaves_pefts_lora_and_the_merged_model(run, tmp_path, tiny_model):
    code, _ = run(*LORA, "policy.lora_save_merged=true")
    assert code == 0
    runs = tmp_path / "runs/x"
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    theirs = PeftModel.from_pretrained(base, runs / "model").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(runs / "merged")
    first = load_file(tiny_model / "model.safetensors")
    for name, x in merged.state_dict().items():
        right = theirs.state_dict()[name]
        assert (x - right).abs().max() <= gamma(10) * (1 + right.abs().max()), name
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight,
                           first["model.layers.0.self_attn.q_proj.weight"])
    assert not (runs / "model/config.json").exists()
    code, lines = run(*LORA, "policy.lora_save_merged=true")       # it is finished
    assert code == 0 and len(lines) == 4


@pytest.mark.parametrize("how", ["merged", "apart"])
def test_a_checkpoint_has_the_lora_alone(how, run, tmp_path):
    run(*LORA, *EXACT, f"rollout.lora={how}")
    saved = load_file(*(tmp_path / "runs/x/checkpoints").glob("step-*/rank-*.safetensors"))
    assert saved and all(".lora_" in name for name in saved)
    run(*LORA, *EXACT, f"rollout.lora={how}", "rollout.staleness=2", name="y")
    saved = load_file(*(tmp_path / "runs/y/checkpoints").glob("step-*/rank-*.safetensors"))
    waiting = {name for name in saved if name.startswith("waiting.")}
    assert waiting and all((".lora_" in name) == (how == "apart") for name in waiting)


@pytest.mark.made_here
def test_an_exact_engine_samples_from_the_policy_while_the_lora_moves(run):
    rounding = torch.finfo(torch.float32).eps       # of ρ: of equal policies, all there is in k3
    for how in "merged", "apart":
        code, lines = run(*LORA, *EXACT, f"rollout.lora={how}", name=how)
        assert code == 0 and lines[-1]["grad_norm"] > 0
        assert all(abs(line["rollout_corr/k3_kl"]) < rounding for line in lines)
    code, lines = run(*LORA, *EXACT, "rollout.lora=merged-bfloat16", name="coarse")
    assert code == 0 and lines[-1]["rollout_corr/k3_kl"] > 10 * rounding


def test_a_lora_learns_where_the_first_pass_of_all_is_the_references(run):
    """peft freezes A and B for π_ref, and FSDP asks in its first pass alone what is trained."""
    code, lines = run(*LORA, "policy.dtype=bfloat16", "correction.preset=bypass_pg_is",
                      "loss.kl_coef=0.1", "train.steps=2")
    assert code == 0 and all(0 < line["grad_norm"] < math.inf for line in lines)


def test_what_a_lora_does_not_go_with_is_said(run, capsys, tmp_path):
    code, _ = run(*LORA, "rollout.lora=apart")
    assert code == 2 and "rollout.quantize=4 rounds the weights" in capsys.readouterr().err
    run("policy.lora_alpha=16", "rollout.lora=apart", *EXACT, "train.steps=1")
    said = capsys.readouterr().err
    for name in "policy.lora_alpha", "rollout.lora":
        assert f"* {name} has no effect: policy.lora_rank is null" in said
    run(*LORA, *EXACT, name="lora")
    capsys.readouterr()
    code, _ = run(*EXACT, f"policy.path={tmp_path}/runs/lora/model", name="y")
    assert code == 2 and "is a LoRA, not a model: train" in capsys.readouterr().err


def test_a_lora_keeps_float32_and_the_merged_model_its_sources_dtype(run, tiny_model, tmp_path):
    source = shutil.copytree(tiny_model, tmp_path / "source")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(source)
    run("policy.lora_rank=4", "policy.lora_save_merged=true", f"policy.path={source}",
        "train.steps=1")
    for name, dtype in (("model/adapter_model", torch.float32), ("merged/model", torch.bfloat16)):
        assert {x.dtype for x in load_file(f"runs/x/{name}.safetensors").values()} == {dtype}
