"""This script times a step of this trainer beside one of verl's driver under Ray, on a CPU.

    python3 -m venv carried && carried/bin/pip install --no-deps -r requirements/interop.txt
    BENCH_VERL=carried/bin/python python tools/bench.py verl          # about 10 minutes

Both train the demo's model from the same weights, float32, with token weights: 16 prompts × 16
samples, π_old, four updates, the sync of the weights. Each has one thread, and one process that
trains. verl's is the command of interop/README.md, as test_verl_driver.py starts it, with verl's
own loss. Its start and its first step are not counted. The two take turns.

Sampling is left out of both: verl's rollout here is a helper of the tests, which samples one
response after the other.
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"π_old": ("time/log_probs", "timing_s/old_log_prob"),
         "four updates": ("time/update", "timing_s/update_actor"),
         "sync": ("time/sync", "timing_s/update_weights")}
OURS = ["rollout.engine=transformers", "rollout.prompts=16", "rollout.samples=16",
        "train.mini_batches=4", "train.micro_batch_size=64", "train.eval_every=1000",
        "correction.preset=decoupled_token_is"]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERLS = ["data.train_batch_size=16", "data.max_response_length=10", f"{ROLLOUT}.n=16",
         f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=1",
         f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", f"{ACTOR}.policy_loss.loss_mode=vanilla",
         f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
         f"{ROLLOUT}.tensor_model_parallel_size=1",
         "trainer.n_gpus_per_node=1", "+ray_kwargs.ray_init.num_gpus=1",
         "algorithm.rollout_correction.rollout_is=token"]


def verls_inputs(model: Path, questions: list[str], place: Path) -> list[str]:
    """Write the model with the tokens that verl asks of Qwen's tokenizer, and the questions."""
    import pyarrow.parquet
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["\n", "<|im_end|>"]})
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(place)
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.resize_token_embeddings(len(tokenizer))
    policy.save_pretrained(place)
    rows = [{"prompt": [{"role": "user", "content": question}], "data_source": "odd",
             "reward_model": {"ground_truth": ""}, "extra_info": {"index": i}}
            for i, question in enumerate(questions)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "rows.parquet")
    return [f"actor_rollout_ref.model.path={place}", f"data.train_files={place}/rows.parquet",
            f"data.val_files={place}/rows.parquet",
            f"data.max_prompt_length={max(len(tokenizer(q).input_ids) for q in questions)}"]


def verls_steps(python: str, given: list[str], place: Path) -> list[dict]:
    """Return what verl logs of each step; raise with its last words if it fails."""
    from three_policies.tests.interop.test_verl_driver import CPU, command
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(python).parent.absolute()), os.environ["PATH"]]),
        "VERL_USE_EXTERNAL_MODULES": "three_policies.tests.support.verl_cpu",
        "OMP_NUM_THREADS": "1", "VERL_FILE_LOGGER_PATH": str(place / "steps.jsonl"),
        "HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    (place / "steps.jsonl").unlink(missing_ok=True)
    done = subprocess.run(["bash", "-ec", f'{command()} "$@"', "verl", *CPU, *VERLS, *given,
                           f"hydra.run.dir={place}"], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:])
    return [json.loads(line)["data"] for line in (place / "steps.jsonl").open()]


def bench_verl(table, ratio, steps=6, turns=3) -> None:
    from three_policies import trainer
    from three_policies.training.files import read_metrics
    from three_policies.training.settings import load_config
    from three_policies.training.tasks import make_task
    python = os.environ.get("BENCH_VERL")
    if python is None:
        print("verl: not installed (BENCH_VERL is the Python of requirements/interop.txt)")
        return
    python = str(Path(python).absolute())
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in [*PARTS, "together"]}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        config, inputs = load_config([*OURS, f"train.steps={steps}"]), []
        questions = [p.question for p in make_task(config.task, config.seed).train[:256]]
        for turn in range(turns):
            config.run, quiet = f"ours-{turn}", io.StringIO()
            with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
                trainer.start(config)
            ours = read_metrics(Path("runs", config.run, "metrics.jsonl"))[1:steps]
            model = next(x for x in Path("runs/.demo").iterdir() if x.is_dir())
            (place := Path(directory, "verl")).mkdir(exist_ok=True)
            inputs = inputs or verls_inputs(model, questions, place)
            verls = verls_steps(python, [*inputs, f"trainer.total_training_steps={steps}"], place)
            for name, (mine, theirs) in PARTS.items():
                found[name].append((statistics.median(line[mine] for line in ours),
                                    statistics.median(line[theirs] for line in verls[1:])))
            mine, theirs = (sum(found[name][-1][side] for name in PARTS) for side in (0, 1))
            found["together"].append((mine, theirs))
    rows = []
    for name, pairs in found.items():
        ours, verls = zip(*pairs)
        rows.append([name, f"{1e3 * statistics.median(ours):.0f}",
                     f"{1e3 * statistics.median(verls):.0f}", ratio(verls, ours)])
    table("one step without sampling, 256 samples, beside verl 0.9.1's driver under Ray",
          "part | ours, ms | verl, ms | verl/ours (quartiles of the turns)", rows)
