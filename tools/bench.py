"""This script measures speed beside other libraries. It is no test, and pytest does not collect it.

    python tools/bench.py                                  # all parts, or those that are named:
        correct, logprobs, share, bypass, step; size and verl are in files of their own
    BENCH_THREADS=1 python tools/bench.py correct          # where other work shares the cores

Every row is a paired run: the candidates take turns in one process, A B C A B C …. The ratio is
the median of the ratios of the turns, with its quartiles. In each turn a candidate runs twice and
only the second run is timed, so that the caches and the freed memory of the candidate before it do
not count. Peak memory is what torch allocates beyond its inputs. Peers that do not import say "not
installed". verl needs `pip install --no-deps verl==0.9.1` and what it imports, TRL `pip install
trl==1.16.0`. tools/bench_peers.py measures beside both on a GPU.
"""

import contextlib
import ctypes
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from three_policies.correction import correct
from three_policies.presets import RolloutCorrectionConfig as Config

ROOT = Path(__file__).resolve().parent.parent

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    try:
        from verl.trainer.ppo import rollout_corr_helper  # pyright: ignore[reportMissingImports]
        verl_correct: Any = rollout_corr_helper.compute_rollout_correction_and_rejection_mask
    except ImportError:
        verl_correct = None
    try:
        from trl.trainer import utils  # pyright: ignore[reportMissingImports]
        selective_log_softmax: Any = utils.selective_log_softmax
    except (ImportError, RuntimeError):
        selective_log_softmax = None


def batch(B, T):
    """Draw train and rollout log-probs 0.02 apart, and a mask of T/4 to T tokens per response."""
    g = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(B, T, generator=g)
    train = rollout + 0.02 * torch.randn(B, T, generator=g)
    lengths = torch.randint(T // 4, T + 1, (B, 1), generator=g)
    return train, rollout, (torch.arange(T) < lengths).float()


def paired(candidates: dict, turns: int = 15) -> dict[str, list[float]]:
    """Return the seconds of every candidate in every turn."""
    seconds = {name: [] for name in candidates}
    for _ in range(turns):
        for name, run in candidates.items():
            run()
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def peak(run) -> int:
    """Return the most bytes that torch holds during a run, beyond those that it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    results: Any = recorded.profiler                           # whose types leave out nbytes
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


def ratio(a: list[float], b: list[float]) -> str:
    low, middle, high = statistics.quantiles([x / y for x, y in zip(a, b)], n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def table(title: str, head: str, rows: list[list]) -> None:
    print(f"\n{title}\n\n| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def floor(a, b, c, x, y):
    """Do the least that `correct` must do: read three [B, T] tensors, write two."""
    torch.addcmul(a, b, c, out=x)
    torch.mul(x, 2, out=y)


SETTINGS = {
    "token": (Config("token"), {"rollout_is": "token"}),
    "sequence": (Config("sequence"), {"rollout_is": "sequence"}),
    "token, with rejection": (
        Config("token", rollout_rs={"token_k1": (0.5, 2.0), "seq_mean_k3": 0.01}),
        {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3",
         "rollout_rs_threshold": "0.5_2.0,0.01"}),
    "metrics only": (Config(), {}),
}


def bench_correct():
    keep_freed_memory()
    data, rows = batch(512, 4096), []
    unit = data[0].nbytes
    outputs = [torch.empty_like(data[0]) for _ in range(2)]
    for name, (config, verls) in SETTINGS.items():
        candidates = {"ours": lambda: correct(*data, config).metrics,
                      "decided": lambda: correct(*data, config),
                      "floor": lambda: floor(*data, *outputs)}
        if verl_correct:
            candidates["verl"] = lambda: verl_correct(*data, **verls)
        took = paired(candidates)
        verl = ["not installed"] * 4
        if verl_correct:
            verl = [ms(took["verl"]), ratio(took["ours"], took["verl"]),
                    ratio(took["decided"], took["verl"]),
                    f"{peak(candidates['verl']) / unit:.1f}"]
        rows.append([name, ms(took["ours"]), *verl[:3],
                     ms(took["floor"]), ratio(took["ours"], took["floor"]),
                     f"{peak(candidates['ours']) / unit:.1f}", verl[3]])
    table("`correct` with all metrics, [512, 4096], float32",
          "setting | ms | verl 0.9.1, ms | ours/verl | without metrics/verl | floor, ms "
          "| passes over memory: ours/floor "
          "| peak, [B, T] tensors | verl's peak", rows)


def head_and_data(N, H, V, dtype):
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=False, dtype=dtype)
    return head, torch.randn(N, H, dtype=dtype, requires_grad=True), torch.randint(V, (N,))


def log_prob_paths(head):
    """Return three ways from hidden states to the log-probs of the sampled tokens, in float32."""
    from three_policies.policy import Policy
    ours: Any = SimpleNamespace(model=SimpleNamespace(get_output_embeddings=lambda: head),
                                softcap=None, divisor=1.0)
    paths = {"ours": lambda h, y: Policy.log_probs(ours, h, y[:, None])[:, 0],
             "plain": lambda h, y: head(h).float().log_softmax(-1).gather(-1, y[:, None])[:, 0]}
    if selective_log_softmax:
        paths["TRL"] = lambda h, y: selective_log_softmax(head(h), y)
    return paths


def backward(path, head, hidden, targets) -> tuple:
    loss = path(hidden, targets).mean()
    return torch.autograd.grad(loss, [hidden, head.weight])


def bench_logprobs(N=1024, H=256, V=151_936):
    """Measure the time at N tokens, and the peak memory at N and 4 N tokens.

    Plain ones would need 12 GB at 4 N, so their memory there is extrapolated from two points.
    """
    def runs(N):
        head, hidden, targets = head_and_data(N, H, V, torch.bfloat16)
        return {name: lambda p=p: backward(p, head, hidden, targets)
                for name, p in log_prob_paths(head).items()}
    whole, half = runs(N), runs(N // 2)
    took, most = paired(whole, 3), {name: peak(run) for name, run in whole.items()}
    at_4N = {name: most[name] + 6 * (most[name] - peak(half[name])) for name in half}
    at_4N["ours"] = peak(runs(4 * N)["ours"])
    table(f"log-probs of {N} sampled tokens and their gradient, V = {V}, H = {H}, bfloat16 weights",
          f"path | s | time/plain | peak, GB | at {4 * N}, GB (ours measured) | of plain's",
          [[name, f"{statistics.median(took[name]):.1f}", ratio(took[name], took["plain"]),
            f"{most[name] / 1e9:.2f}", f"{at_4N[name] / 1e9:.2f}",
            f"1/{at_4N['plain'] / at_4N[name]:.1f}"] for name in whole])
    head, hidden, targets = head_and_data(600, 64, V, torch.float32)
    ours, plain = (backward(log_prob_paths(head)[name], head, hidden, targets)
                   for name in ("ours", "plain"))
    error = max(((x - y).norm() / y.norm()).item() for x, y in zip(ours, plain))
    print(f"\ngradients in float32, ours against plain: {error:.1e} relative")


def bench_share(tokens=256):
    """Measure the correction's share of an update with Qwen2.5-0.5B's shapes in float32.

    An update is 24 times one layer, and the head on every token. Scoring and generating, which a
    step also does, are left out: they would lower the share.
    """
    from transformers import Qwen2Config, Qwen2Model
    shape: dict[str, Any] = dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=8)
    one, three = (Qwen2Model(Qwen2Config(num_hidden_layers=n, **shape)) for n in (1, 3))
    ids = torch.zeros(1, tokens, dtype=torch.long)
    head, hidden, targets = head_and_data(tokens, 896, 151_936, torch.float32)
    path, data = log_prob_paths(head)["ours"], batch(64, 1024)
    config = SETTINGS["token, with rejection"][0]
    took = paired({
        "one": lambda: one(ids).last_hidden_state.mean().backward(),
        "three": lambda: three(ids).last_hidden_state.mean().backward(),
        "head": lambda: backward(path, head, hidden, targets),
        "correct": lambda: correct(*data, config).metrics}, 3)
    middle = {name: 1e6 * statistics.median(x) for name, x in took.items()}
    layer, top = (middle["three"] - middle["one"]) / 2 / tokens, middle["head"] / tokens
    ours, step = middle["correct"] / data[0].numel(), 24 * layer + top
    table("share of the correction in an update of a 0.5B-parameter model, by parts, µs a token",
          "layer | head | 24 layers + head | `correct` | share",
          [[f"{layer:.0f}", f"{top:.0f}", f"{step:.0f}", f"{ours:.4f}",
            f"{100 * ours / step:.4f} %"]])


def bench_bypass(steps=30):
    """Time the demo's steps, with and without π_old's forward pass."""
    lines = {}
    with tempfile.TemporaryDirectory() as directory:
        for preset in ("decoupled_token_is", "bypass_ppo_clip"):
            subprocess.run([sys.executable, str(ROOT / "trainer.py"), f"correction.preset={preset}",
                            f"train.steps={steps}", f"run={preset}", "rollout.engine=transformers",
                            "train.eval_every=1000", "train.save_every=1000"],
                           cwd=directory, check=True, capture_output=True)
            text = (Path(directory) / "runs" / preset / "metrics.jsonl").read_text()
            lines[preset] = [json.loads(line) for line in text.splitlines()][5:-1]
    three, two = lines.values()
    parts = ("rollout", "log_probs", "update", "sync")
    middle = {name: [1e3 * statistics.median(line[f"time/{part}"] for line in run)
                     for part in parts]
              for name, run in lines.items()}
    forward, whole = middle["decoupled_token_is"][1], sum(middle["decoupled_token_is"])
    measured = ratio([x["time/step"] for x in two], [x["time/step"] for x in three])
    table("bypass mode on the demo, ms a step", "preset | " + " | ".join(parts),
          [[name, *(f"{x:.0f}" for x in times)] for name, times in middle.items()])
    print(f"\nstep: {measured} of decoupled; without its forward pass: {1 - forward / whole:.2f}")


def bench_step(steps=12, turns=5):
    """Time the demo's steps beside TRL's: engine transformers, float32, one process.

    A step has 1024 samples and 4 updates. TRL gets the same model, prompts, reward, batch, lengths,
    learning rate and correction, and neither evaluates nor saves. A turn is a few steps of each;
    its first step is not counted. Both are run with one thread, and with all.
    """
    from three_policies import trainer
    from three_policies.training.files import read_metrics
    from three_policies.training.settings import load_config
    threads = torch.get_num_threads()
    found, last = defaultdict(list), {}
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        config = load_config(["rollout.engine=transformers", "rollout.quantize=null",
                                      f"train.steps={steps}", "train.eval_every=1000"])
        for turn, n in itertools.product(range(turns), sorted({1, threads})):
            config.run = f"ours-{turn}-{n}"
            torch.set_num_threads(n)
            quiet = io.StringIO()
            with (contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet),
                  mock.patch.dict(os.environ, OMP_NUM_THREADS=str(n))):        # or a run takes one
                trainer.start(config)
                model = next(x for x in Path("runs/.demo").iterdir() if x.is_dir())
                lines = read_metrics(Path("runs", config.run, "metrics.jsonl"))[1:-1]
                found["ours", n].append([(line["response/tokens"], line["time/step"])
                                         for line in lines])
                with contextlib.suppress(ImportError):
                    found["TRL", n].append(trl_steps(config, str(model), steps)[1:-1])
            last[n] = lines
    torch.set_num_threads(threads)
    speeds = {name: [sum(n for n, _ in turn) / sum(s for _, s in turn) for turn in of_turns]
              for name, of_turns in found.items() if of_turns}
    rows = [[*name, f"{statistics.mean(n for turn in found[name] for n, _ in turn):.0f}",
             f"{statistics.median(s for turn in found[name] for _, s in turn):.2f}",
             f"{statistics.median(x):.0f}", ratio(speeds["ours", name[1]], x)]
            for name, x in speeds.items()]
    table("one step of the demo",
          "trainer | threads | tokens a step | s | tokens a second | ours/this", rows)
    for n, lines in last.items():
        whole = sum(line["time/step"] for line in lines)
        shares = [f"{part} {sum(line[f'time/{part}'] for line in lines) / whole:.0%}"
                  for part in ("rollout", "log_probs", "update", "sync")]
        print(f"\nwhere ours goes with {n} thread{'s' * (n > 1)}: {', '.join(shares)}")


def trl_steps(config, model: str, steps: int) -> list[tuple[float, float]]:
    """Return (sampled tokens, seconds) of each step of TRL's GRPOTrainer."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from datasets.table import InMemoryTable  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from three_policies.training.tasks import make_task
    task, parts, n = make_task(config.task, config.seed), config.train.mini_batches, []
    answers = {problem.question: problem.answer for problem in task.train}

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            n.append((0, time.perf_counter()))

    def reward(prompts, completions, completion_ids, **_):
        n.append((sum(map(len, completion_ids)), time.perf_counter()))
        return [float(c == answers[p]) for p, c in zip(prompts, completions)]

    size = config.rollout.prompts * config.rollout.samples
    options = GRPOConfig(
        output_dir="trl", max_steps=steps * parts, per_device_train_batch_size=size // parts,
        steps_per_generation=parts, num_generations=config.rollout.samples, beta=0.0, bf16=False,
        max_completion_length=config.rollout.max_tokens, learning_rate=config.train.lr,
        lr_scheduler_type="constant", gradient_checkpointing=False, temperature=1.0, use_cpu=True,
        loss_type="dapo", save_strategy="no", report_to=[], logging_steps=parts, disable_tqdm=True)
    table = InMemoryTable.from_pydict({"prompt": [problem.question for problem in task.train]})
    prompts = Dataset(table, fingerprint="prompts")  # its own one fails with some pyarrow and dill
    GRPOTrainer(model, reward, options, prompts, callbacks=[Clock()],
                processing_class=AutoTokenizer.from_pretrained(model)).train()
    ends = [0.0, *(at for tokens, at in n if not tokens)][::parts]
    tokens = [tokens for tokens, _ in n if tokens]
    return [(t, b - a) for t, a, b in zip(tokens, ends, ends[1:])]


def keep_freed_memory() -> None:
    """Keep freed memory in the process, so that no candidate pays for another's page faults."""
    with contextlib.suppress(AttributeError):                                   # glibc's
        ctypes.CDLL(None).mallopt(-1, 2 ** 30)                                  # M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(-3, 2 ** 25)                                  # M_MMAP_THRESHOLD


def main(names: list[str]) -> None:
    from three_policies.tools.bench_size import bench_size
    from three_policies.tools.bench_verl import bench_verl
    parts = {"correct": bench_correct, "logprobs": bench_logprobs, "share": bench_share,
             "bypass": bench_bypass, "step": bench_step, "size": lambda: bench_size(table),
             "verl": lambda: bench_verl(table, ratio)}
    if len(names) != 1:                                         # each in a process of its own
        for name in names or parts:
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", torch.get_num_threads())))
    print(f"\n{names[0]}: torch {torch.__version__}, {torch.get_num_threads()} threads, load "
          f"{os.getloadavg()[0]:.1f}")
    parts[names[0]]()


if __name__ == "__main__":
    main(sys.argv[1:])
