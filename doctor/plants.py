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
from typing import Any

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


WEIGHTS = ("stale", "layer", "embedding", "head", "int4", "fp8", "lora", "int5")
VARIANTS = {
    "temperature": ("sampler", "trainer", "after"), "raw": ("tau", "top-p", "both"),
    "cut": ("top-p", "top-k", "min-p"), "shift": ("trainer+1", "trainer-1", "sampler+1",
                                                  "sampler-1"),
    "eos": ("zero", "bias", "pad"), "tool": ("zero",),
    "retokenised": ("swap", "split"), "padding": ("trainer", "sampler"),
    "window": ("window", "cut"), "context": ("bos", "template", "dropped", "prefix"),
    "in-flight": ("kept", "anew"), "penalty": ("repetition", "presence", "frequency"),
    "softcap": ("sampler", "trainer"), "dropout": ("trainer",), "flips": ("trainer",),
    "bf16-log-softmax": ("trainer", "sampler"), "stale": ("two", "three"), "weights": WEIGHTS,
    "healthy": ("same", "bf16-sampler", "bf16-trainer", "bf16-both", "order", "peaked")}
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
    versions: list[int] = []
    forced: dict[int, dict[int, int]] = {}

    for name in (cause, *([second] if second else [])):
        kinds = VARIANTS[name]
        kind = variant if variant and name == cause else kinds[seed % len(kinds)]
        drawn, trainer, record, edit = sides(of, name, kind, severity, g, drawn, trainer, record)
        edits += [(name, kind)] if edit else []
    if noise and not (cause == "raw" and drawn.top_p < 1):      # kept ids are replayed exactly
        drawn = replace(drawn, half=True)
        record = replace(record, half=True) if record else None

    with torch.no_grad():
        x = [p for p in prompts(g, of.vocabulary, groups) for _ in range(SAMPLES)]
        if "stale" in (cause, second):
            versions = ages_of(x, seed)
            rows, mu = drawn_by_age(of, drawn, versions, severity, x, g)
        else:
            if "tool" in (cause, second):
                forced = written_by_a_tool(x, severity, of.vocabulary, g)
            rows = draw(drawn, x, g, forced=forced)
            lp = log_probs(record or drawn, x, rows)
            mu = [pick(lp[i], y) for i, y in enumerate(rows)]

        if (cause == "healthy" and variant == "order") or (seed % 3 == 0 and not trainer.pads):
            lps = scored_in_parts(trainer, x, rows)
        else:
            lps = list(log_probs(trainer, x, rows))
        pi = [pick(lps[i], y) for i, y in enumerate(rows)]
        h = [-(a[:len(y)].exp() * a[:len(y)].clamp(min=-80)).sum(-1) for a, y in zip(lps, rows)]

        for name, kind in edits:
            rows, mu, pi = edited(name, kind, severity, g, of, x, rows, mu, pi, trainer, lps,
                                  forced)

    out = []
    for i, y in enumerate(rows):
        n = min(len(y), len(mu[i]), len(pi[i]))
        row: Row = {"prompt_ids": x[i], "token_ids": y[:n], "rollout_log_probs": mu[i][:n].tolist(),
                    "train_log_probs": pi[i][:n].tolist(), "entropy": h[i][:n].tolist()}
        if versions:
            row["weight_version"] = 10 - versions[i]
        out.append(row)
    return out


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
          trainer: Side, record: Side | None) -> tuple[Side, Side, Side | None, bool]:
    """Plant one cause: change sides, and say whether the columns are edited afterwards."""
    older = of.older[min(5, int(6 * severity))]
    tau = 1 + (-1 if int(severity * 97) % 2 else 1) * scaled(0.06, 0.45, severity)
    keep = 1 - scaled(0.03, 0.3, severity)
    changes: dict[str, Any] = {}

    if cause == "temperature":
        if kind == "trainer":
            return drawn, replace(trainer, tau=tau), record, False
        right = replace(trainer, after=tau) if kind == "after" else trainer
        return replace(drawn, tau=tau), right, record, False

    if cause == "raw":
        changes = {"top_p": keep} if kind == "top-p" else {"tau": tau}
        right = trainer if kind == "both" else replace(trainer, **changes)
        return replace(drawn, **changes), right, drawn, False

    if cause == "cut":
        changes = ({"top_k": largest(of, 1 - keep)} if kind == "top-k" else {"top_p": keep}
                   if kind == "top-p" else {"min_p": scaled(0.1, 0.4, severity)})
        return replace(drawn, **changes), trainer, record, False

    if cause == "padding":
        side = replace(trainer if kind == "trainer" else drawn, pads=True)
        return (drawn, side, record, False) if kind == "trainer" else (side, trainer, record, False)

    if cause == "window":
        wide = int(36 - 20 * severity)
        changes = {"window": wide} if kind == "window" else {"head_cut": wide}

    if cause == "context":
        tokens = torch.randint(3, of.vocabulary, (1 + int(5 * severity),), generator=g).tolist()
        changes = {"bos": {"template": (BOS,)}, "template": {"template": tuple(tokens)},
                   "dropped": {"dropped": 1 + int(2 * severity)},
                   "prefix": {"before": older, "until": 0}}[kind]

    if cause == "in-flight":
        at = int(8 + 20 * torch.rand(1, generator=g).item())
        changes = {"before": of.older[min(5, 2 + int(4 * severity))], "until": at,
                   "kept_cache": kind == "kept"}

    if cause == "penalty":
        changes = {"repetition": {"repetition": scaled(1.05, 1.6, severity)},
                   "presence": {"presence": scaled(0.2, 2, severity)},
                   "frequency": {"frequency": scaled(0.1, 1, severity)}}[kind]
        changes["seen_prompt"] = kind == "repetition"

    if cause == "softcap":
        top = logits_size(of)
        changes = {"softcap": top * scaled(1.5, 0.4, severity)}
        if kind == "trainer":
            return drawn, replace(trainer, **changes), record, False

    if cause == "dropout":
        return drawn, replace(trainer, dropout=scaled(0.01, 0.1, severity)), record, False
    if cause == "flips":
        return drawn, replace(trainer, flips=scaled(0.01, 0.08, severity)), record, False

    if cause == "bf16-log-softmax":
        side = {"grid": torch.bfloat16}
        if kind == "trainer":
            return drawn, replace(trainer, **side), record, False
        return drawn, trainer, replace(drawn, **side), False

    if cause == "weights":
        changes = {"model": other_weights(of, drawn.model, kind, severity, g)}

    if cause == "healthy":
        if kind in ("bf16-sampler", "bf16-both"):
            drawn = replace(drawn, half=True)
        if kind in ("bf16-trainer", "bf16-both"):
            trainer = replace(trainer, half=True)
        if kind == "peaked":
            drawn, trainer = (replace(s, tau=0.6) for s in (drawn, trainer))
            drawn = replace(drawn, half=True)
        return drawn, trainer, record, False

    record = replace(record, **changes) if record else None     # it records what was drawn
    return (replace(drawn, **changes), trainer, record,
            cause in ("shift", "eos", "tool", "retokenised"))


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
           x: list[list[int]], rows: list[list[int]], mu: list[Tensor], pi: list[Tensor],
           trainer: Side, lps: list[Tensor], forced: dict[int, dict[int, int]]
           ) -> tuple[list[list[int]], list[Tensor], list[Tensor]]:
    """Plant what happens to the columns after both programs have done their part."""
    mu, pi, rows = list(mu), list(pi), list(rows)

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

    if cause == "retokenised":
        for i in range(0, len(rows), max(3, int(16 - 12 * severity))):
            n = len(rows[i])
            if n > 6:
                a = int(1 + (n - 5) * torch.rand(1, generator=g).item())
                new = torch.randint(3, of.vocabulary, (2,), generator=g).tolist()
                y = list(rows[i])
                rows[i] = ([*y[:a], *new, *y[a + 2:]] if kind == "swap" else
                           [*y[:a], *new, *y[a + 1:]][:n])
        lp = log_probs(trainer, x, rows)
        pi = [pick(lp[i], y) for i, y in enumerate(rows)]
    return rows, mu, pi


def write(rows: list[Row], path: Path | str) -> None:
    """Write the rows as our JSON-lines."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
