"""Dumps with a known cause: tiny models with weights from a seed, and one fault planted in each.

A `Side` is what one program believes: weights, a context, and what it does to the logits. A dump
takes three of them: the one that tokens are drawn from, the one that log μ is recorded of, and the
trainer's. In a healthy pair all three are the same up to rounding.

    dump = plant(subject(0), "temperature", seed=1, severity=0.5)      # severity in [0, 1]
    write(dump, "dump.jsonl")
"""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from estimators import sampling_log_probs

ARCHITECTURES = ("Qwen2", "Llama", "Mixtral", "Gemma2", "Qwen2Moe", "Mistral", "Olmo2", "Qwen3")
EOS, PAD, BOS = 0, 1, 2


# ----------------------------------------------------------------------- models and their sides

@dataclass(frozen=True)
class Side:
    """One program's view: the weights, the context they see, and what becomes of their logits."""

    model: Any
    bias: Tensor                        # [V]: a long tail of rare tokens, and how likely the end is
    tau: float = 1.0
    after: float = 1.0                  # log-probs are divided by it, after the softmax
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    softcap: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seen_prompt: bool = True            # the penalty counts the prompt's tokens too
    window: int = 0                     # only so many last tokens are seen
    head_cut: int = 0                   # or: positions beyond it lose the prompt
    pads: bool = False                  # the padding on the left is attended to, and counts
    template: tuple[int, ...] = ()      # stands before every prompt
    dropped: int = 0                    # so many first tokens of the prompt are missing
    before: "Any | None" = None         # weights that computed keys and values up to `until`
    until: int = 0                      # a token of the response; 0: the prompt alone
    kept_cache: bool = True             # False: after `until` all is computed anew
    dropout: float = 0.0
    flips: float = 0.0                  # share of tokens whose router sees noise
    half: bool = False                  # weights and activations in bfloat16
    grid: Any = None                    # the dtype of the log-softmax


class Subject(NamedTuple):
    """A model to plant faults in: clean side, prompts, and its checkpoints of earlier updates."""

    name: str
    side: Side
    vocabulary: int
    older: list[Any]                    # older[k]: k + 1 updates ago


def build(architecture: str, seed: int, vocabulary: int) -> Any:
    """Return a model of two or three layers, float32, weights from `seed`."""
    import transformers
    torch.manual_seed(seed)
    moe = {"Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
           "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                        "shared_expert_intermediate_size": 32},
           "Gemma2": {"head_dim": 16, "sliding_window": 4096, "final_logit_softcapping": None},
           "Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": None}}.get(architecture, {})
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2 + seed % 2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        tie_word_embeddings=False, initializer_range=0.07 * 3 ** (seed * 5 % 7 / 6),
        eos_token_id=EOS, pad_token_id=PAD, bos_token_id=BOS, attn_implementation="eager", **moe)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval()


def head(model: Any) -> Any:
    return model.get_output_embeddings().weight


def subject(seed: int, architecture: str | None = None) -> Subject:
    """Return a model with a mean entropy of 0.3 to 3 nats and a vocabulary of 30 to 500."""
    g = torch.Generator().manual_seed(seed)
    pick = torch.rand(5, generator=g).tolist()
    architecture = architecture or ARCHITECTURES[seed % len(ARCHITECTURES)]
    vocabulary = int(30 * (500 / 30) ** pick[0])
    model = build(architecture, seed, vocabulary)
    bias = -(0.2 + pick[1]) * torch.arange(1, vocabulary + 1).log()[
        torch.randperm(vocabulary, generator=g)]
    bias[EOS], bias[PAD], bias[BOS] = bias.max() + 0.0, -30, -30
    side = Side(model, bias)
    goal = 0.3 * 10 ** (0.9 * pick[2])
    goal = min(goal, 0.75 * math.log(vocabulary))
    probe = prompts(g, vocabulary)[:8]
    low, high, original = 0.02, 60.0, head(model).data.clone()
    for _ in range(9):                              # the scale of the logits, by bisection
        middle = math.sqrt(low * high)
        head(model).data = original * middle
        rows = draw(side, probe, g, 12)
        lp = log_probs(side, probe, rows)
        entropy = -(lp.exp() * lp.clamp(min=-60)).sum(-1)
        mean = torch.cat([entropy[i, :len(y)] for i, y in enumerate(rows)]).mean().item()
        low, high = (middle, high) if mean > goal else (low, middle)
    for step in range(12):                          # the end token: half of the responses have one
        ended = sum(y[-1] == EOS for y in draw(side, probe, g, 40)) / 8
        if 0.3 <= ended <= 0.8:
            break
        bias[EOS] += (5 if ended < 0.5 else -5) * 0.8 ** step
    older = [copy.deepcopy(model) for _ in range(6)]
    learn(side, older, g, lr=10 ** (-3.5 + 0.7 * pick[4]))
    return Subject(f"{architecture}-{seed}", side, vocabulary, older)


def learn(side: Side, older: list[Any], g: torch.Generator, lr: float) -> None:
    """Take updates of REINFORCE with a made-up reward, and keep the weights before each."""
    model, n = side.model, len(older)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    liked = torch.rand(len(side.bias), generator=g)
    for k in range(n):
        older[n - 1 - k].load_state_dict(model.state_dict())
        x = prompts(g, len(side.bias))[:8] * 3
        rows = draw(side, x, g, 16)
        reward = torch.tensor([liked[y].mean() for y in rows])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        with torch.enable_grad():
            lp = log_probs(side, x, rows)
            chosen = torch.stack([pick(lp[i], y).sum() for i, y in enumerate(rows)])
            loss = -(advantage * chosen).mean() / 16
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    for p in model.parameters():
        p.grad = None


def prompts(g: torch.Generator, vocabulary: int, n: int = 16) -> list[list[int]]:
    lengths = torch.randint(4, 15, (n,), generator=g).tolist()
    return [[BOS, *torch.randint(3, vocabulary, (k,), generator=g).tolist()] for k in lengths]


def pick(lp: Tensor, y: list[int]) -> Tensor:
    return lp[:len(y)].gather(-1, torch.tensor(y, dtype=torch.long)[:, None])[:, 0]


# --------------------------------------------------------------------------------- log-probs

def seen_counts(side: Side, x: list[list[int]], rows: list[list[int]], width: int) -> Tensor:
    """How often each token stands before each place: [B, width, V]."""
    counts = torch.zeros(len(rows), width, len(side.bias))
    for i, y in enumerate(rows):
        if side.seen_prompt:
            for v in x[i]:
                counts[i, :, v] += 1
        for t, v in enumerate(y):
            counts[i, t + 1:, v] += 1
    return counts


def logits(side: Side, x: list[list[int]], rows: list[list[int]], width: int) -> Tensor:
    """Logits of each place of the responses: [B, width, V], width = longest response (+ 1)."""
    x = [list(side.template) + p[side.dropped:] for p in x]
    longest = max(map(len, x))
    length = longest + width
    ids = torch.full((len(x), length - 1), PAD)
    mask = torch.zeros_like(ids)
    for i, (p, y) in enumerate(zip(x, rows)):
        y = y[:width - 1]
        ids[i, longest - len(p):longest + len(y)] = torch.tensor(p + y)
        mask[i, 0 if side.pads else longest - len(p):] = 1
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    n = ids.shape[1]
    allowed = torch.tril(torch.ones(n, n, dtype=torch.bool)) & mask[:, None].bool()
    if side.window:
        allowed &= (torch.arange(n)[:, None] - torch.arange(n)) < side.window
    if side.head_cut:                   # beyond the limit, what is further back is not seen
        far = places[:, :, None] >= side.head_cut
        allowed &= ~(far & (places[:, None] < places[:, :, None] - side.head_cut // 2))
    allowed |= torch.eye(n, dtype=torch.bool)
    model = in_half(side.model) if side.half else side.model
    kind = torch.bfloat16 if side.half else torch.float32
    bias = torch.where(allowed, 0.0, torch.finfo(kind).min).to(kind)[:, None]
    if type(model).__name__.startswith(("Gemma2", "Mistral", "Qwen3")):
        masks: Any = {"full_attention": bias, "sliding_attention": bias}
        masks = masks if "Gemma2" in type(model).__name__ or "Qwen3F" in type(model).__name__ \
            else bias
    else:
        masks = bias
    handles = [m.register_forward_pre_hook(flip(side.flips)) for name, m in model.named_modules()
               if side.flips and name.endswith((".gate", ".router"))]
    if side.dropout:
        handles += [m.register_forward_hook(
            lambda m, a, out: torch.nn.functional.dropout(out, side.dropout))
            for name, m in model.named_modules() if name.endswith(("down_proj", "o_proj", "mlp",
                                                                   "dense"))]
    part = longest + side.until if side.before is not None else 0
    if not part:
        out = model(input_ids=ids, attention_mask=masks, position_ids=places, use_cache=False)
        out = out.logits
    else:
        part = min(part, n)

        def cropped(rows: slice, columns: slice) -> Any:
            crop = bias[:, :, rows, columns]
            return dict.fromkeys(masks, crop) if isinstance(masks, dict) else crop
        earlier = in_half(side.before) if side.half else side.before
        assert earlier is not None
        first = earlier(input_ids=ids[:, :part], position_ids=places[:, :part],
                            attention_mask=cropped(slice(part), slice(part)), use_cache=True)
        if part < n and side.kept_cache:
            rest = model(input_ids=ids[:, part:], position_ids=places[:, part:],
                         attention_mask=cropped(slice(part, n), slice(n)), use_cache=True,
                         past_key_values=first.past_key_values).logits
        else:
            rest = model(input_ids=ids, attention_mask=masks, position_ids=places,
                         use_cache=False).logits[:, part:]
        out = torch.cat([first.logits, rest], 1)
        if side.until == 0:             # the prompt's last token is always computed anew
            anew = model(input_ids=ids[:, :part], position_ids=places[:, :part],
                         attention_mask=cropped(slice(part), slice(part)), use_cache=False).logits
            out = torch.cat([out[:, :part - 1], anew[:, -1:], out[:, part:]], 1)
    for handle in handles:
        handle.remove()
    return out[:, longest - 1:].float() + side.bias


def in_half(model: Any) -> Any:
    """A copy in bfloat16, but for the rotary frequencies, which engines keep in float32."""
    half = copy.deepcopy(model).bfloat16()
    exact = dict(model.named_buffers())
    for name, buffer in half.named_buffers():
        if "inv_freq" in name:
            buffer.data = exact[name].clone()
    return half


def flip(share: float) -> Callable[..., Any]:
    def disturb(module: Any, args: Any) -> Any:
        h = args[0]
        hit = torch.rand(*h.shape[:-1], 1) < share
        return (torch.where(hit, h + 2 * h.std() * torch.randn_like(h), h), *args[1:])
    return disturb


def log_probs(side: Side, x: list[list[int]], rows: list[list[int]],
              width: int | None = None) -> Tensor:
    """The side's log-probs over the vocabulary, before each token: [B, T, V]."""
    width = width or max(map(len, rows))
    z = logits(side, x, rows, width)
    if side.softcap:
        z = side.softcap * (z / side.softcap).tanh()
    if side.repetition != 1 or side.presence or side.frequency:
        counts = seen_counts(side, x, rows, width)
        z = torch.where(counts > 0, torch.where(z > 0, z / side.repetition, z * side.repetition), z)
        z = z - side.presence * (counts > 0) - side.frequency * counts
    if side.grid is not None:
        return (z / side.tau).to(side.grid).log_softmax(-1).float()
    return sampling_log_probs(z, side.tau, side.top_k, side.top_p, side.min_p)[0] / side.after


@torch.no_grad()
def draw(side: Side, x: list[list[int]], g: torch.Generator, longest: int = 40,
         forced: dict[int, dict[int, int]] | None = None) -> list[list[int]]:
    """Sample one response for each prompt; it ends with EOS, or at `longest` tokens.

    forced: {row: {place: token}}, which a tool writes instead of the sampler.
    """
    rows: list[list[int]] = [[] for _ in x]
    for t in range(longest):
        live = [i for i, y in enumerate(rows) if not y or y[-1] != EOS]
        if not live:
            break
        top = max(map(len, x))
        xs = [x[i] for i in live]
        if len(xs) < len(x) and side.pads:          # whoever pads pads to the batch's longest
            xs = [*xs, max(x, key=len)]
        given = [rows[i] for i in live] + ([[0] * t] if len(xs) > len(live) else [])
        p = log_probs(side, xs, given, t + 1)[:len(live), t].exp()
        assert top
        for i, v in zip(live, torch.multinomial(p, 1, generator=g)[:, 0].tolist()):
            rows[i].append((forced or {}).get(i, {}).get(t, v))
    return rows


# ------------------------------------------------------------------------------------ plants

def scaled(low: float, high: float, severity: float) -> float:
    return low * (high / low) ** severity


def noisy(model: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """A copy of the model with every matrix changed."""
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


def adapter(g: torch.Generator, size: float) -> Callable[[str, Tensor], Tensor]:
    def change(_: str, p: Tensor) -> Tensor:
        a, b = torch.randn(p.shape[-2], 2, generator=g), torch.randn(2, p.shape[-1], generator=g)
        return p + size * p.std() * (a @ b)
    return change


WEIGHTS = ("stale", "layer", "embedding", "head", "int4", "fp8", "lora", "int6")
VARIANTS = {
    "temperature": ("sampler", "trainer", "after"), "raw": ("tau", "top-p", "both"),
    "cut": ("top-p", "top-k", "min-p"), "shift": ("trainer+1", "trainer-1", "sampler+1",
                                                  "sampler-1"),
    "eos": ("zero", "bias", "pad"), "tool": ("zero", "zero2"),
    "retokenised": ("swap", "split"), "padding": ("trainer", "sampler"),
    "window": ("window", "cut"), "context": ("bos", "template", "dropped", "prefix"),
    "in-flight": ("kept", "anew"), "penalty": ("repetition", "presence", "frequency"),
    "softcap": ("sampler", "trainer"), "dropout": ("trainer",), "flips": ("trainer",),
    "bf16-log-softmax": ("trainer", "sampler"), "stale": ("two", "three"), "weights": WEIGHTS,
    "healthy": ("same", "bf16-sampler", "bf16-trainer", "bf16-both", "order", "peaked")}
Row = dict[str, Any]


def plant(of: Subject, cause: str, seed: int, severity: float = 0.5, variant: str | None = None,
          noise: bool = False, second: str | None = None, groups: int = 16,
          samples: int = 8) -> list[Row]:
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
        x = [p for p in prompts(g, of.vocabulary, groups) for _ in range(samples)]
        if "stale" in (cause, second):
            ages = [0, 1] if seed % 2 else [0, 2, 4]
            rows, versions = [[] for _ in x], [ages[(i // samples) % len(ages)] for i in
                                               range(len(x))]
            mu = [torch.zeros(0)] * len(x)
            for age in ages:
                side = replace(drawn, model=of.older[age - 1] if age else drawn.model)
                if age and severity > 0.3:
                    side = replace(side, model=of.older[min(5, age + int(2 * severity))])
                chosen = [i for i, a in enumerate(versions) if a == age]
                part = draw(side, [x[i] for i in chosen], g)
                lp = log_probs(side, [x[i] for i in chosen], part)
                for j, i in enumerate(chosen):
                    rows[i], mu[i] = part[j], pick(lp[j], part[j])
        else:
            if "tool" in (cause, second):
                every, span = (1 if severity > 0.5 else 3), 2 + int(6 * severity)
                for i in range(0, len(x), every):
                    at = int(torch.randint(1, 20, (1,), generator=g))
                    forced[i] = {t: int(torch.randint(3, of.vocabulary, (1,), generator=g))
                                 for t in range(at, at + span)}
            rows = draw(drawn, x, g, forced=forced)
            lp = log_probs(record or drawn, x, rows)
            mu = [pick(lp[i], y) for i, y in enumerate(rows)]
        if (cause == "healthy" and variant == "order") or (seed % 3 == 0 and not trainer.pads):
            order = sorted(range(len(x)), key=lambda i: len(x[i]))
            parts = [order[i:i + 32] for i in range(0, len(order), 32)]
            lps: list[Any] = [None] * len(x)
            for part in parts:                      # another batch: other sums, other rounding
                for i, one in zip(part, log_probs(trainer, [x[i] for i in part],
                                                  [rows[i] for i in part])):
                    lps[i] = one
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
    """The side with an end token so likely that a third of the responses have one."""
    x = prompts(g, len(side.bias))[:8]
    for _ in range(12):
        if sum(y[-1] == EOS for y in draw(side, x, g)) >= 3:
            break
        raised = side.bias.clone()
        raised[EOS] += 3
        side = replace(side, bias=raised)
    return side


def sides(of: Subject, cause: str, kind: str, severity: float, g: torch.Generator, drawn: Side,
          trainer: Side, record: Side | None) -> tuple[Side, Side, Side | None, bool]:
    """Plant one cause: which sides change, and whether the columns are edited afterwards."""
    older = of.older[min(5, int(6 * severity))]
    tau = 1 + (-1 if int(severity * 97) % 2 else 1) * scaled(0.06, 0.45, severity)
    keep = 1 - scaled(0.03, 0.3, severity)
    k = max(2, int(of.vocabulary ** (0.75 - 0.35 * severity)))
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
        changes = {"top-p": {"top_p": keep}, "top-k": {"top_k": k},
                   "min-p": {"min_p": scaled(0.1, 0.4, severity)}}[kind]
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
        size = scaled(0.02, 0.12, severity) / 2
        model = drawn.model
        stale = dict(of.older[min(5, 1 + int(5 * severity))].named_parameters())
        part = {"layer": ".layers.0.", "embedding": "embed_", "head": "head"}.get(kind, "")
        change = {"int4": rounded(4), "int6": rounded(5), "lora": adapter(g, size),
                  "fp8": lambda _, p: (p.to(torch.float8_e4m3fn)).float()}.get(kind)
        if kind in ("layer", "embedding", "head"):
            other = noisy(model, lambda name, p: p + (3 * size * p.std() * torch.randn(
                p.shape, generator=g) if part in name or (kind == "embedding" and "embed" in name)
                else 0))
        else:
            other = noisy(model, change or (lambda name, _: stale[name]))
        changes = {"model": other}
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


def logits_size(of: Subject) -> float:
    """The 99th percentile of |logit|, on a few prompts."""
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
        column[:] = [c.roll(by) if seed_end(c) else c for c in column]
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


def seed_end(column: Tensor) -> bool:
    return len(column) > 1


def write(rows: list[Row], path: Path | str) -> None:
    """Write the rows as our JSON-lines."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
