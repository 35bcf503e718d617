"""A plant is a dump with a known cause: a tiny model from a seed, with one fault in it.

A `Side` is what one program believes: weights, a context, and what it does to the logits. A dump
takes three of them: the one that tokens are drawn from, the one that log μ is recorded of, and the
trainer's. In a healthy pair all three are the same up to rounding.

    dump = plant(subject(0), "temperature", seed=1, severity=0.5)      # severity in [0, 1]
    write(dump, "dump.jsonl")
"""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from three_policies.doctor.sides import (BOS, EOS, PAD, Side, Subject, draw, log_probs, logits,
                                         pick, prompts)


def scaled(low: float, high: float, severity: float) -> float:
    return low * (high / low) ** severity


def noisy(model: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a copy of the model with every matrix changed."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in other.named_parameters():
            if p.ndim >= 2:
                p.copy_(change(name, p))
    return other


def rounded(bits: int) -> Callable[[str, Tensor], Tensor]:
    def change(_: str, p: Tensor) -> Tensor:
        step = p.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (p / step.clamp(min=1e-9)).round() * step
    return change


def lora(g: torch.Generator, size: float) -> Callable[[str, Tensor], Tensor]:
    def change(_: str, p: Tensor) -> Tensor:
        a, b = torch.randn(p.shape[-2], 2, generator=g), torch.randn(2, p.shape[-1], generator=g)
        return p + size * p.std() * (a @ b)
    return change


WEIGHTS = ("stale", "layer", "embedding", "head", "int4", "fp8", "lora", "int5", "rotary")
VARIANTS = {
    "temperature": ("sampler", "trainer", "after"), "raw": ("tau", "top-p", "both"),
    "cut": ("top-p", "top-k", "min-p"), "shift": ("trainer+1", "trainer-1", "sampler+1",
                                                  "sampler-1"),
    "eos": ("zero", "bias", "pad"), "tool": ("zero",),
    "retokenised": ("swap", "split"), "padding": ("trainer", "sampler"),
    "window": ("window", "cut"), "context": ("bos", "template", "dropped", "prefix", "rows"),
    "first-token": ("packed", "raised"), "order": ("blocks", "zigzag"),
    "in-flight": ("kept", "anew"), "penalty": ("repetition", "presence", "frequency"),
    "softcap": ("sampler", "trainer"), "scatter": ("dropout", "packed"), "flips": ("trainer",),
    "bf16-log-softmax": ("trainer", "sampler"), "stale": ("two", "three"), "weights": WEIGHTS,
    "healthy": ("same", "bf16-sampler", "bf16-trainer", "bf16-both", "order", "peaked"),
    "decode": ("forgets", "another")}         # the last, since a cause's place decides its seed
PENALTIES = {"repetition": (1.05, 1.6), "presence": (0.2, 2), "frequency": (0.1, 1)}
EDITED = ("shift", "eos", "tool", "retokenised", "first-token", "order")  # of columns, at the end
OF_THE_TRAINER = ("trainer", "rows", "dropout", "packed", "another")     # kinds of its side alone
Row = dict[str, Any]
SAMPLES = 8                             # responses to a prompt


def plant(of: Subject, cause: str, seed: int, severity: float = 0.5, variant: str | None = None,
          noise: bool = False, second: str | None = None, groups: int = 16) -> list[Row]:
    """Return the rows of a dump with `cause` planted; `noise`: one engine computes in bfloat16."""
    g = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    drawn = trainer = ending(of.side, g) if "eos" in (cause, second) else of.side
    record: Side | None = None
    edits: list[tuple[str, str]] = []

    for name in (cause, *([second] if second else [])):
        kinds = VARIANTS[name]
        kind = variant if variant and name == cause else kinds[seed % len(kinds)]
        drawn, trainer, record = sides(of, name, kind, severity, g, drawn, trainer, record)
        edits += [(name, kind)] if name in EDITED else []
    if noise and not (cause == "raw" and drawn.top_p < 1):      # kept ids are replayed exactly
        drawn = replace(drawn, half=True)
        record = replace(record, half=True) if record else None

    with torch.no_grad():
        x = [p for p in prompts(g, of.vocabulary, groups) for _ in range(SAMPLES)]
        versions = ages_of(x, seed) if "stale" in (cause, second) else []
        forced: dict[int, dict[int, int]] = {}
        if versions:
            rows, mu = drawn_by_age(of, drawn, versions, severity, x, g)
        else:
            if "tool" in (cause, second):
                forced = written_by_a_tool(x, severity, of.vocabulary, g)
            rows = draw(drawn, x, g, forced=forced)
            mu = of_tokens(log_probs(record or drawn, x, rows), rows)

        in_parts = (cause == "healthy" and variant == "order") or (seed % 3 == 0
                                                                   and not trainer.pads)
        lps = scored_in_parts(trainer, x, rows) if in_parts else list(log_probs(trainer, x, rows))
        found = Columns(rows, mu, of_tokens(lps, rows))
        h = [-(a[:len(y)].exp() * a[:len(y)].clamp(min=-80)).sum(-1) for a, y in zip(lps, rows)]
        for name, kind in edits:
            found = edited(name, kind, severity, g, of, x, found, trainer, lps, forced)
    return [row_of(i, x[i], found, h[i], versions) for i in range(len(x))]


class Columns(NamedTuple):
    """The Columns are a dump's tokens, their log μ and the trainer's log-probs, by response."""

    rows: list[list[int]]
    mu: list[Tensor]
    pi: list[Tensor]


def of_tokens(lps: Tensor | list[Tensor], rows: list[list[int]]) -> list[Tensor]:
    return [pick(lps[i], y) for i, y in enumerate(rows)]


def row_of(i: int, prompt: list[int], of: Columns, entropy: Tensor, versions: list[int]) -> Row:
    """Return the dump's row of a response, cut to the shortest of its columns."""
    y, mu, pi = of.rows[i], of.mu[i], of.pi[i]
    n = min(len(y), len(mu), len(pi))
    row: Row = {"prompt_ids": prompt, "token_ids": y[:n], "rollout_log_probs": mu[:n].tolist(),
                "train_log_probs": pi[:n].tolist(), "entropy": entropy[:n].tolist()}
    return row | ({"weight_version": 10 - versions[i]} if versions else {})


def ending(side: Side, g: torch.Generator) -> Side:
    """Return the side with an end token so likely that a third of the responses have one."""
    x = prompts(g, len(side.bias))[:8]
    for _ in range(12):
        if sum(y[-1] == EOS for y in draw(side, x, g)) >= 3:
            break
        raised = side.bias.clone()
        raised[EOS] += 3
        side = replace(side, bias=raised)
    return side


def ages_of(x: list[list[int]], seed: int) -> list[int]:
    """Return how many updates ago the weights of each row were made; a group has one age."""
    ages = [0, 1] if seed % 2 else [0, 2, 4]
    return [ages[(i // SAMPLES) % len(ages)] for i in range(len(x))]


def drawn_by_age(of: Subject, drawn: Side, versions: list[int], severity: float,
                 x: list[list[int]], g: torch.Generator) -> tuple[list[list[int]], list[Tensor]]:
    """Draw each row by the weights of its age; return the rows and their log μ."""
    rows, mu = [list[int]() for _ in x], [torch.zeros(0)] * len(x)
    for age in sorted(set(versions)):
        side = replace(drawn, model=of.older[age - 1] if age else drawn.model)
        if age and severity > 0.3:
            side = replace(side, model=of.older[min(5, age + int(2 * severity))])
        chosen = [i for i, a in enumerate(versions) if a == age]
        part = draw(side, [x[i] for i in chosen], g)
        lp = log_probs(side, [x[i] for i in chosen], part)
        for j, i in enumerate(chosen):
            rows[i], mu[i] = part[j], pick(lp[j], part[j])
    return rows, mu


def written_by_a_tool(x: list[list[int]], severity: float, vocabulary: int,
                      g: torch.Generator) -> dict[int, dict[int, int]]:
    """Return {row: {place: token}} for the tokens that nobody samples."""
    every, span = (1 if severity > 0.5 else 3), 2 + int(6 * severity)
    forced = {}
    for i in range(0, len(x), every):
        at = int(torch.randint(1, 20, (1,), generator=g))
        forced[i] = {t: int(torch.randint(3, vocabulary, (1,), generator=g))
                     for t in range(at, at + span)}
    return forced


def scored_in_parts(trainer: Side, x: list[list[int]], rows: list[list[int]]) -> list[Tensor]:
    """Score the rows in batches of another order: other sums, other rounding."""
    order = sorted(range(len(x)), key=lambda i: len(x[i]))
    found: dict[int, Tensor] = {}
    for part in (order[i:i + 32] for i in range(0, len(order), 32)):
        found |= zip(part, log_probs(trainer, [x[i] for i in part], [rows[i] for i in part]))
    return [found[i] for i in range(len(x))]


def sides(of: Subject, cause: str, kind: str, severity: float, g: torch.Generator, drawn: Side,
          trainer: Side, record: Side | None) -> tuple[Side, Side, Side | None]:
    """Plant one cause: return the sides that draw, that score, and that record if it is another."""
    if cause == "healthy":
        return *noisy_kernels(kind, drawn, trainer), record

    changes = changes_of(of, cause, kind, severity, g, drawn.model)
    if cause == "raw":
        right = trainer if kind == "both" else replace(trainer, **changes)
        return replace(drawn, **changes), right, drawn
    if kind in OF_THE_TRAINER:
        return drawn, replace(trainer, **changes), record
    if cause == "bf16-log-softmax":
        return drawn, trainer, replace(drawn, **changes)
    if cause == "temperature" and kind == "after":
        trainer = replace(trainer, after=changes["tau"])
    if record and cause not in ("temperature", "cut", "padding"):
        record = replace(record, **changes)                     # it records what was drawn
    return replace(drawn, **changes), trainer, record


def noisy_kernels(kind: str, drawn: Side, trainer: Side) -> tuple[Side, Side]:
    """Return both sides of a healthy pair, which differ by rounding at most."""
    if kind == "peaked":
        drawn, trainer = (replace(side, tau=0.6) for side in (drawn, trainer))
    if kind in ("bf16-sampler", "bf16-both", "peaked"):
        drawn = replace(drawn, half=True)
    if kind in ("bf16-trainer", "bf16-both"):
        trainer = replace(trainer, half=True)
    return drawn, trainer


def changes_of(of: Subject, cause: str, kind: str, severity: float, g: torch.Generator,
               model: Any) -> dict[str, Any]:
    """Return the fields of a `Side` that a cause changes; those that edit columns change none."""
    def size(low: float, high: float) -> float: return scaled(low, high, severity)

    tau = 1 + (-1 if int(severity * 97) % 2 else 1) * size(0.06, 0.45)
    keep, older = 1 - size(0.03, 0.3), of.older[min(5, int(6 * severity))]
    of_any_kind: dict[str, dict[str, Any]] = {
        "temperature": {"tau": tau}, "padding": {"pads": True},
        "flips": {"flips": size(0.01, 0.08)}, "bf16-log-softmax": {"grid": torch.bfloat16}}
    if cause in of_any_kind:
        return of_any_kind[cause]

    match cause, kind:
        case "raw" | "cut", "top-p":
            return {"top_p": keep}
        case "raw", _:
            return {"tau": tau}
        case "cut", "top-k":
            return {"top_k": largest(of, 1 - keep)}
        case "cut", "min-p":
            return {"min_p": size(0.1, 0.4)}
        case "scatter", _:
            return {"packed": True} if kind == "packed" else {"dropout": size(0.01, 0.1)}
        case "window", _:
            return {"window" if kind == "window" else "head_cut": int(36 - 20 * severity)}
        case "context", "rows":
            return {"swapped": size(0.06, 1)}
        case "context", _:
            return other_context(of, kind, severity, g, older)
        case "in-flight", _:
            at = int(8 + 20 * torch.rand(1, generator=g).item())
            return {"before": of.older[min(5, 2 + int(4 * severity))], "until": at,
                    "kept_cache": kind == "kept"}
        case "penalty", _:
            return {kind: size(*PENALTIES[kind]), "seen_prompt": kind == "repetition"}
        case "softcap", _:
            return {"softcap": logits_size(of) * size(1.5, 0.4)}
        case "decode", "forgets":
            return {"forgets": 1 + int(14 * severity)}
        case "decode", _:
            return {"another": SAMPLES}
        case "weights", "rotary":
            return {"stretch": size(0.1, 1)}
        case "weights", _:
            return {"model": other_weights(of, model, kind, severity, g)}
    return {}


def other_context(of: Subject, kind: str, severity: float, g: torch.Generator,
                  older: Any) -> dict[str, Any]:
    tokens = torch.randint(3, of.vocabulary, (1 + int(5 * severity),), generator=g).tolist()
    return {"bos": {"template": (BOS,)}, "template": {"template": tuple(tokens)},
            "dropped": {"dropped": 1 + int(2 * severity)},
            "prefix": {"before": older, "until": 0}}[kind]


def other_weights(of: Subject, model: Any, kind: str, severity: float, g: torch.Generator) -> Any:
    """Return the model with the weights that `kind`, one of WEIGHTS, makes of its own."""
    size = scaled(0.02, 0.12, severity) / 2
    if kind == "stale":
        stale = dict(of.older[min(5, 1 + int(5 * severity))].named_parameters())
        return noisy(model, lambda name, _: stale[name])
    if part := {"layer": ".layers.0.", "embedding": "embed", "head": "head"}.get(kind):
        return noisy(model, lambda name, p: p + 3 * size * p.std() * torch.randn(
            p.shape, generator=g) if part in name else p)
    return noisy(model, {"int4": rounded(4), "int5": rounded(5), "lora": lora(g, size),
                         "fp8": lambda _, p: p.to(torch.float8_e4m3fn).float()}[kind])


def largest(of: Subject, loss: float) -> int:
    """Return the largest k, at least 2, whose top-k cuts so much mass on average."""
    with torch.no_grad():
        g = torch.Generator().manual_seed(0)
        x = prompts(g, of.vocabulary)[:8]
        rows = draw(of.side, x, g, 12)
        lp = log_probs(of.side, x, rows)
        p = torch.cat([lp[i, :len(y)] for i, y in enumerate(rows)]).exp()
    kept = p.sort(-1, descending=True).values.cumsum(-1).mean(0)
    return max(2, int((kept <= 1 - loss).sum()))


def logits_size(of: Subject) -> float:
    """Return the 99th percentile of |logit|, on a few prompts."""
    with torch.no_grad():
        x = prompts(torch.Generator().manual_seed(0), of.vocabulary)[:4]
        z = logits(of.side, x, [[] for _ in x], 1)
        return z[z > -29].abs().quantile(0.99).item()


def edited(cause: str, kind: str, severity: float, g: torch.Generator, of: Subject,
           x: list[list[int]], found: Columns, trainer: Side, lps: list[Tensor],
           forced: dict[int, dict[int, int]]) -> Columns:
    """Plant what happens to the columns after both programs have done their part."""
    rows, mu, pi = list(found.rows), list(found.mu), list(found.pi)
    if cause == "shift":
        column, by = (pi if "trainer" in kind else mu), (1 if "+" in kind else -1)
        column[:] = [c.roll(by) for c in column]
        for c in column:
            if len(c):
                c[0 if by > 0 else -1] = 0.0

    if cause == "eos":
        for i, y in enumerate(rows):
            if y[-1] == EOS:
                if kind == "zero":
                    mu[i][-1] = 0.0
                elif kind == "bias":
                    pi[i][-1] -= scaled(0.4, 4, severity)
                else:
                    pi[i][-1] = lps[i][len(y) - 1, PAD]

    if cause == "tool":
        for i, written in forced.items():
            for t in written:
                if t < len(mu[i]):
                    mu[i][t] = 0.0

    if cause == "first-token":
        for i, y in enumerate(rows):                # of a packed batch: what ends the row before
            of_other = lps[i - 1][len(rows[i - 1]) - 1, y[0]]
            pi[i][0] = of_other if kind == "packed" else pi[i][0] - scaled(0.3, 3, severity)

    if cause == "order":
        pi = [of_blocks(kind, severity, len(x[i]), column) for i, column in enumerate(pi)]

    if cause == "retokenised":
        rows = retokenised(kind, severity, g, of.vocabulary, rows)
        pi = of_tokens(log_probs(trainer, x, rows), rows)
    return Columns(rows, mu, pi)


def of_blocks(kind: str, severity: float, start: int, column: Tensor) -> Tensor:
    """Return a column whose blocks stand in another order, as of a context split over devices.

    `zigzag`: the rank k of n has the chunks k and 2n − 1 − k of the whole sequence, prompt too, and
    the chunks are joined as the ranks have them. `blocks`: neighbours of one length change places.
    """
    whole = torch.cat([column.new_full((start,), -3.0), column])
    ranks, width = (2, 4)[severity > 0.5], 3 + int(8 * (1 - severity))
    if kind == "zigzag":
        chunks = whole.tensor_split(2 * ranks)
        order = [k for rank in range(ranks) for k in (rank, 2 * ranks - 1 - rank)]
        return torch.cat([chunks[k] for k in order])[start:]
    chunks = column.split(width)
    pairs = [chunks[k:k + 2] for k in range(0, len(chunks), 2)]
    return torch.cat([part for pair in pairs for part in (
        pair[::-1] if len(pair[-1]) == width else pair)])


def retokenised(kind: str, severity: float, g: torch.Generator, vocabulary: int,
                rows: list[list[int]]) -> list[list[int]]:
    """Return the rows with two tokens replaced in some: by two others, or a token by two."""
    rows = list(rows)
    for i in range(0, len(rows), max(3, int(16 - 12 * severity))):
        y, n = list(rows[i]), len(rows[i])
        if n > 6:
            a = int(1 + (n - 5) * torch.rand(1, generator=g).item())
            new = torch.randint(3, vocabulary, (2,), generator=g).tolist()
            rows[i] = ([*y[:a], *new, *y[a + 2:]] if kind == "swap" else
                       [*y[:a], *new, *y[a + 1:]][:n])
    return rows


def write(rows: list[Row], path: Path | str) -> None:
    """Write the rows as our JSON-lines."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
