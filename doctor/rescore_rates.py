"""Plant causes into tiny models, rescore, and count how often side, cause and value are right.

    python doctor/rescore_rates.py [--tune] [-v] [CAUSE …]

Rules and thresholds of doctor/rescore.py were chosen on TUNED. The rates are those of JUDGED:
other weights, prompts and draws. Without arguments the table goes to rescore-rates.txt.
"""

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from three_policies.doctor.dumps import Response
from three_policies.doctor.rescore import Rescored, rescore
from three_policies.estimators import sampling_log_probs
from three_policies.rollout import quantize_weights
from three_policies.training.shapes import pad_rows

VOCABULARY, OLDER = 40, 3
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    initializer_range=0.15, pad_token_id=0, eos_token_id=1, bos_token_id=2, head_dim=12)
KINDS: dict[str, dict[str, Any]] = {
    "Qwen2": dict(tie_word_embeddings=True), "Llama": dict(tie_word_embeddings=False),
    "Qwen3": dict(tie_word_embeddings=False),
    "Gemma2": dict(final_logit_softcapping=3.0, query_pre_attn_scalar=12, initializer_range=0.5),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen3Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                     decoder_sparse_step=1)}
TUNED = [("Qwen2", 0), ("Gemma2", 1), ("Mixtral", 2), ("Llama", 10)]
JUDGED = [("Qwen3", 41), ("Gemma2", 42), ("Qwen3Moe", 43)]


class Planted(NamedTuple):
    """A Planted is a dump with one fault, and what the fault is."""

    cause: str
    wanted: Any                    # the value that is to be found; None: none is
    side: str
    noise: str
    paths: list[str]               # of the model and its older checkpoints
    responses: list[Response]


def make_models(kind: str, seed: int, place: Path) -> tuple[Any, list[Any], list[str]]:
    """Return a model, its older checkpoints, newest first, and the directories of all of them.

    An update adds noise to the weights, of 3 % of their standard deviation.
    """
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    models, paths = [model], []
    for _ in range(OLDER):
        older = copy.deepcopy(models[-1])
        with torch.no_grad():
            for w in older.parameters():
                w += 0.03 * w.std().nan_to_num(0).clamp(min=0.01) * torch.randn_like(w)
        models.append(older)
    for k, each in enumerate(models):
        paths.append(str(place / f"{kind}-{seed}-{k}"))
        each.save_pretrained(paths[-1])
    return model, models[1:], paths


@torch.no_grad()
def sample(model: Any, prompts: list[list[int]], longest: int, readout) -> list[list[int]]:
    """Return a response to each prompt, drawn from what `readout` makes of the logits."""
    found = [list[int]() for _ in prompts]
    for _ in range(longest):
        rows = [p + y for p, y in zip(prompts, found)]
        z = model(pad_rows(rows, "right")[0]).logits.float()
        for i, (prompt, y) in enumerate(zip(prompts, found)):
            if y[-1:] != [1]:
                p = readout(z[i, len(rows[i]) - 1:len(rows[i])], prompt, y).softmax(-1)
                y.append(int(torch.multinomial(p, 1)))
    return found


def plain_readout(z: Tensor, prompt: list[int], tokens: list[int]) -> Tensor:
    return z


@torch.no_grad()
def score(model: Any, prompts, responses, change=lambda p: p, readout=plain_readout,
          log_softmax=lambda z: z.log_softmax(-1)) -> list[Tensor]:
    """Return each response's log-probs from the reference, which takes one row at a time."""
    found = []
    for prompt, y in zip(prompts, responses):
        before = change(prompt)
        z = model(torch.tensor([before + y])).logits[0, len(before) - 1:-1].float()
        z = torch.cat([readout(z[t:t + 1], prompt, y[:t]) for t in range(len(y))])
        found.append(log_softmax(z).float().gather(-1, torch.tensor(y)[:, None])[:, 0])
    return found


def penalised(kind: str, x: float):
    def readout(z: Tensor, prompt: list[int], tokens: list[int]) -> Tensor:
        z = z.clone()
        if kind == "repetition":
            ids = torch.tensor(sorted({*prompt, *tokens}))
            z[:, ids] = torch.where(z[:, ids] > 0, z[:, ids] / x, z[:, ids] * x)
        else:
            for v in tokens if kind == "frequency" else set(tokens):
                z[:, v] -= x
        return z
    return readout


def cut(**given: Any):
    return lambda z, *_: sampling_log_probs(z, **given)[0]


def with_weights(model: Any, weights: dict[str, Tensor]) -> Any:
    changed = copy.deepcopy(model)
    if model.config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    changed.load_state_dict({**model.state_dict(), **weights})
    return changed


def in_bfloat16(model: Any) -> Any:
    changed = copy.deepcopy(model).bfloat16()
    for b, a in zip(changed.buffers(), model.buffers()):
        b.data = a.data
    return changed


def fp8(w: Tensor) -> Tensor:
    if w.dim() < 2:
        return w
    scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
    return (w / scale).to(torch.float8_e4m3fn).float() * scale


@torch.no_grad()
def band(model: Any, prompts, responses, width: int) -> list[Tensor]:
    found = []
    for prompt, y in zip(prompts, responses):
        n = len(prompt) + len(y)
        gap = torch.arange(n)[:, None] - torch.arange(n)
        mask = torch.zeros(n, n).masked_fill((gap < 0) | (gap >= width), torch.finfo().min)
        z = model(torch.tensor([prompt + y]), attention_mask=mask[None, None]).logits
        z = z[0, len(prompt) - 1:-1].float().log_softmax(-1)
        found.append(z.gather(-1, torch.tensor(y)[:, None])[:, 0])
    return found


@torch.no_grad()
def alone(model: Any, prompts, responses, last: int) -> list[Tensor]:
    return [torch.stack([
        model(torch.tensor([(p + y[:t])[-last:]])).logits[0, -1].float().log_softmax(-1)[y[t]]
        for t in range(len(y))]) for p, y in zip(prompts, responses)]


def shifted(rows: list[Tensor], by: int) -> list[Tensor]:
    return [torch.roll(x, by) for x in rows]


def other_rows(rows: list[Tensor]) -> list[Tensor]:
    """Give each row the values of the one before it."""
    return [b[torch.arange(len(a)) % len(b)] for a, b in zip(rows, [rows[-1], *rows[:-1]])]


def dropped(model: Any, prompts, responses, p: float) -> list[Tensor]:
    changed = copy.deepcopy(model).train()
    for m in changed.modules():
        if hasattr(m, "attention_dropout"):
            m.attention_dropout = p
    return score(changed, prompts, responses)


Faulty = Callable[[Any, Any], list[Tensor]]             # of prompts and responses: log-probs
Plant = tuple[str, Any, Any, Faulty]                    # cause, parameter, sampling readout, fault


def plants(model: Any, older: list[Any], prompts, rng: Any) -> Iterator[Plant]:
    """Yield every plant; the order is that of the draws from `rng`."""
    def pick(*values): return values[int(torch.randint(len(values), (1,), generator=rng))]
    eager = in_bfloat16(model)
    eager.set_attn_implementation("eager")

    yield "none", None, plain_readout, partial(score, model)
    yield "none", None, heated(1.3), partial(score, model)
    yield "none", None, heated(0.7), partial(score, model)
    yield "none", None, plain_readout, partial(score, eager)
    yield from of_logits(model, pick)
    yield from of_rows(model, prompts, pick)
    yield from of_weights(model, older, pick)
    yield from of_contexts(model, older, pick)


def heated(τ: float): return lambda z, p, y: z / τ


def capped(x: float): return lambda z, p, y: x * (z / x).tanh()


def of_logits(model: Any, pick: Callable[..., Any]) -> Iterator[Plant]:
    """Yield what changes the distribution: temperatures, cuts, penalties, the softcap."""
    def read_by(cause: str, value: Any, readout: Any) -> Plant:
        return cause, value, readout, partial(score, model, readout=readout)

    τ = pick(0.7, 0.8, 1.2)
    yield read_by("raw", τ, heated(τ))
    for τ in (pick(0.6, 0.7, 0.8), pick(1.1, 1.25, 1.5)):
        yield read_by("temperature", τ, heated(τ))
    τ = pick(0.7, 0.85, 1.3)
    yield "temperature", τ, plain_readout, lambda ps, ys, τ=τ: [x / τ for x in score(model, ps, ys)]

    for given in (dict(top_p=pick(0.8, 0.9, 0.95)), dict(top_k=pick(3, 5, 10)),
                  dict(min_p=pick(0.02, 0.05, 0.1))):
        yield read_by("cut", next(iter(given.values())), cut(**given))

    for kind, x in (("repetition", pick(1.05, 1.2, 1.5)), ("presence", pick(0.3, 0.5, 1.0)),
                    ("frequency", pick(0.2, 0.5, 1.0))):
        yield read_by("penalty", x, penalised(kind, x))

    if getattr(model.config, "final_logit_softcapping", None):
        bare = copy.deepcopy(model)
        bare.config.final_logit_softcapping = None
        yield "softcap", None, plain_readout, partial(score, bare)
    else:
        x = pick(2.0, 5.0, 8.0)
        yield read_by("softcap", x, capped(x))


def of_rows(model: Any, prompts, pick: Callable[..., Any]) -> Iterator[Plant]:
    """Yield what a program does to a row: shifts, padding, windows, a log-softmax in bfloat16."""
    by_one = pick(1, -1)
    yield "shift", None, plain_readout, lambda ps, ys: shifted(score(model, ps, ys), by_one)
    pad = pick(0, 0, 3)
    most = max(map(len, prompts)) + pad
    yield "padding", most, plain_readout, partial(
        score, model, change=lambda p: [0] * (most - len(p)) + p)

    W = pick(12, 16, 20)
    yield "window", W, plain_readout, lambda ps, ys: band(model, ps, ys, W)
    yield "window", W, plain_readout, lambda ps, ys: alone(model, ps, ys, W)
    yield "bf16-log-softmax", None, plain_readout, partial(
        score, model, log_softmax=lambda z: z.bfloat16().log_softmax(-1))
    yield "dropout", None, plain_readout, lambda ps, ys: dropped(model, ps, ys, 0.1)


def of_weights(model: Any, older: list[Any], pick: Callable[..., Any]) -> Iterator[Plant]:
    """Yield other weights: an older checkpoint's, whole or a part, and rounded ones."""
    k = pick(1, 2, 3)
    yield "weights", k, plain_readout, partial(score, older[k - 1])
    for place in (f"layers.{pick(0, 1)}.", "embed", "head"):
        k = pick(1, 2, 3)
        chosen = {n: w for n, w in older[k - 1].state_dict().items() if place in n}
        if place == "head" and model.config.tie_word_embeddings:
            continue
        yield "weights", (place, k), plain_readout, partial(score, with_weights(model, chosen))
    for bits in (pick(3, 4, 5), pick(6, 7, 8)):
        yield "weights", bits, plain_readout, partial(score, with_weights(
            model, dict(quantize_weights(model.state_dict().items(), bits))))
    yield "weights", "fp8", plain_readout, partial(score, with_weights(
        model, {n: fp8(w) for n, w in model.state_dict().items()}))


def of_contexts(model: Any, older: list[Any], pick: Callable[..., Any]) -> Iterator[Plant]:
    """Yield other prompts, other rows, and an update in the middle of a response."""
    yield "context", None, plain_readout, partial(score, model, change=lambda p: p[1:])
    yield "context", None, plain_readout, partial(score, model, change=lambda p: p[:1] + p)
    yield "unknown", None, plain_readout, lambda ps, ys: other_rows(score(model, ps, ys))
    k, t = pick(1, 2, 3), pick(5, 9, 14)
    yield "in-flight", (t, k), plain_readout, lambda ps, ys: [
        torch.cat([a[:t], b[t:]])
        for a, b in zip(score(older[k - 1], ps, ys), score(model, ps, ys))]


def right(wanted: Any, found: Any) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, float):          # two digits
        return isinstance(found, float) and abs(found / wanted - 1) < 0.01
    if isinstance(wanted, str):
        return wanted in str(found)
    if isinstance(wanted, tuple):
        if isinstance(wanted[0], str):
            return isinstance(found, tuple) and wanted[0].strip(".") in found[0] + "." \
                and found[1] == wanted[1]
        return found == wanted
    return found == wanted or (isinstance(found, tuple) and wanted in found)


def planted(kind: str, seed: int, place: Path, groups: int = 8, longest: int = 32,
            only: Sequence[str] = ()) -> Iterator[Planted]:
    """Yield every plant on both sides, each with one of three noises in turn: 4 rows a prompt.

    The trainer's faults are planted on samples of the plain model. Log-probs of a side without a
    fault are in float32, or in bfloat16 if the noise is "other". If it is "both", the faulty side
    has the noise, too.
    """
    model, older, paths = make_models(kind, seed, place)
    rng, noisy, drawn = torch.Generator().manual_seed(seed), in_bfloat16(model), dict[Any, Any]()
    lengths = (5, 9, 14, 7, 11, 6, 12, 8)[:groups]
    prompts = [x for n in lengths
               for x in [torch.randint(3, VOCABULARY, (n,), generator=rng).tolist()] * 4]

    for i, (cause, wanted, readout, faulty) in enumerate(plants(model, older, prompts, rng)):
        for side in ("rollout", "train"):
            if (only and cause not in only) or (side == "train" and cause in ("none", "raw")):
                continue

            read = plain_readout if side == "train" else readout
            noise = ("none", "other", "both")[(i + seed + (side == "train")) % 3]
            edge = cause == "cut" and noise == "both"        # noise decides who is in the set too
            if read not in drawn:
                torch.manual_seed(1000 * seed + i)
                ys = sample(noisy if edge else model, prompts, longest, read)
                drawn[read] = ys, score(model, prompts, ys), score(noisy, prompts, ys)

            ys, good, rounded = drawn[read]
            bad = faulty(prompts, ys)
            if edge:
                bad = score(noisy, prompts, ys, readout=readout)
                if side == "rollout":            # a row alone may be routed as in no batch
                    bad = [torch.where(x.isinf(), y, x) for x, y in zip(bad, rounded)]
            elif noise == "both" and cause not in ("bf16-log-softmax", "in-flight", "none"):
                bad = [x + (a - b) for x, a, b in zip(bad, rounded, good)]
            good = good if noise == "none" else rounded
            if cause == "raw":                       # the trainer is at the temperature, as it was
                bad, good = good, bad

            μ, π = ([x.clamp(-30, 0).tolist() for x in column]
                    for column in ((bad, good) if side == "rollout" else (good, bad)))
            yield Planted(cause, wanted, side, noise, paths, [
                Response(n, y, a, b, p, [True] * len(y))
                for n, (p, y, a, b) in enumerate(zip(prompts, ys, μ, π))])


def verdict(plant: Planted, found: Rescored) -> tuple[bool, bool, bool]:
    """Return whether the guilty side, the cause and its value are right."""
    own = found.rollout if plant.side == "rollout" else found.train
    healthy = plant.cause == "none"
    cause = own.cause == (None if healthy else plant.cause)
    return (found.guilty == ("none" if healthy else plant.side), cause,
            cause and right(plant.wanted, own.parameter))


def table(sums: dict[str, list[int]]) -> str:
    """Return the rates by cause, and those of all plants but the healthy ones."""
    faulty = [sum(x) for x in zip(*(n for cause, n in sums.items() if cause != "none"))]
    rows = [*sums.items(), *([("**all faults**", faulty)] * bool(faulty))]
    return "\n".join(["| cause | plants | side | cause | value |", "|---|--:|--:|--:|--:|", *(
        f"| {cause} | {n} | " + " | ".join(f"{x / n:.1%}" for x in good) + " |"
        for cause, (n, *good) in rows)])


def main(arguments: list[str]) -> None:
    """Print what was missed and the rates; write those of a whole JUDGED to a file."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    only = [x for x in arguments if not x.startswith("-")]
    sums, missed = dict[str, list[int]](), list[str]()
    models = TUNED if "--tune" in arguments else JUDGED

    with tempfile.TemporaryDirectory() as place:
        for kind, seed in models:
            for plant in planted(kind, seed, Path(place), only=only):
                found = rescore(plant.paths[0], plant.paths[1:], plant.responses)
                good = verdict(plant, found)
                sums[plant.cause] = [a + b for a, b in zip(
                    sums.get(plant.cause, [0] * 4), (1, *good))]
                own = found.rollout if plant.side == "rollout" else found.train
                line = (f"* {kind} {seed}, {plant.cause} {plant.wanted or ''} at {plant.side}, "
                        f"noise: {plant.noise}. Found at {found.guilty}: {own.name}")
                missed += [line] * (not all(good))
                if not all(good) or "-v" in arguments:
                    print(line, flush=True)

            if not arguments:
                Path(__file__).with_name("rescore-rates.txt").write_text("\n".join([
                    "# How often rescoring is right", "",
                    "Written by `python doctor/rescore_rates.py`, on tiny models with seeds: "
                    + ", ".join(f"{a} {b}" for a, b in models[:models.index((kind, seed)) + 1])
                    + ".", "A plant has 32 responses of at most 32 tokens; \"none\" is a healthy "
                    "pair, \"unknown\" a", "fault that no row of the table has.", "",
                    table(sums), "", "Missed:", "", *missed, ""]))
    print(table(sums))


if __name__ == "__main__":
    main(sys.argv[1:])
