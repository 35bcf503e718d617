"""Half a billion parameters on a CPU: each part of a step beside the least that it could cost.

    python tests/bench.py size                  # 20 GB of memory, 16 GB of disk, about 10 minutes

Qwen2.5-0.5B's shapes with random weights, made on the spot; 4 prompts × 8 samples × 64 tokens, vLLM in
bfloat16 where it imports. Every floor is measured in the same process, after the steps:
    update      the matrix products of one forward and backward pass (6 · weights · tokens) at the rate of a @ b,
                and one pass of the optimizer over its state
    sync        one copy and cast of all weights
    rollout     the same requests to a bare vllm.LLM: the engine's own, without what rollout.py does around it
    checkpoint  writing the same bytes to a file
Memory is the process's, as the kernel counts it.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

SHAPE = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
             num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True)
SETTINGS = ["task.size=2", "task.eval_size=1", "rollout.prompts=4", "rollout.samples=8", "rollout.max_tokens=64",
            "rollout.dtype=bfloat16", "train.mini_batches=1", "train.micro_batch_size=8", "train.steps=2",
            "train.keep=1", "correction.preset=decoupled_token_is", "run=size"]


def make_model(directory: str, **shape) -> str:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from plumbing.tasks import character_tokenizer
    torch.manual_seed(0)
    config = Qwen2Config(**shape, dtype="bfloat16", eos_token_id=1, pad_token_id=0, bos_token_id=None)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    character_tokenizer("0123456789+=>").save_pretrained(directory)
    return directory


def memory(name="VmRSS") -> float:
    """GB of this process: now (VmRSS), or the most since clear_refs (VmHWM)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 2 ** 20


def timed(run) -> tuple[float, float]:
    """Seconds, and the most memory in them."""
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    run()
    return time.perf_counter() - began, memory("VmHWM")


def median(run, times=3) -> float:
    return statistics.median(timed(run)[0] for _ in range(times))


def one_step(run, step: int, options) -> tuple[dict, object]:
    """(seconds, peak memory) of each part, and the batch."""
    import trainer
    from correction import correct
    world, kept = torch.distributed.group.WORLD, {}

    def rollout():
        kept["batch"], _ = trainer.sample(run, step)

    def log_probs():
        kept["batch"] = kept["batch"]._replace(old_log_prob=trainer.score(run.policy, kept["batch"], run.config))

    def update():
        batch = kept["batch"]
        correction = correct(batch.old_log_prob, batch.rollout_log_prob, batch.response_mask, options, group=world)
        trainer.update(run, batch, options, correction)

    parts = {"rollout": rollout, "π_old": log_probs, "update": update,
             "sync": lambda: run.update_engine(run.sync.push), "checkpoint": lambda: run.checkpoints.save(run, step)}
    found = {}
    for name, part in parts.items():
        before = memory()
        found[name] = (*timed(part), before)
    return found, kept["batch"]


def floors(run, batch) -> dict[str, float]:
    """Seconds of the least that each part could do."""
    weights = [p.to_local().detach() for p in run.policy.parameters()]
    tokens, hidden = int(batch.attention.sum()), run.policy.model.config.hidden_size
    a, b = torch.randn(tokens, hidden), torch.randn(hidden, run.policy.model.config.intermediate_size)
    rate = 2 * a.numel() * b.shape[1] / median(lambda: a @ b, 9)                       # operations a second
    for parameter in run.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    products = 6 * sum(w.numel() for w in weights if w.dim() == 2) * tokens / rate
    found = {"update": products + median(run.optimizer.step),
             "sync": median(lambda: [w.to(torch.bfloat16) for w in weights])}
    with tempfile.TemporaryFile(dir=".") as file:
        found["checkpoint"] = timed(lambda: [file.write(w.flatten().numpy()) for w in weights for _ in range(3)])[0]
    if run.engine.name == "vllm":
        start = batch.tokens.shape[1] - batch.response_mask.shape[1]
        prompts = [{"prompt_token_ids": row[:start][on[:start].bool()].tolist()}
                   for row, on in zip(batch.tokens, batch.attention)]
        params = run.engine.SamplingParams(seed=0, temperature=1.0, max_tokens=64, logprobs=0, ignore_eos=True,
                                           detokenize=False)
        with torch.compiler.set_stance("force_eager"):
            found["rollout"] = median(lambda: run.engine.llm.generate(prompts, params, use_tqdm=False))
    return found


def bench_size(table) -> None:
    from plumbing.run import opened
    from plumbing.settings import correction_of, load_config
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        config = load_config([*SETTINGS, f"policy.path={make_model('model', **SHAPE)}"])
        options, steps = correction_of(config), []
        with opened(config) as run:
            run.before = 0.0
            run.update_engine(run.sync.push)
            for step in run.steps():
                found, batch = one_step(run, step, options)
                steps.append(found)
            floor, last, n = floors(run, batch), steps[-1], sum(p.numel() for p in run.policy.parameters())
        rows = [[name, f"{s:.1f}", f"{floor[name]:.1f}" if name in floor else "–",
                 f"{s / floor[name]:.2f}" if name in floor else "–", f"{peak:.1f}", f"{peak / before:.2f}"]
                for name, (s, peak, before) in last.items()]
        table(f"{n / 1e6:.0f}M parameters, {int(batch.attention.sum())} tokens, engine {run.engine.name}; "
              f"weights, gradients and moments are {16 * n / 2 ** 30:.1f} GB",
              "part | s | floor, s | ratio | most memory, GB | of what was held before", rows)
