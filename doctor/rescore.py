"""Rescoring decides what a dump can only suggest: which distribution IS log μ, which IS log π?

The trainer's model scores the same tokens under every row of doctor/hypotheses.py, and both
columns of a dump are matched to these scores. This file decides
* A hypothesis h is judged by the share of the gap to the plain model that it leaves,
  Σ(recorded − h)² / Σ(recorded − plain)². Both are log-odds: there, noise of the logits has the
  same size for every token.
* A hypothesis with n values to search pays for them: its likelihood must be n² times as high
  (the square is our choice).
* The effect of bfloat16 is measured on this model, and is no fault. But if rounding the weights
  does more than the kernels do, the engine's grid may swallow the updates, and that is one.

    found = rescore("path/to/model", ["one/update/older", "two/updates/older"], responses)
    print(*found.lines(), found.as_json(), sep="\\n")
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from three_policies.doctor.dumps import Response, response, rows_of
from three_policies.doctor.hypotheses import (DIVIDED, EXACT, EXCLUDED, HALF, IN_16_BITS, SCALED,
                                              STALE, TABLE, Hypothesis, Scorer, bounded_log_odds)
from three_policies.engines.choice import make_engine
from three_policies.policy import Policy
from three_policies.rollout import DTYPES
from three_policies.training.models import read_model
from three_policies.training.shapes import pad_rows

LOGITS = 2 ** 28       # at most, in float32: 1 GB; further responses are left out
# Set by hand, on the 216 faults that `python doctor/rescore_rates.py --tune` plants in tiny models.
SOLVED = 1e-4          # share left: no further row is tried
HARMLESS = 0.05        # share left by the plain model in bfloat16: its own kernels left up to 0.034
EXPLAINED = 0.35       # share left: right rows, but for dropout, left up to 0.06, and up to 0.19
                       # where noise was on top of the fault
FLOORS = 4             # times bfloat16's squared noise: less is noise
AHEAD = 10             # nats by which a fault must be likelier than what is no fault
ARRIVED = 0.5          # of the trainer's move: if the engine has made less, most of it is lost


class Grid(NamedTuple):
    """A Grid is what rounding the weights to bfloat16 does, and what it leaves of the update.

    rounding  median |Δ log-odds| by which the rounded weights move the policy
    kernels   that of the kernels of bfloat16, on the rounded weights
    same      share of the weights that are, in bfloat16, still those of the oldest checkpoint
    changed   share of these that the trainer has changed since
    arrived   share of the policy's move since then that the rounded weights make, ⟨a, b⟩/⟨b, b⟩
              for their move a and the trainer's b in log-odds; NaN if the trainer has made none
    """

    rounding: float
    kernels: float
    same: float = math.nan
    changed: float = math.nan
    arrived: float = math.nan

    @property
    def below(self) -> bool:
        """True if most of the update is lost: the update is below the engine's grid."""
        return self.arrived < ARRIVED

    def __str__(self) -> str:
        moved = (f"rounding the weights to bfloat16 moves a token by {self.rounding:.3f} logits, "
                 f"two kernels by {self.kernels:.3f} (medians)")
        if math.isnan(self.arrived):
            return f"{moved}; --older DIR, of an earlier step, tells whether an update is lost"
        return (f"{moved}; {self.same:.1%} of the weights in bfloat16 are still the first ones, "
                f"those of --older, though the trainer has changed {self.changed:.1%} of these; "
                f"they have made {self.arrived:.0%} of the policy's move")


class Match(NamedTuple):
    """A Match is a hypothesis with its best value for one column."""

    name: str
    cause: str | None              # None: no fault. "unknown": a fault that no row explains
    parameter: Any
    left: float                    # share of the gap to the plain model
    cost: float                    # nats: −log likelihood, and what the search of a value costs
    rest: float = 0.0              # mean squared log-odds left
    next: tuple[str, float] = ("", 1.0)        # the likeliest other hypothesis, and what it leaves
    row: str = ""                  # of TABLE: its name before the value is filled in
    grid: Grid | None = None       # of weights whose rounding is more than the noise of kernels


class Rescored(NamedTuple):
    """Rescored says what both columns are, and which side is guilty."""

    rollout: Match
    train: Match
    guilty: str                    # "rollout", "train", "both", "none", or "unknown": one of them

    def lines(self) -> list[str]:
        """Return a line for log π, one for log μ, and one for each cause."""
        sides = [("log π", "trainer", self.train), ("log μ", "sampler", self.rollout)]
        causes = [self.rollout.cause, self.train.cause]
        strange = "unknown" in causes and None not in causes       # neither column is the model's
        apart = self.guilty == "unknown"
        return [*(f"{symbol} is {m.name:40} " + (
            f"near, but not near enough to the other: is the {who} innocent?" if apart else
            f"the {who} is innocent" if m.cause is None else
            "is --model the model of this dump?" if strange and m.cause == "unknown" else
            f"{m.left:6.1%} of the gap left (next: {m.next[0]}, {m.next[1]:.1%})")
            for symbol, who, m in sides),
            *(f"Cause: {m.cause}, at the {who}" for _, who, m in sides if m.cause)]

    def as_json(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {"guilty": self.guilty, **{side: {
            "is": m.name, "cause": m.cause, "parameter": m.parameter, "left": m.left,
            "next": list(m.next), **({"grid": finite(m.grid._asdict())} if m.grid else {})}
            for side, m in zip(("rollout", "train"), self[:2])}}


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """Return the values with None for NaN, for which JSON has no word."""
    return {name: None if math.isnan(x) else x for name, x in values.items()}


def squares(x: Tensor, y: Tensor, mask: Tensor) -> float:
    """Return the mean squared gap in log-odds of the tokens that count, [N] each."""
    return (bounded_log_odds(x) - bounded_log_odds(y)).square()[mask].mean().item() + EXACT


def noise_of(s: Scorer, mask: Tensor) -> float:
    """Return the largest mean squared gap, in log-odds, that is noise of bfloat16 on this model.

    It is FLOORS times what bfloat16 does to the plain model. If rounding its weights does more than
    two kernels, which is a fault, then it is that of the kernels alone.
    """
    plain = s.coarse if s.swallows else s.log_prob(s.plain)
    return FLOORS * squares(s.log_prob(s.noisy.plain), plain, mask)


def match(s: Scorer, recorded: Tensor, mask: Tensor,
          table: Sequence[Hypothesis] = TABLE) -> list[Match]:
    """Match a column [N] to each row of a table, until a row leaves (almost) nothing of the gap."""
    r = bounded_log_odds(recorded)
    gap = (r - bounded_log_odds(s.log_prob(s.plain))).square() * mask
    found, kept = list[Match](), (r[mask] > EXCLUDED).all()       # kept: nothing drawn was cut off

    def left(h: Hypothesis, x: Any) -> float:
        o = bounded_log_odds(h.score(s, x))
        silent = o.isnan() | ((o <= EXCLUDED) & kept)
        rest = torch.where(silent, gap, (r - o).square() * mask)
        return ((rest.sum() + EXACT * len(r)) / (gap.sum() + EXACT * len(r))).item()

    for h in table:
        if any(m.left < (SOLVED if m.cause else HARMLESS) for m in found) or (
                found and gap.mean() < EXACT):
            break
        tried = {x: left(h, x) for x in h.values(s, gap)}
        if h.search:
            search(tried, lambda x, h=h: left(h, x))
        if tried:
            found.append(best_of(h, tried, mask.sum().item()))
    return found


def search(tried: dict[Any, float], left: Callable[[Any], float]) -> None:
    """Try more values of a hypothesis, four times six, between the best one's neighbours."""
    for _ in range(4):
        order = sorted(tried)
        i = order.index(min(order, key=tried.__getitem__))
        low, high = order[max(0, i - 1)], order[min(len(order) - 1, i + 1)]
        tried |= {x: left(x) for x in (low + (high - low) * j / 7 for j in range(1, 7))}


def best_of(h: Hypothesis, tried: dict[Any, float], tokens: float) -> Match:
    """Return a hypothesis with the value that leaves least, or the middle of those that do."""
    least = min(tried.values())
    ties = [x for x in tried if tried[x] <= 1.0001 * least]
    best = (min(ties) + max(ties)) / 2 if h.search else ties[0]         # a cut is no one number
    name = h.name.format(*best) if isinstance(best, tuple) else h.name.format(best)
    cost = tokens / 2 * math.log(least) + 2 * math.log(len(tried))
    return Match(name, h.cause, best, least, cost, row=h.name)


def likeliest(fits: Iterable[Match]) -> list[Match]:
    """Sort matches by their cost, but what is no fault before any fault that is not AHEAD of it.

    Beside the rounding of another kernel some row always fits a little better than none.
    """
    ranked = sorted(fits, key=lambda m: m.cost)
    innocent = next(m for m in ranked if m.cause is None)
    sure = ranked[0].cost < innocent.cost - AHEAD
    return ranked if sure else [innocent, *(m for m in ranked if m is not innocent)]


def judge(s: Scorer, recorded: Tensor, mask: Tensor) -> Match:
    """Return which hypothesis a column [N] is.

    What the hypothesis leaves must be as small as the difference between two kernels with the same
    weights, or a small share of the gap.
    """
    plain, noisy = s.log_prob(s.plain), s.log_prob(s.noisy.plain)
    gap, fits = squares(recorded, plain, mask), match(s, recorded, mask)
    noise, share = noise_of(s, mask), squares(recorded, noisy, mask) / gap
    if min(m.left for m in fits) > SOLVED:
        fits += match_in_bfloat16(s, recorded, mask, share)

    best, *others = likeliest(fits)
    if best.row == STALE and s.swallows and squares(recorded, noisy, mask) < FLOORS * max(
            best.left * gap, squares(noisy, s.coarse, mask)):       # a sync would bring no more
        best, others = next(m for m in fits if m.row == HALF), [best]
    other = next((m for m in others if m.name != best.name), best)
    best = best._replace(rest=best.left * gap, next=(other.name, other.left))

    if best.left > 0.1 and torch.equal(recorded[mask], recorded[mask].bfloat16().float()):
        return best._replace(name=IN_16_BITS, cause="bf16-log-softmax", parameter=None, row="")
    if best.left < EXPLAINED or best.cause == "dropout" or (best.left < 0.9 and best.rest < noise):
        return best
    best = best._replace(parameter=None, left=1.0, rest=gap, row="",
                         next=(best.name, best.left))
    return (best._replace(name="plain", cause=None) if gap < noise else
            best._replace(name="none of these", cause="unknown"))


def match_in_bfloat16(s: Scorer, recorded: Tensor, mask: Tensor, share: float) -> list[Match]:
    """Match a column to rows that bfloat16 computes; share: that it leaves of the gap by itself.

    Noise decides which tokens are at the edge of a cut, and it can hide a small fault.
    """
    large = {None, "shift", "context", "padding", "window", "dropout"}
    small = [h for h in TABLE if h.cause == "cut" or (share < 0.8 and h.cause not in large)]
    earned = mask.sum().item() / 2 * math.log(share)
    return [m._replace(left=m.left * share, cost=m.cost + earned)
            for m in match(s.noisy, recorded, mask, small) if m.left < 0.9]


def grid_of(s: Scorer) -> Grid:
    """Return what rounding the weights does, and what it leaves of the update since s.older[-1]."""
    if not s.older:
        return Grid(*s.grid)
    first, size, same, changed = s.older[-1], 0, 0, 0
    for name, w in s.original.named_parameters():       # one at a time, each tied one once
        stays = w.bfloat16() == first[name].bfloat16()
        size, same = size + w.numel(), same + stays.sum().item()
        changed += (stays & (w != first[name])).sum().item()
    names = dict(s.original.named_parameters(remove_duplicate=False))
    before = s.log_prob(s.logits(weights={name: first[name].bfloat16() for name in names}))
    made, whole = (bounded_log_odds(x) - bounded_log_odds(y) for x, y in (
        (s.coarse, before), (s.log_prob(s.plain), s.stale(len(s.older)))))
    arrived = (made @ whole / whole.square().sum()).item()              # 0/0: nothing was trained
    return Grid(*s.grid, same / size, changed / max(1, same), arrived)


def read(path: str, key: str) -> Any:
    """Read a model; raise ValueError with one line, whatever is wrong with it."""
    try:
        return read_model(path)
    except Exception as error:         # of as many types as there are kinds of damage
        raise ValueError(f"{key} {path} cannot be loaded: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def rescore(path: str, older: Sequence[str], responses: Iterable[Response]) -> Rescored:
    """Say which hypotheses the two columns of a dump are.

    path: the directory of the trainer's model. older: those of its older checkpoints, newest first.
    Raises ValueError for a response without a prompt, or a model that is not the dump's.
    """
    model = read(path, "--model").eval()
    kept, rows = scorable(path, model, list(responses))
    s = Scorer(model, older_weights(path, model, older), rows)
    μ, π = (torch.tensor([x for row in column for x in row]) for column in (
        [r.rollout_log_probs for r in kept], [r.train_log_probs for r in kept]))
    mask = torch.tensor([m for r in kept for m in r.mask])

    rollout, train, s = at_one_temperature(
        s, judge(s, μ, mask), judge(s, π, mask), μ, π, mask)
    # E[log π − log μ] ≤ 0 on samples of μ. If it is positive, π drew them, and μ is a raw record.
    proper = train.cause in ("temperature", "cut", "penalty") and train.row != DIVIDED
    if rollout.cause is None and proper and (π - μ)[mask].sum() > 0:
        rollout = train._replace(name=f"plain, before {train.name}", cause="raw")
        train = train._replace(cause=None)

    alike = (rollout.name, rollout.parameter) == (train.name, train.parameter)
    if alike and train.cause != "unknown":
        rollout, train = rollout._replace(cause=None), train._replace(cause=None)
    rollout, train = with_grid(s, rollout, train)

    sides = [side for side, m in (("rollout", rollout), ("train", train)) if m.cause]
    apart = squares(μ, π, mask)
    if not sides and not alike and apart > EXACT and apart > noise_of(s, mask):
        sides = ["unknown"]             # each is near the model, and they are not near each other
    return Rescored(rollout, train, "both" if len(sides) > 1 else (sides or ["none"])[0])


def scorable(path: str, model: Any, responses: list[Response]
             ) -> tuple[list[Response], list[tuple[list[int], list[int]]]]:
    """Return the responses whose logits fit, and each one's prompt and tokens, as the model's."""
    vocabulary = model.config.get_text_config().vocab_size
    if missing := [r.line for r in responses if not r.prompt_ids]:
        raise ValueError(f"line {missing[0]} has no prompt_ids: no model can score its response.")

    most, sizes = LOGITS // vocabulary, accumulate(len(r.token_ids) for r in responses)
    kept = responses[:max(1, sum(n <= most for n in sizes))]
    rows = [(list(r.prompt_ids or ()), list(r.token_ids)) for r in kept]
    for r, (prompt, tokens) in zip(kept, rows):
        if (largest := max(prompt + tokens)) >= vocabulary:
            raise ValueError(f"line {r.line} has token {largest}, and the vocabulary of --model "
                             f"{path} has {vocabulary}: it is not the model of this dump.")
    return kept, rows


def older_weights(path: str, model: Any, older: Sequence[str]) -> list[dict[str, Tensor]]:
    """Return the weights of the older checkpoints, which have the names and shapes of the model."""
    earlier = [read(p, "--older").state_dict() for p in older]
    shapes, *others = ({name: x.shape for name, x in weights.items()}
                       for weights in (model.state_dict(), *earlier))
    if strange := [p for p, other in zip(older, others) if other != shapes]:
        raise ValueError(f"--older {strange[0]} has weights of other names or shapes than --model "
                         f"{path}: it is no older checkpoint of that model")
    return earlier


def at_one_temperature(s: Scorer, rollout: Match, train: Match, μ: Tensor, π: Tensor, mask: Tensor
                       ) -> tuple[Match, Match, Scorer]:
    """Judge a faulty column again if the other one is the plain model at a temperature.

    Both columns may be at the sampling temperature. Then a fault is a departure from there.
    """
    for one, other, column in sorted(((rollout, train, π), (train, rollout, μ)),
                                     key=lambda pair: pair[0].left):
        if one.row != SCALED or not other.cause:
            continue
        there = Scorer(s.original, s.older, s.rows, temperature=one.parameter)
        hot = judge(there, column, mask)
        if hot.cause is None or (hot.cause != "unknown" and hot.rest < other.rest):
            hot = hot._replace(name=f"{hot.name}, at temperature {one.parameter:.3g}",
                               parameter=hot.parameter if hot.cause else one.parameter)
            agreed = one._replace(cause=None)
            return (agreed, hot, there) if column is π else (hot, agreed, there)
    return rollout, train, s


def with_grid(s: Scorer, rollout: Match, train: Match) -> tuple[Match, Match]:
    """Call it a fault if one column alone is in bfloat16, and that does more than two kernels."""
    if (rollout.row == HALF) == (train.row == HALF) or not s.swallows:
        return rollout, train
    grid = grid_of(s)
    if rollout.row == HALF:
        return rollout._replace(cause="below-grid" if grid.below else "weights", grid=grid), train
    return rollout, train._replace(cause="weights", grid=grid)


@torch.no_grad()
def sample_and_score(path: str, engine: str, prompts: Sequence[list[int]], *, max_tokens: int = 40,
                     temperature: float = 1.0, dtype: str = "float32",
                     train_dtype: str = "float32", **settings: Any) -> list[Response]:
    """Sample a response to each prompt with an engine, and score it with the trainer's policy.

    engine, dtype, settings are those of `make_engine`. What top_p or top_k cut is not replayed.
    """
    longest = max(map(len, prompts)) + max_tokens
    try:
        sampler = make_engine(engine, path, dtype=dtype, max_model_len=longest, **settings)
    except Exception as error:         # vLLM's are of many types, too
        raise ValueError(f"--engine {engine} does not start with --model {path}: "
                         f"{first_line(error)}") from None
    try:
        samples = sampler.generate(prompts, range(len(prompts)), temperature=temperature,
                                   max_tokens=max_tokens, eos_ids=[])
    finally:
        sampler.close()
    policy = Policy(read(path, "--model").to(DTYPES[train_dtype]).eval(), temperature)
    before, after = pad_rows(prompts, "left"), pad_rows([x.tokens for x in samples], "right")
    recorded, mask = pad_rows([x.rollout_log_prob for x in samples], "right")
    tokens, attention = (torch.cat(pair, 1) for pair in zip(before, after))
    log_prob = policy(tokens, attention, mask.shape[1])
    rows = rows_of(*before, *after, mask, recorded, log_prob)
    return [response(n, row) for n, row in enumerate(rows, 1)]


def random_prompts(path: str, count: int = 32, same: int = 4) -> list[list[int]]:
    """Return prompts of 5 to 12 random ids, each `same` times, for a model without a task."""
    vocabulary, g = AutoConfig.from_pretrained(path).get_text_config().vocab_size, torch.Generator()
    drawn = [torch.randint(vocabulary, (5 + i % 8,), generator=g.manual_seed(i)).tolist()
             for i in range(count // same)]
    return [prompt for prompt in drawn for _ in range(same)]
