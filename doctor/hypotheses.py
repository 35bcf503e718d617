"""List what a recorded column may be: hypotheses, each with log-probs by the trainer's model.

This file decides which hypotheses there are, and which of their values are tried. To add one, add a
row to `TABLE`; doctor/rescore.py matches columns to the rows. Two faults on one side at once are
left out.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from three_policies.rollout import quantize_weights
from three_policies.training.shapes import pad_rows

EXCLUDED = -30.0       # the log-prob of a token that a cut excludes
CERTAIN = -1e-3        # log-probs nearer to 0 become this: their log-odds are rounding
EXACT = 1e-6           # squared log-odds: float32's rounding
COARSE = 2             # times what kernels move: more is no rounding of weights that are in order
Rows = Sequence[tuple[list[int], list[int]]]           # prompts and responses


class Scorer:
    """Compute log-probs of N tokens by one model as it is, or changed in one respect."""

    def __init__(self, model: Any, older: list[dict[str, Tensor]], rows: Rows,
                 dtype: torch.dtype = torch.float32, temperature: float = 1.0) -> None:
        self.original, self.older, self.rows = model, older, rows
        self.dtype, self.temperature = dtype, temperature
        self.config, self.kept = model.config.get_text_config(), dict[Any, Tensor]()
        self.tokens = torch.tensor([y for _, tokens in rows for y in tokens])               # [N]
        self.row = torch.tensor([i for i, (_, tokens) in enumerate(rows) for _ in tokens])
        self.place = torch.tensor([t for _, tokens in rows for t in range(len(tokens))])
        self.model = copy.deepcopy(model).to(dtype)
        for buffer, float32 in zip(self.model.buffers(), model.buffers()):
            buffer.data = float32.data         # rotary frequencies are float32 in every engine
        self.plain, self.slack = self.logits(), 1e-6                                     # [N, V]

    @torch.no_grad()
    def logits(self, rows: Rows = (), weights: dict[str, Tensor] | None = None,
               starts: Sequence[int] = (), window: int = 0) -> Tensor:
        """Return the logits before each token of the rows' responses: [N, V].

        weights: used instead of the model's own; of tied ones, only those that are named. starts:
        the position of each row's first token. window: how many of the last tokens are attended to.
        """
        rows, found = rows or self.rows, []
        weights = {name: w.to(self.dtype) for name, w in (weights or {}).items()}
        for first in range(0, len(rows), 256):
            part = rows[first:first + 256]
            ids, _ = pad_rows([prompt + tokens for prompt, tokens in part], "right")
            start = torch.tensor(starts[first:first + 256] or [0] * len(part))
            places = torch.arange(ids.shape[1])
            given: dict[str, Any] = dict(position_ids=(places + start[:, None]).clamp(min=0))
            if window:
                gap = places[:, None] - places
                unseen = ((gap < 0) | (gap >= window)) * torch.finfo(self.dtype).min
                given["attention_mask"] = unseen.to(self.dtype).expand(len(part), 1, -1, -1)
            z = functional_call(self.model, weights, (ids,), dict(given, use_cache=False),
                                tie_weights=False).logits
            found += [z[i, len(prompt) - 1:len(prompt) - 1 + len(tokens)].float()
                      for i, (prompt, tokens) in enumerate(part)]
        return torch.cat(found)

    def log_prob(self, logits: Tensor, temperature: float | None = None) -> Tensor:
        """Return log softmax(logits/τ) of the tokens: [N, V] → [N]."""
        z = logits / (temperature or self.temperature)
        return z.gather(-1, self.tokens[:, None]).squeeze(-1) - z.logsumexp(-1)

    def scored(self, key: Any, **changed: Any) -> Tensor:
        """Return log-probs by changed logits, whose pass of the model runs once per key: [N]."""
        if key not in self.kept:
            self.kept[key] = self.log_prob(self.logits(**changed))
        return self.kept[key]

    @cached_property
    def noisy(self) -> "Scorer":
        """Return the same scorer in bfloat16."""
        s = Scorer(self.original, self.older, self.rows, torch.bfloat16, self.temperature)
        s.slack = 4 * (s.plain - self.plain).std(-1).square().mean().sqrt().item()
        return s

    @cached_property
    def coarse(self) -> Tensor:
        """Return log-probs by the weights rounded to bfloat16, which float32 computes: [N]."""
        weights = self.original.named_parameters(remove_duplicate=False)
        return self.log_prob(self.logits(weights={name: w.bfloat16() for name, w in weights}))

    @cached_property
    def grid(self) -> tuple[float, float]:
        """Return how far log-odds move if weights are rounded to bfloat16, and by its kernels.

        Both are medians, since in a mixture of experts a few tokens have most of the mean.
        """
        plain, coarse, noisy = map(bounded_log_odds, (
            self.log_prob(self.plain), self.coarse, self.log_prob(self.noisy.plain)))
        rounding, kernels = ((x - y).abs().median().item() for x, y in (
            (coarse, plain), (noisy, coarse)))
        return rounding, kernels

    @property
    def swallows(self) -> bool:
        """True if rounding the weights alone moves the policy by more than two kernels do.

        Rounded activations disturb a product about as much as rounded weights, so it moves by as
        much as kernels move it: by 0.3 to 1.05 of that, on 20 models with random weights. If the
        grid swallows updates, all their roundings point one way, and add up.
        """
        rounding, kernels = self.grid
        return rounding > COARSE * kernels

    @cached_property
    def uncapped(self) -> Tensor:
        """Return the logits before the final softcap: [N, V]."""
        cap = getattr(self.config, "final_logit_softcapping", None)
        bare = copy.deepcopy(self.original)
        bare.config.get_text_config().final_logit_softcapping = None
        return Scorer(bare, [], self.rows, self.dtype).plain if cap else self.plain

    @cached_property
    def ordered(self) -> Tensor:
        """Return the probabilities, the largest first: [N, V]."""
        return (self.plain / self.temperature).softmax(-1).sort(-1, descending=True).values

    @cached_property
    def mass(self) -> Tensor:
        """Return the mass up to each of `ordered`, with it: [N, V]."""
        return self.ordered.cumsum(-1)

    @cached_property
    def before(self) -> Tensor:
        """Return the mass before each of `ordered`: [N, V]."""
        return self.mass - self.ordered

    @cached_property
    def rank(self) -> tuple[Tensor, Tensor]:
        """Return the tokens' probabilities, and how many of `ordered` are larger: [N, 1] each."""
        p = (self.plain / self.temperature).softmax(-1).gather(-1, self.tokens[:, None])
        return p, (self.ordered > p).sum(-1, keepdim=True)

    def cut(self, inside: Callable[[float], Tensor]) -> Tensor:
        """Return log-probs over the likeliest tokens alone: [N].

        inside: given how far noise moves logits, says which of `ordered` are kept: [N, V].
        """
        p, rank = self.rank
        # A token outside the edge by no more than noise was inside for the sampler.
        count = torch.maximum(inside(0.0).sum(-1, keepdim=True), rank + 1)
        kept = rank < inside(self.slack).sum(-1, keepdim=True)
        return torch.where(kept, (p / self.mass.gather(-1, count - 1)).log(), EXCLUDED).squeeze(-1)

    @cached_property
    def counts(self) -> Tensor:
        """Count how often each id was in the response before each token: [N, V]."""
        counts = torch.zeros_like(self.plain)
        for n in self.place.nonzero().flatten().tolist():
            counts[n] = counts[n - 1]
            counts[n, self.tokens[n - 1]] += 1
        return counts

    @cached_property
    def seen(self) -> Tensor:
        """Mark the ids that the prompt or the response has before each token: [N, V] bool."""
        seen = self.counts > 0
        for i, (prompt, _) in enumerate(self.rows):
            seen[(self.row == i).nonzero(), torch.tensor(prompt)] = True
        return seen

    def repeated(self, penalty: float) -> Tensor:
        """Return log-probs after a repetition penalty, which counts ids of the prompt too: [N]."""
        z = self.plain
        return self.log_prob(z.where(~self.seen, torch.where(z > 0, z / penalty, z * penalty)))

    def stale(self, k: int, module: str = "") -> Tensor:
        """Return log-probs by the weights of k updates ago, of all modules or of one: [N]."""
        tied = self.original._tied_weights_keys if self.config.tie_word_embeddings else {}
        return self.scored((k, module), weights={
            name: w for name, w in self.older[k - 1].items()
            if not module or module in (module_of(name), module_of(tied.get(name, name)))})

    def rounded(self, how: int | str, ends: bool) -> Tensor:
        """Return log-probs by rounded matrices; `ends` says if embedding and head are: [N]."""
        model = self.original
        outer = [m.weight.data_ptr() for m in (model.get_input_embeddings(),
                                               model.get_output_embeddings())]
        matrices = {name: w for name, w in model.state_dict().items()
                    if w.dim() > 1 and (ends or w.data_ptr() not in outer)}
        return self.scored((how, ends), weights=(
            dict(quantize_weights(matrices.items(), how)) if isinstance(how, int) else
            {name: to_fp8(w, how) for name, w in matrices.items()}))

    def dropped(self, p: float, draws: int = 16) -> Tensor:
        """Return log-probs with dropout at rate p, averaged over several draws in log-odds: [N]."""
        model = self.model.train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = p
            if isinstance(module, torch.nn.Dropout):
                module.p = p
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found = [bounded_log_odds(self.log_prob(self.logits())) for _ in range(draws)]
        model.eval()
        return torch.nn.functional.logsigmoid(torch.stack(found).mean(0))

    def prompted(self, key: Any, change: Callable[[list[int], list[int]], list[int]],
                 starts: Sequence[int] = ()) -> Tensor:
        """Return log-probs after other prompts, never empty: [N]."""
        return self.scored(key, starts=starts, rows=[
            (change(prompt, tokens) or prompt[-1:], tokens) for prompt, tokens in self.rows])

    def padded(self, width: int, together: int, places: str) -> Tensor:
        """Return log-probs after prompts that were padded on the left without a mask: [N].

        Prompts are padded to `width`; where it is 0, to the longest of each `together` rows.
        """
        sizes, pad = [len(prompt) for prompt, _ in self.rows], self.config.pad_token_id or 0
        widths = [width or max(sizes[i - i % together:][:together]) for i in range(len(sizes))]
        pads = [max(0, w - n) for w, n in zip(widths, sizes)]
        queue = iter(pads)
        return self.prompted((width, together, places), lambda p, _: [pad] * next(queue) + p,
                             [-n for n in pads] if places == "right" else ())

    def recent(self, last: int) -> Tensor:
        """Return log-probs given only the `last` tokens before each, in a pass of its own: [N]."""
        return self.scored(("recent", last), rows=[
            ((p + tokens[:t])[-last:], [y]) for p, tokens in self.rows
            for t, y in enumerate(tokens)])

    def shifted(self, values: Tensor, by: int) -> Tensor:
        """Return each row's values `by` places later, NaN where there is none: [N, …]."""
        inside = (self.row.roll(-by) == self.row) & (self.place.roll(-by) == self.place + by)
        return values.roll(-by, 0).where(inside.view(-1, *[1] * (values.dim() - 1)), math.nan)

    def sizes(self, response: bool) -> Tensor:
        """Return the length of each token's prompt, with its response or without: [N]."""
        return torch.tensor([len(p) + response * len(tokens) for p, tokens in self.rows])[self.row]


def bounded_log_odds(log_prob: Tensor) -> Tensor:
    """Return log p/(1 − p), finite also where p rounds to 0 or 1."""
    log_prob = log_prob.clamp(EXCLUDED, CERTAIN)
    return log_prob - torch.log(-torch.expm1(log_prob))


def module_of(name: str) -> str:
    """Return the layer that a weight belongs to, or its module outside of the layers."""
    found = re.match(r"(.*?\.\d+|.*)\.", name)
    return found[1] if found else name


def to_fp8(w: Tensor, how: str) -> Tensor:
    """Round to e4m3 and back: "fp8" as it is, or with "a scale per tensor" or "a scale per row"."""
    largest = w.abs().amax(-1, keepdim=True) if "row" in how else w.abs().max()
    scale = largest.clamp(min=1e-12) / 448 if "scale" in how else torch.ones(())
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


class Hypothesis(NamedTuple):
    """A row of `TABLE`: a name, a cause, a way to score, and the values to try."""

    name: str                                          # with a placeholder for the value
    cause: str | None                                  # None: no fault
    score: Callable[[Scorer, Any], Tensor]             # → [N], NaN where it says nothing
    values: Callable[[Scorer, Tensor], Iterable[Any]]  # of the scorer and the squared gap [N]
    search: bool = False                               # also search between the values


def listed(*values: Any) -> Callable[..., Sequence[Any]]:
    return lambda *_: values


def ratios(low: float, high: float, count: int = 40) -> Callable[..., list[float]]:
    return lambda *_: [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def changes(places: Callable[[Scorer], Tensor]) -> Callable[[Scorer, Tensor], list[int]]:
    """Return a function that finds the places [N] where the squared gap most likely changes."""
    def find(s: Scorer, gap: Tensor) -> list[int]:
        at = places(s)

        def cost(first: int) -> float:
            return sum(len(x) * math.log(x.mean().item() + EXACT)
                       for x in (gap[at < first], gap[at >= first]))
        likeliest = sorted(at.unique().tolist()[1:], key=cost)[:2]
        return sorted({max(1, place + d) for place in likeliest for d in (-1, 0, 1)})
    return find


def modules(s: Scorer, _: Tensor) -> Iterator[tuple[str, int]]:
    """List every module of every older checkpoint."""
    for k, weights in enumerate(s.older, 1):
        yield from ((module, k) for module in dict.fromkeys(map(module_of, weights)))


def paddings(s: Scorer, _: Tensor) -> Iterator[tuple[int, int, str]]:
    """List ways to pad: the width, or how many rows share one, and whether positions are right."""
    longest = int(s.sizes(False).max())
    widths = sorted({longest + i for i in range(9)} | {2 ** i for i in range(4, 10)
                                                       if 2 ** i > longest})
    for places in "wrong", "right":
        yield from ((width, 1, places) for width in widths)
        yield from ((0, 2 ** i, places) for i in range(1, 7))


ROUNDINGS = listed(*range(2, 9), "fp8", "fp8, a scale per tensor", "fp8, a scale per row")
PENALTIES = listed(*(i / 10 for i in range(-20, 21) if i))
ONCE = listed(None)
# Rows that rescore.py refers to by name.
HALF, STALE = "plain in bfloat16", "{} updates stale"
IN_16_BITS = "plain by a log-softmax in bfloat16"
SCALED, DIVIDED = "at temperature {:.3g}", "divided by {:.3g} after the softmax"
TABLE = list(starmap(Hypothesis, (
    ("plain", None, lambda s, _: s.log_prob(s.plain), ONCE),
    (HALF, None, lambda s, _: s.log_prob(s.noisy.plain), ONCE),
    (IN_16_BITS, "bf16-log-softmax",
     lambda s, _: s.log_prob(s.plain.bfloat16()).bfloat16().float(), ONCE),
    (SCALED, "temperature", lambda s, x: s.log_prob(s.plain, x),
     ratios(0.1, 8), True),
    (DIVIDED, "temperature", lambda s, x: s.log_prob(s.plain) / x,
     ratios(0.1, 8), True),
    ("top-p {:.3g}", "cut", lambda s, x: s.cut(lambda e: s.before < x + x * (1 - x) * e),
     listed(*(i / 100 for i in range(5, 100)), 0.995, 0.998, 0.999), True),
    ("top-k {}", "cut",
     lambda s, x: s.cut(lambda e: s.ordered >= s.ordered[:, x - 1:x] * math.exp(-e)),
     lambda s, _: range(1, min(s.plain.shape[-1], 201))),
    ("min-p {:.3g}", "cut",
     lambda s, x: s.cut(lambda e: s.ordered >= s.ordered[:, :1] * x * math.exp(-e)),
     ratios(1e-3, 0.9, 80), True),
    ("repetition penalty {:.3g}", "penalty", lambda s, x: s.repeated(x), ratios(0.5, 3), True),
    ("presence penalty {:.3g}", "penalty",
     lambda s, x: s.log_prob(s.plain - x * (s.counts > 0)), PENALTIES, True),
    ("frequency penalty {:.3g}", "penalty",
     lambda s, x: s.log_prob(s.plain - x * s.counts), PENALTIES, True),
    ("without the final softcap", "softcap", lambda s, _: s.log_prob(s.uncapped),
     lambda s, _: [None] * (s.uncapped is not s.plain)),
    ("final softcap {:.3g}", "softcap",
     lambda s, x: s.log_prob(x * (s.uncapped / x).tanh()), ratios(1, 200), True),
    ("the value of the token {:+d} away", "shift",
     lambda s, x: s.shifted(s.log_prob(s.plain), x), listed(1, -1)),
    ("by the logits {:+d} away", "shift",
     lambda s, x: s.log_prob(s.shifted(s.plain, x)), listed(1, -1)),
    (STALE, "weights", lambda s, k: s.stale(k),
     lambda s, _: range(1, len(s.older) + 1)),
    ("{} of {} updates ago", "weights", lambda s, x: s.stale(x[1], x[0]), modules),
    ("matrices rounded to {} bits", "weights", lambda s, x: s.rounded(x, True), ROUNDINGS),
    ("matrices of layers rounded to {} bits", "weights",
     lambda s, x: s.rounded(x, False), ROUNDINGS),
    ("before token {}, {} updates stale", "in-flight",
     lambda s, x: torch.where(s.place < x[0], s.stale(x[1]), s.log_prob(s.plain)),
     lambda s, _: [(t, k + 1) for k in range(len(s.older))
                   for t in range(1, int(s.place.max()) + 1)]),
    ("prompt without its first {} tokens", "context",
     lambda s, x: s.prompted(("first", x), lambda p, _: p[x:]), listed(1, 2, 3)),
    ("prompt without its last {} tokens", "context",
     lambda s, x: s.prompted(("last", x), lambda p, _: p[:-x]), listed(1, 2)),
    ("prompt with its first token twice", "context",
     lambda s, _: s.prompted("twice", lambda p, _: p[:1] + p), ONCE),
    ("prompt with token {} before it", "context",
     lambda s, x: s.prompted(("before", x), lambda p, _: [x, *p]),
     lambda s, _: {i for i in (s.config.bos_token_id, s.config.eos_token_id)
                   if isinstance(i, int)}),
    ("padded to width {} (0: of {} rows together), positions {}", "padding",
     lambda s, x: s.padded(*x), paddings),
    ("window of {} tokens", "window", lambda s, x: s.scored(("window", x), window=x),
     changes(lambda s: s.place + s.sizes(False))),
    ("prompt and response cut to the last {} tokens", "window",
     lambda s, x: s.prompted(("row", x), lambda p, y: p[max(0, len(p) + len(y) - x):]),
     changes(lambda s: s.sizes(True))),
    ("prompt cut to the last {} tokens", "window",
     lambda s, x: s.prompted(("prompt", x), lambda p, _: p[-x:]),
     changes(lambda s: s.sizes(False))),
    ("last {} tokens alone", "window", lambda s, x: s.recent(x),
     changes(lambda s: s.place + s.sizes(False))),
    ("plain with dropout {}", "dropout", lambda s, p: s.dropped(p), listed(0.05, 0.1, 0.2)))))
