"""How large is it really? Measure single causes of mismatch on one real model, a row for each.

A row changes one thing between sampler and trainer. The sampler answers 16 word problems of
reasoning-gym in at most 256 tokens at temperature 1, each row with the same noise, and records
log μ as it draws. The trainer's side scores the finished responses at once, in float32. Prefixes
are therefore distributed as μ draws them, which E_μ[ρ] = 1 and the doctor's laws assume. Along
these prefixes every KL and every moment of ρ is a sum over the whole vocabulary in float64; k3,
log ρ and ESS/N of whole responses are also measured on the tokens that were drawn. vLLM returns
no whole distributions: of its rows the 64 likeliest tokens count, and the others together as one,
which makes KL and moments lower bounds.

    three-policies fetch smollm2
    python studies/sizes.py --model smollm2 --out runs/sizes --row int8           # one row
    python studies/sizes.py --model smollm2 --out runs/sizes                      # all of them
    python studies/sizes.py --model smollm2 --out runs/gpu --device cuda --prompts 128
    python studies/sizes.py --model smollm2 --out runs/larger --prompts 128 --first 16 --tokens 64

OUT/results.csv gets a line for each row, and a row that stands there is not measured again;
OUT/ROW.jsonl is the row's dump: `three-policies doctor OUT/ROW.jsonl`. The published table is
made of studies/sizes/results.csv, a copy. Rows of training train eight steps, once, in OUT.
"""

import argparse
import csv
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from three_policies.doctor.dumps import append, rows_of
from three_policies.studies.both_sides import (Compared, Drawn, Skipped, draw, draw_with_vllm,
                                               score)
from three_policies.training.rounding import quantize_weights
from three_policies.training.settings import TaskConfig
from three_policies.training.shapes import pad_rows
from three_policies.training.tasks import make_task, prompt_of

HERE = Path(__file__).resolve().parent
SEED, PROMPTS, TOKENS, LENGTHS = 63, 16, 256, (16, 64, 256)
STEPS = 8                                              # of training
CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
State = dict[str, Tensor]


# ------------------------------------------------------------------------------------- the rows

@dataclass(frozen=True)
class Row:
    """One cause of mismatch: what the sampler does that the trainer, in float32, does not."""

    meaning: str
    quantize: str | int | None = None                  # as rollout.quantize
    dtype: str = "float32"                             # of the sampler's layers
    head: str = "float32"                              # of its logits
    engine: str = "transformers"
    trainer: str = "float32"                           # of the trainer's layers
    on_gpu: bool = False
    sampled: dict[str, Any] = field(default_factory=dict)        # temperature, top_p, top_k
    without: int | None = None                         # a layer that it leaves out
    weights: Callable[[Path, Path], tuple[State, State]] | None = None     # its own, the trainer's


def ago(steps: int) -> Callable[[Path, Path], tuple[State, State]]:
    """Give the sampler the weights of some steps before the trainer's, which has made STEPS."""
    def weights(model: Path, out: Path) -> tuple[State, State]:
        return trained(model, out, STEPS - steps), trained(model, out, STEPS)
    return weights


def below_the_grid(model: Path, out: Path) -> tuple[State, State]:
    """Give the trainer W + Δ, and the sampler W + Δ rounded to bfloat16, where W is on its grid.

    Δ is a tenth of what STEPS steps changed: at lr 1e-6 AdamW's steps are a tenth of those at 1e-5.
    """
    first, last = read(model), trained(model, out, STEPS)
    learned = {name: on_grid(w) + (last[name] - w) / 10 for name, w in first.items()}
    return {name: on_grid(w) for name, w in learned.items()}, learned


def merged_lora(model: Path, out: Path) -> tuple[State, State]:
    """Give the trainer W + sBA, and the sampler their sum rounded to bfloat16."""
    from peft import PeftModel
    apart: Any = PeftModel.from_pretrained(load(grid(model, out)), str(lora(model, out)))
    merged: Any = apart.merge_and_unload()
    whole = {name: w.detach() for name, w in merged.named_parameters()}
    return {name: on_grid(w) for name, w in whole.items()}, whole


def on_grid(w: Tensor) -> Tensor:
    return w.bfloat16().float()


ROWS = {
    "float32": Row("nothing: float32 on both sides, token by token and at once"),
    "bf16": Row("bfloat16 layers, head in float32", dtype="bfloat16"),
    "bf16-head-bf16": Row("bfloat16 layers and head", dtype="bfloat16", head="bfloat16"),
    "head-bf16": Row("float32 layers, head in bfloat16", head="bfloat16"),
    "fp16": Row("float16 layers, head in float32", dtype="float16"),
    "vllm-bf16": Row("vLLM on a CPU in bfloat16", dtype="bfloat16", engine="vllm"),
    "vllm-gpu": Row("vLLM on a GPU in bfloat16", dtype="bfloat16", engine="vllm", on_gpu=True),
    "vllm-gpu-bf16": Row("vLLM on a GPU and the trainer's layers, both in bfloat16",
                         dtype="bfloat16", engine="vllm", trainer="bfloat16", on_gpu=True),
    "bf16-gpu": Row("bfloat16 layers on a GPU, token by token and at once", dtype="bfloat16",
                    trainer="bfloat16", on_gpu=True),
    "float8-e4m3": Row("weights in float8 e4m3, a scale per channel", "float8-e4m3"),
    "float8-e4m3-tensor": Row("weights in float8 e4m3, a scale per matrix", "float8-e4m3-tensor"),
    "int8": Row("weights in 8 bits per channel", "int8"),
    "int7": Row("weights in 7 bits per channel", 7),
    "int6": Row("weights in 6 bits per channel", 6),
    "int5": Row("weights in 5 bits per channel", 5),
    "int4": Row("weights in 4 bits per channel", "int4"),
    "int4-group-128": Row("weights in 4 bits in groups of 128", "int4-group-128"),
    "int4-group-32": Row("weights in 4 bits in groups of 32", "int4-group-32"),
    "temperature": Row("sampled at temperature 0.7, scored at 1", sampled={"temperature": 0.7}),
    "top-p": Row("sampled with top-p 0.9, scored without", sampled={"top_p": 0.9}),
    "top-k": Row("sampled with top-k 50, scored without", sampled={"top_k": 50}),
    "stale-1": Row("weights one step old", weights=ago(1)),
    "stale-4": Row("weights four steps old", weights=ago(4)),
    "stale-8": Row("weights eight steps old", weights=ago(8)),
    "below-the-grid": Row("an update at lr 1e-6 that bfloat16 rounds away", weights=below_the_grid),
    "lora-merged": Row("a LoRA merged in bfloat16, trained apart", weights=merged_lora),
    "layer-left-out": Row("one layer of 30 left out", without=15)}


# --------------------------------------------------------------------------------- its weights

def load(model: Path, dtype: str = "float32", device: str = "cpu") -> Any:
    from transformers import AutoModelForCausalLM
    found: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    return found.to(device).eval()


def read(model: Path) -> State:
    return {name: w.detach() for name, w in load(model).named_parameters()}


def reward(question: str, answer: str, response: str) -> float:
    """Return the share of digits: a reward that differs between the first responses of a model."""
    return sum(x.isdigit() for x in response) / max(1, len(response))


def train(model: Path, run: str, steps: int, *settings: str) -> Path:
    """Train some GRPO steps on other questions of the family; return the run's directory."""
    from three_policies import trainer
    code = trainer.main([
        f"run={run}", f"seed={SEED}", f"policy.path={model}", "task.kind=reasoning_gym",
        "task.name=gsm_symbolic", "task.questions=400", "task.eval_size=1", f"task.prompt={CHAT}",
        "task.chat_template=false", f"task.reward={Path(__file__).resolve()}:reward",
        "policy.dtype=float32", "policy.gradient_checkpointing=false",
        "rollout.engine=transformers", "rollout.dtype=float32", "rollout.prompts=4",
        "rollout.samples=4", "rollout.max_tokens=48", "train.mini_batches=1", "train.lr=1e-5",
        "train.warmup_steps=0", "train.micro_batch_size=8", f"train.save_every={steps}",
        "train.keep=1", "train.eval_every=1000", f"train.steps={steps}", *settings])
    if code:
        raise SystemExit(code)
    return Path("runs") / run


def trained(model: Path, out: Path, steps: int) -> State:
    """Return the weights after some steps, which are trained once, up to STEPS."""
    if steps == 0:
        return read(model)
    for wanted in (STEPS - 4, STEPS - 1, STEPS):
        place = out / f"step-{wanted}"
        if not place.exists():
            run = train(model, f"{out.name}-steps", wanted)
            shutil.copytree(run / "model", place.with_suffix(".part"))
            place.with_suffix(".part").rename(place)
    return read(out / f"step-{steps}")


def grid(model: Path, out: Path) -> Path:
    """Write the model with weights in bfloat16, as most are published; return its directory."""
    place = out / "grid"
    if not place.exists():
        shutil.copytree(model, place.with_suffix(".part"))
        load(model, "bfloat16").save_pretrained(place.with_suffix(".part"))
        place.with_suffix(".part").rename(place)
    return place


def lora(model: Path, out: Path) -> Path:
    """Return the directory of a LoRA of rank 16 after STEPS steps."""
    if not (out / "lora").exists():
        run = train(grid(model, out), f"{out.name}-lora", STEPS, "policy.lora_rank=16",
                    "policy.lora_alpha=32", "policy.lora_targets=all-linear", "train.lr=2e-4")
        shutil.copytree(run / "model", out / "lora")
    return out / "lora"


@dataclass(frozen=True)
class Asked:
    """Which questions are asked, by their place in the family, and how long an answer may be."""

    count: int = PROMPTS
    first: int = 0
    tokens: int = TOKENS


def questions(model: Path, asked: Asked) -> list[list[int]]:
    """Return the prompts: held-out questions of the family that the steps train on."""
    from transformers import AutoTokenizer
    last = asked.first + asked.count
    task = make_task(TaskConfig(kind="reasoning_gym", name="gsm_symbolic", questions=400,
                                eval_size=max(100, last)), SEED)
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(prompt_of(task, one, CHAT)).input_ids
            for one in task.held_out[asked.first:last]]


def end_of(model: Path) -> list[int]:
    from transformers import AutoTokenizer
    return [AutoTokenizer.from_pretrained(model).eos_token_id]


# ---------------------------------------------------------------------------------- the numbers

def ess(first: Tensor, second: Tensor) -> float:
    """Return (mean of the weights)² / (mean of their squares)."""
    return (first.mean().square() / second.mean()).item()


def numbers(drawn: list[Drawn], found: list[Compared]) -> dict[str, float]:
    """Return a row's columns; a position is that of a token in its response, from 1."""
    pairs = list(zip(drawn, found, strict=True))
    log_rho = [y.log_pi.double() - torch.tensor(x.log_mu).double() for x, y in pairs]
    same = torch.cat([y.log_pi == torch.tensor(x.log_mu) for x, y in pairs])
    every, lengths = torch.cat(log_rho), torch.tensor([len(x) for x in log_rho]).double()
    k3 = [x.expm1() - x for x in log_rho]
    sums = torch.stack([x.sum() for x in k3])
    mean = (sums.sum() / lengths.sum()).item()           # of all tokens
    error = (sums - mean * lengths).square().sum().sqrt() / lengths.sum()
    row = {"responses": len(drawn), "tokens": int(lengths.sum()),
           "kl": torch.cat([x.kl for x in found]).mean().item(),
           "k3_exact": torch.cat([x.k3 for x in found]).mean().item(),
           "k3": mean, "k3_error": error.item(), "rms": every.square().mean().sqrt().item(),
           "largest": every.abs().max().item(), "equal": same.double().mean().item(),
           "entropy": torch.cat([x.entropy for x in found]).mean().item()}

    for T in LENGTHS:
        whole = torch.stack([x[:T].sum() for x in log_rho]).exp()
        row[f"ess_{T}"] = ess(whole, whole.square())
        steps = [(x.mass[:T].prod(), x.second[:T].prod()) for x in found]
        row[f"ess_steps_{T}"] = ess(*map(torch.stack, zip(*steps)))
    for first, last in zip((0, *LENGTHS), LENGTHS):
        part = torch.cat([x.kl[first:last] for x in found])
        row[f"kl_{first + 1}_{last}"] = part.mean().item() if len(part) else math.nan
    return row


def measure(name: str, model: Path, out: Path, asked: Asked = Asked(), device: str = "cpu"
            ) -> dict[str, Any]:
    """Measure a row, and write its dump."""
    began, row = time.perf_counter(), ROWS[name]
    prompts, end = questions(model, asked), end_of(model)
    policy = load(model, row.trainer, device)
    if row.engine == "vllm":
        drawn = draw_with_vllm(model, row.dtype, prompts, end, asked.tokens, device)
    else:
        sampler = load(model, device=device)
        own, ours = row.weights(model, out) if row.weights else ({}, {})
        own = own or dict(quantize_weights(sampler.named_parameters(), row.quantize))
        sampler.load_state_dict(own, strict=False)
        policy.load_state_dict(ours, strict=False)
        if row.without is not None:
            sampler.model.layers[row.without] = Skipped()
        sampler = sampler.to(getattr(torch, row.dtype))
        head = sampler.get_output_embeddings().weight.to(getattr(torch, row.head))
        drawn = draw(sampler, head, prompts, end, asked.tokens, asked.first, **row.sampled)

    found = list(score(policy, prompts, drawn))
    write_dump(out / f"{name}.jsonl", prompts, drawn, found)
    return {"row": name, **{key: f"{x:.4g}" for key, x in numbers(drawn, found).items()},
            "seconds": f"{time.perf_counter() - began:.0f}"}


def write_dump(path: Path, prompts: list[list[int]], drawn: list[Drawn],
               found: list[Compared]) -> None:
    ids, here = pad_rows(prompts, "left")
    y, there = pad_rows([x.tokens for x in drawn], "right")
    log_mu, log_pi, entropy = (pad(rows) for rows in (
        [x.log_mu for x in drawn], [x.log_pi.tolist() for x in found],
        [x.entropy.tolist() for x in found]))
    path.unlink(missing_ok=True)
    append(path, rows_of(ids, here, y, there, there, log_mu, log_pi, entropy))


def pad(rows: list[list[float]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


# ------------------------------------------------------------------------------------ the table

def results(path: Path = HERE / "sizes/results.csv") -> dict[str, dict[str, str]]:
    """Return the rows of a table by name, in the order of ROWS."""
    if not path.exists():
        return {}
    with path.open() as file:
        found = {row["row"]: row for row in csv.DictReader(file)}
    return {name: found[name] for name in ROWS if name in found}


def table() -> tuple[list[str], list[list[str]]]:
    """Return the table of appendix C; a cell of ESS/N has the responses' and the steps'."""
    header = ["row", "between sampler and trainer", "k3", "k3 of the drawn", "r.m.s. of log ρ",
              "largest", "equal", *(f"ESS/N at {T}" for T in LENGTHS),
              *(f"KL at {first + 1}–{last}" for first, last in zip((0, *LENGTHS), LENGTHS))]
    return header, [[
        f"`{name}`", ROWS[name].meaning, brief(x["k3_exact"]),
        f"{brief(x['k3'])} ± {brief(x['k3_error'])}", brief(x["rms"]), brief(x["largest"]),
        f"{100 * float(x['equal']):.1f} %",
        *(f"{float(x[f'ess_{T}']):.2f} / {float(x[f'ess_steps_{T}']):.2f}" for T in LENGTHS),
        *(brief(x[f"kl_{first + 1}_{last}"]) for first, last in zip((0, *LENGTHS), LENGTHS))]
        for name, x in results().items()]


def brief(x: str | float) -> str:
    """Write a number with two digits, as 0.0012 or 1.2e-05."""
    value = float(x)
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.2g}"


def add(path: Path, row: dict[str, Any]) -> None:
    """Append a line, with the columns' names where it is the first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--out", type=Path, default=Path("runs/sizes"), help="of table and dumps")
    parser.add_argument("--row", action="append", choices=ROWS,
                        help="one row; default: all that this device has")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--first", type=int, default=0, help="the first question's number")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an answer, at most")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out / "results.csv"
    for name in given.row or [name for name, row in ROWS.items()
                              if given.device == "cuda" or not row.on_gpu]:
        if name in results(table):
            print(f"{name} is in {table} already")
            continue
        row = measure(name, given.model.resolve(), given.out,
                      Asked(given.prompts, given.first, given.tokens), given.device)
        add(table, row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
