"""Predict what a merge in bfloat16 loses of a LoRA, and measure it on trained LoRAs.

The engine gets round(W + Δ), Δ = sBA, where W is on bfloat16's grid. An entry is lost if the sum is
rounded back to W: |Δ| < u/2, where u is W's unit in the last place. (Where W is a power of two, u/4
is enough towards 0. The rule does not know this: of normal weights one in a hundred is such a W,
and their shares are predicted at most a third too high.) The prediction takes Δ for
normal, with the variance that the LoRA gives a row, σ_i² = s² (B AAᵀ Bᵀ)_ii / in. Rounding is
then a gain and noise (Bussgang): round(W + Δ) − W = gΔ + ε, with ε uncorrelated with Δ. The KL is
that of a model whose update is gΔ + ε.

Before the first update AdamW's step is known, |B| = η, and A is drawn with the variance 1/(3·in).
So the first step's share is predicted without a run: `python studies/merging.py declare`.

    python studies/merging.py declare | run               # `run` writes studies/merging/results.csv
"""

import csv
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent

SEEDS = (1001, 1002, 1003, 1004, 1005)                     # of base, LoRA and samples
CELLS = [(rank, rate) for rank in (4, 16) for rate in (2e-4, 2e-3)]         # s = 2 in all of them
STEPS, SCALE = (1, 2, 4, 8, 16, 32), 2.0
GRID = 2.0 ** torch.linspace(-14, 6, 401, dtype=torch.float64)              # u/σ


def unit(w: Tensor) -> Tensor:
    """Return the distance from w to its neighbour away from 0 on bfloat16's grid, 0 at 0."""
    return torch.where(w == 0, 0.0, 2.0 ** (torch.frexp(w).exponent - 8).double())


def rounding(w: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gain g, P(lost) and Var[ε] of each entry of W for Δ ~ N(0, σ²): [out, in].

    sigma [out, 1]. Entries are sorted by u/σ into steps of 3.5 %.
    """
    x = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    normal = torch.softmax(-x * x / 2, 0)
    rounded = (x / GRID[:, None]).round() * GRID[:, None]                   # of Δ/σ: [401, 2001]
    gain, error = (rounded * x * normal).sum(-1), ((rounded - x) ** 2 * normal).sum(-1)
    fine = GRID < 0.2                                      # than the sum over x can tell
    gain = torch.where(fine, 1.0, gain)
    noise = torch.where(fine, GRID ** 2 / 12, (error - (1 - gain) ** 2).clamp(min=0))
    lost = torch.erf(GRID / 2 / math.sqrt(2))
    which = ((unit(w) / sigma).clamp(min=1e-5).log2() + 14).mul(20).round().long().clamp(0, 400)
    return gain[which], lost[which], noise[which] * sigma ** 2


def first_share(base: dict[str, Tensor], rank: int, rate: float) -> float:
    """Predict the share of entries that the merge of the first step loses."""
    lost = [rounding(w, torch.full((len(w), 1), SCALE * rate * math.sqrt(rank / 3 / w.shape[1])))[1]
            for w in base.values()]
    return torch.cat([x.flatten() for x in lost]).mean().item()


def make_base(seed: int, directory: Path) -> dict[str, Tensor]:
    """Write the demo's model with weights in bfloat16; return those that get a LoRA."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from three_policies.training.faults import process_group
    from three_policies.training.settings import load_config
    from three_policies.training.demo import make_demo_model
    from three_policies.training.tasks import make_task
    config = load_config([f"seed={seed}"])
    with process_group():
        path = make_demo_model(config, make_task(config.task, config.seed))
    model = AutoModelForCausalLM.from_pretrained(path).bfloat16()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(path).save_pretrained(directory)
    return {f"{name}.weight": x.weight.detach().float() for name, x in model.named_modules()
            if isinstance(x, torch.nn.Linear) and name != "lm_head"}


def train(seed: int, base: Path, rank: int, rate: float) -> Path:
    """Train a LoRA of all linear layers, one update a step; return its run's directory."""
    from three_policies import trainer
    name = f"merging-{seed}-{rank}-{rate:g}"
    code = trainer.main([
        f"seed={seed}", f"run={name}", f"policy.path={base}", f"policy.lora_rank={rank}",
        f"policy.lora_alpha={SCALE * rank:g}", "policy.lora_targets=all-linear",
        "rollout.engine=transformers", "rollout.quantize=null", "rollout.prompts=32",
        "train.mini_batches=1", "train.warmup_steps=0", f"train.lr={rate}", "task.eval_size=64",
        f"train.steps={STEPS[-1]}", "train.save_every=1", f"train.keep={STEPS[-1]}"])
    assert code == 0
    return Path("runs") / name


class Scored:
    """States that the base samples, at which models are compared by the exact KL(engine‖policy).

    It is E[k3] of a token, without sampling error.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.base = {name: x.clone() for name, x in self.model.named_parameters()}
        numbers = torch.randint(10, 99, (300, 2)).tolist()
        ids = AutoTokenizer.from_pretrained(directory)([f"{a}+{b}=" for a, b in numbers]).input_ids
        self.prompt = len(ids[0])
        self.tokens = self.model.generate(torch.tensor(ids), do_sample=True, max_new_tokens=4,
                                          pad_token_id=0)

    @torch.no_grad()
    def log_probs(self, changed: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        self.model.float().load_state_dict({**self.base, **changed}, strict=False)
        logits = self.model.to(dtype)(self.tokens).logits[:, self.prompt - 1:-1]
        return logits.double().log_softmax(-1)


def kl(mu: Tensor, pi: Tensor) -> float:
    return (mu.exp() * (mu - pi)).sum(-1).mean().item()


def measure(scored: Scored, run: Path, step: int) -> dict[str, float]:
    """Compare prediction and merge at one step of a run."""
    from safetensors.torch import load_file
    saved = load_file(run / f"checkpoints/step-{step:06d}/rank-00001.safetensors")
    delta, gain, noise, shares = {}, {}, {}, []
    for key in (key for key in saved if key.startswith("policy.") and ".lora_A." in key):
        a, b = saved[key].double(), saved[key.replace("lora_A", "lora_B")].double()
        name = key.removeprefix("policy.model.").replace(".lora_A.default", "")
        w, delta[name] = scored.base[name].detach(), SCALE * b @ a
        variance = (b @ a @ a.T * b).sum(-1, keepdim=True) / a.shape[1]
        sigma = SCALE * variance.sqrt().clamp(min=1e-12)
        gain[name], lost, noise[name] = rounding(w, sigma)
        shares.append(torch.stack([lost, (w + delta[name]).bfloat16() == w], -1).flatten(0, 1))
    base = {name: scored.base[name].detach().double() for name in delta}

    def moved(change):
        return {name: (base[name] + change(name)).float() for name in delta}
    policy = scored.log_probs(moved(delta.get))
    predicted = [kl(scored.log_probs(moved(lambda name: gain[name] * delta[name]
                                           + noise[name].sqrt() * torch.randn_like(base[name]))),
                    policy) for _ in range(8)]
    predicted_share, share = torch.cat(shares).mean(0).tolist()
    merges = {"merged": lambda name: (base[name] + delta[name]).float().bfloat16(),
              "grid": lambda name: base[name].bfloat16() + delta[name].bfloat16()}
    found = {how: kl(scored.log_probs({name: merge(name).float() for name in delta}), policy)
             for how, merge in merges.items()}
    kernels = kl(scored.log_probs({}, torch.bfloat16), scored.log_probs({}))
    return {"share_predicted": predicted_share, "share": share,
            "kl_predicted": sum(predicted) / len(predicted), "kl_merged": found["merged"],
            "kl_merged_bfloat16": found["grid"], "kl_kernels": kernels,
            "kl_of_the_update": kl(scored.log_probs({}), policy)}


def cells() -> dict[tuple[int, float, int], dict[str, float]]:
    """Return the means over the seeds of studies/merging/results.csv, by rank, rate and step."""
    with (HERE / "merging/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[int, float, int], dict[str, float]] = {}
    for rank, rate, step in ((*cell, step) for cell in CELLS for step in STEPS):
        own = [row for row in rows if (int(row["rank"]), float(row["rate"]), int(row["step"]))
               == (rank, rate, step)]
        assert len(own) == len(SEEDS)
        found[rank, rate, step] = {name: sum(float(row[name]) for row in own) / len(own)
                                   for name in rows[0] if name not in ("seed", "rank", "rate")}
    return found


def held(predicted: str, measured: str, tolerance: float) -> int:
    """Count the cells whose prediction misses what was measured by at most that share of it."""
    return sum(abs(x[predicted] / x[measured] - 1) <= tolerance for x in cells().values())


def table() -> tuple[list[str], list[list[str]]]:
    """Return predicted and measured shares and KLs of the table in appendix B."""
    header = ["rank", "rate η", "step", "share lost", "predicted", "KL of the merge", "predicted",
              "KL of the update"]
    return header, [[str(rank), f"{rate:g}", str(step), f"{x['share']:.3f}",
                     f"{x['share_predicted']:.3f}", f"{x['kl_merged']:.1e}",
                     f"{x['kl_predicted']:.1e}", f"{x['kl_of_the_update']:.1e}"]
                    for (rank, rate, step), x in cells().items() if step in (1, 4, 32)]


def main(command: str) -> None:
    rows, first = [], {cell: [] for cell in CELLS}
    for seed in SEEDS:
        directory = Path("runs") / f"merging-base-{seed}"
        base = make_base(seed, directory)
        torch.manual_seed(seed)
        for cell in CELLS:
            first[cell].append(first_share(base, *cell))
            if command == "run":
                scored, run = Scored(directory), train(seed, directory, *cell)
                rows += [{"seed": seed, "rank": cell[0], "rate": f"{cell[1]:g}", "step": step,
                          **{name: f"{x:.3g}" for name, x in measure(scored, run, step).items()}}
                         for step in STEPS]
    if command == "declare":
        lines = [f"  rank {rank}, rate {rate:g}: {sum(x) / len(x):.3f}"
                 for (rank, rate), x in first.items()]
        print("\n".join(["first_step_share:", *lines]))
        return
    with (HERE / "merging/results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1])
