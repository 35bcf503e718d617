"""This script measures what three choices save or cost, each beside its alternative.

    python tools/bench.py costs                 # about 5 minutes, and vLLM where it imports

    mismatch    logits in float32 from bfloat16 products, and logits in bfloat16. Engine and policy
                compute in bfloat16 with equal weights, so k3 is their arithmetic's alone. Random
                weights; in the second model all embeddings share a direction, which adds 24 to
                every logit. bfloat16's steps are of 1/8 there
    candidates  vLLM's log-probs of 64 candidates a token as flat lists, and as an object each
    lengths     micro-batches by a budget of tokens, and by rows. The longest responses decide how
                many rows fit, and most are short
"""

import contextlib
import os
import statistics
import tempfile
import time
import tracemalloc
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from three_policies.tools.bench_size import make_model

SHAPE: dict[str, Any] = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                             num_attention_heads=2, num_key_value_heads=1, vocab_size=2048,
                             tie_word_embeddings=True, initializer_range=0.1)
ENGINES = ["transformers", *["vllm"] * bool(find_spec("vllm"))]


def add_to_logits(path: str, offset: float) -> str:
    """Let all embeddings have 1 in one place, and scale that place: logits rise by `offset`."""
    from transformers import AutoModelForCausalLM
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1
        model.model.norm.weight[0] *= offset / model(torch.arange(3, 12)[None]).logits.mean()
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def rounded(a, b, out) -> None:
    """Multiply into the factors' dtype, in the place of `multiply`."""
    out.copy_(a @ b)


def mismatch_of(path: str, kind: str, wide: bool) -> list[str]:
    """Return k3, the mean and the largest |log ρ|, of logits in float32 or rounded to bfloat16."""
    from three_policies import trainer
    from three_policies.engines import vllm
    from three_policies.metrics import offpolicy_metrics
    from three_policies.engines.choice import make_engine
    from three_policies.training.faults import process_group
    from three_policies.policy import load_policy
    config, prompts = trainer.Config(), [[3 + i % 9, 5, 7] for i in range(64)]
    with process_group() as device, contextlib.ExitStack() as patches:
        if not wide:
            patches.enter_context(mock.patch("rollout.multiply", rounded))
            patches.enter_context(mock.patch("three_policies.training.heads.multiply", rounded))
        elif kind == "vllm":               # on a CPU the engine leaves it out, for its price
            LLM, params = vllm.import_vllm(device)
            patches.enter_context(mock.patch.object(vllm, "import_vllm", lambda device: (
                lambda *given, **settings: LLM(*given, **settings | {
                    "hf_overrides": {"head_dtype": "float32"}}), params)))
        policy = load_policy(path, 1.0, "bfloat16", device)
        engine = make_engine(kind, path, dtype="bfloat16", max_model_len=64, device=device)
        samples = engine.generate(prompts, [*range(64)], temperature=1.0, max_tokens=48, eos_ids=[])
        engine.close()
        batch = trainer.pad(prompts, samples, torch.zeros(64), device)
        old = trainer.score(policy, batch, config)
    gap = (old - batch.rollout_log_prob).abs()
    k3 = offpolicy_metrics(old, batch.rollout_log_prob, batch.response_mask)["rollout_corr/k3_kl"]
    return [f"{k3.item():.1e}", f"{gap.mean():.4f}", f"{gap.max():.2f}"]


def mismatch(table, path: str) -> None:
    rows = []
    for offset in (0, 24):
        path = add_to_logits(path, offset) if offset else path
        rows += [[f"around {offset}", kind, "float32" if wide else "bfloat16",
                  *mismatch_of(path, kind, wide)] for kind in ENGINES for wide in (False, True)]
    table("A bfloat16 engine and a bfloat16 policy with equal weights, 3 072 tokens",
          "logits | engine | their dtype | k3 | mean of abs log ρ | largest", rows)


def candidates(table, path: str) -> None:
    """Compare time and memory of 8 192 tokens: as the engine reads them, and vLLM's objects."""
    from three_policies.engines.choice import make_engine
    prompts, seeds, n = [[3 + i % 9, 5, 7] for i in range(128)], [*range(128)], 128 * 64
    found = {}
    for name, asked in (("none", 0), ("64, an object each", 64), ("64, flat", 64)):
        engine: Any = make_engine("vllm", path, dtype="float32", max_model_len=80, batch_size=128,
                                  candidates=asked)
        flat, params = name != "64, an object each", engine.SamplingParams
        if not flat:
            engine.SamplingParams = lambda **given: params(**given | {"flat_logprobs": False})
            engine._read = lambda output: [{v: x.logprob for v, x in step.items()}
                                           for step in output.logprobs]

        def generate():
            return engine.generate(prompts, seeds, temperature=1.0, max_tokens=64, eos_ids=[])

        generate()                                     # warms up
        seconds = []
        for _ in range(3):
            began = time.process_time()
            generate()
            seconds.append(time.process_time() - began)
        tracemalloc.start()
        samples = generate()
        found[name] = min(seconds), *tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del samples
        engine.close()
    none = found.pop("none")
    table(f"vLLM's candidates for {n} tokens, beyond a run without; Python's objects alone",
          "what | µs of the processor a token | KB a token at the end | at most",
          [[name, f"{1e6 * (x[0] - none[0]) / n:.0f}",
            *(f"{(a - b) / 1000 / n:.1f}" for a, b in zip(x[1:], none[1:]))]
           for name, x in found.items()])


def lengths(table, paired, ratio, path: str) -> None:
    """Compare updates of 64 rows of 4 to 256 tokens, most of them short, at equal most tokens."""
    from three_policies import trainer
    from three_policies.training.settings import correction_of, load_config
    from three_policies.training.run import open_run
    from three_policies.rollout import Sample
    settings = ["rollout.engine=transformers", "rollout.prompts=64", "rollout.samples=1",
                "rollout.max_tokens=256", "train.mini_batches=1", "advantage.kind=reinforce",
                "correction.preset=decoupled_token_is", f"policy.path={path}", "run=lengths"]
    long = [4 * 2 ** (i % 4) if i % 8 else 256 for i in range(64)]       # 4 to 32, and eight of 256
    samples = [Sample([3 + t % 9 for t in range(n)], [-7.0] * n, True) for n in long]
    with open_run(load_config(settings)) as run:
        assert run is not None
        parts = {}
        batch = trainer.pad([[3, 5]] * 64, samples, torch.randn(64), run.device)
        run.loaded.optimizer.param_groups[0]["lr"] = 0.0

        def by(rows, tokens):
            def update():
                run.config.train.micro_batch_size = rows
                run.config.train.micro_batch_tokens = tokens
                parts[rows] = trainer.micro_batches(batch, run.config)
                scored = trainer.score(run.loaded.policy, batch, run.config)
                trainer.update(run, batch._replace(old_log_prob=scored), correction_of(run.config))
            return update
        took = paired({4: by(4, None), 0: by(0, 4 * 258)}, 7)
    rows = []
    for how, name in ((4, "of 4 rows"), (0, "of 1 032 tokens")):
        most = max(len(part) * (2 + max(long[i] for i in part.tolist())) for part in parts[how])
        rows.append([name, len(parts[how]), most, f"{statistics.median(took[how]):.2f}",
                     ratio(took[how], took[4])])
    table(f"π_old and an update of 64 responses of 4 to 256 tokens, {sum(long)} in all",
          "micro-batches | parts | most tokens, padding included | s | time/by rows", rows)


def bench_costs(table, paired, ratio) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        path = make_model(str(Path(directory, "model")), **SHAPE)
        lengths(table, paired, ratio, path)
        if "vllm" in ENGINES:
            candidates(table, path)
        mismatch(table, path)
