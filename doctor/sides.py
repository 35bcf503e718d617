"""A side is one program's view of a dump: a tiny model from a seed, and what changes its logits.

doctor/plants.py makes faults of these: a side differs from the clean one in a few of its fields.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from three_policies.estimators import sampling_log_probs

ARCHITECTURES = ("Qwen2", "Llama", "Mixtral", "Gemma2", "Qwen2Moe", "Mistral", "Olmo2", "Qwen3")
EOS, PAD, BOS = 0, 1, 2


# ----------------------------------------------------------------------- models and their sides

@dataclass(frozen=True)
class Side:
    """A Side is one program's view: weights, their context, and what changes their logits."""

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
    stretch: float = 0.0                # positions are further apart, ever more, by it at 40
    pads: bool = False                  # the padding on the left is attended to, and counts
    template: tuple[int, ...] = ()      # stands before every prompt
    swapped: float = 0.0                # share of the rows that follow another row's prompt
    packed: bool = False                # a row sees the one before it
    dropped: int = 0                    # so many first tokens of the prompt are missing
    forgets: int = 0                    # the response does not see so many of the prompt's last
    another: int = 0                    # it sees the prompt of the row so many before its own
    before: "Any | None" = None         # weights that computed keys and values up to `until`
    until: int = 0                      # a token of the response; 0: the prompt alone
    kept_cache: bool = True             # False: after `until` all is computed anew
    dropout: float = 0.0
    flips: float = 0.0                  # share of tokens whose router sees noise
    half: bool = False                  # weights and activations in bfloat16
    grid: Any = None                    # the dtype of the log-softmax


class Subject(NamedTuple):
    """A Subject is a model to plant faults in: its clean side, and checkpoints of updates."""

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
    """Count how often each token stands before each place: [B, width, V]."""
    counts = torch.zeros(len(rows), width, len(side.bias))
    for i, y in enumerate(rows):
        if side.seen_prompt:
            for v in x[i]:
                counts[i, :, v] += 1
        for t, v in enumerate(y):
            counts[i, t + 1:, v] += 1
    return counts


def logits(side: Side, x: list[list[int]], rows: list[list[int]], width: int) -> Tensor:
    """Return logits of each place of the responses: [B, width, V]; width ≥ longest response."""
    if side.another:                    # but the first token is of its own prompt's pass
        own, k = replace(side, another=0), side.another % len(x)
        parts = logits(own, x, rows, width), logits(own, x[-k:] + x[:-k], rows, width)
        return torch.cat([parts[0][:, :1], parts[1][:, 1:]], 1)
    ids, mask, longest = padded(side, x, rows, width)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    allowed = attention(side, mask, places)
    allowed[:, longest:, max(0, longest - side.forgets):longest] = False
    places = places * (1 + side.stretch * places / 40) if side.stretch else places
    model = in_half(side.model) if side.half else side.model
    kind = torch.bfloat16 if side.half else torch.float32
    bias = torch.where(allowed, 0.0, torch.finfo(kind).min).to(kind)[:, None]

    def run(of: Any, columns: slice, up_to: int, **given: Any) -> Any:
        """Run a model on some columns, which see the columns up to another."""
        crop: Any = bias[:, :, columns, :up_to]
        if type(of).__name__.startswith(("Gemma2", "Qwen3F")):
            crop = {"full_attention": crop, "sliding_attention": crop}
        return of(input_ids=ids[:, columns], position_ids=places[:, columns], attention_mask=crop,
                  **{"use_cache": False, **given})

    handles = disturb(model, side)
    n = ids.shape[1]
    out = (run(model, slice(n), n).logits if side.before is None else
           of_two_models(side, model, run, min(longest + side.until, n), n))
    for handle in handles:
        handle.remove()
    return out[:, longest - 1:].float() + side.bias


def padded(side: Side, x: list[list[int]], rows: list[list[int]],
           width: int) -> tuple[Tensor, Tensor, int]:
    """Return ids and mask, prompts to the left and responses to the right, and the longest prompt.

    The last token of a response of `width` is left out: nothing is asked behind it.
    """
    x = [list(side.template) + p[side.dropped:] for p in x]
    if side.swapped:
        n = max(2, int(side.swapped * len(x)))
        moved = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))[:n].tolist()
        given = {i: x[j] for i, j in zip(moved, moved[1:] + moved[:1])}
        x = [given.get(i, p) for i, p in enumerate(x)]
    if side.packed:
        x = [[*x[i - 1], *rows[i - 1], *p] for i, p in enumerate(x)]
    longest = max(map(len, x))
    ids = torch.full((len(x), longest + width - 1), PAD)
    mask = torch.zeros_like(ids)
    for i, (p, y) in enumerate(zip(x, rows)):
        y = y[:width - 1]
        ids[i, longest - len(p):longest + len(y)] = torch.tensor(p + y)
        mask[i, 0 if side.pads else longest - len(p):] = 1
    return ids, mask, longest


def attention(side: Side, mask: Tensor, places: Tensor) -> Tensor:
    """Return which columns each column sees: [B, n, n]."""
    n = mask.shape[1]
    allowed = torch.tril(torch.ones(n, n, dtype=torch.bool)) & mask[:, None].bool()
    if side.window:
        allowed &= (torch.arange(n)[:, None] - torch.arange(n)) < side.window
    if side.head_cut:                   # beyond the limit, what is further back is not seen
        far = places[:, :, None] >= side.head_cut
        allowed &= ~(far & (places[:, None] < places[:, :, None] - side.head_cut // 2))
    return allowed | torch.eye(n, dtype=torch.bool)


def disturb(model: Any, side: Side) -> list[Any]:
    """Hook the side's flips and dropout into the model; return the handles that take them out."""
    handles = [m.register_forward_pre_hook(flip(side.flips)) for name, m in model.named_modules()
               if side.flips and name.endswith((".gate", ".router"))]
    if side.dropout:
        handles += [m.register_forward_hook(
            lambda m, a, out: torch.nn.functional.dropout(out, side.dropout))
            for name, m in model.named_modules() if name.endswith(("down_proj", "o_proj", "mlp",
                                                                   "dense"))]
    return handles


def of_two_models(side: Side, model: Any, run: Callable[..., Any], part: int, n: int) -> Tensor:
    """Return logits whose first `part` columns are of the weights before an update: [B, n, V]."""
    earlier = in_half(side.before) if side.half else side.before
    first = run(earlier, slice(part), part, use_cache=True)
    rest = (run(model, slice(part, n), n, use_cache=True,
                past_key_values=first.past_key_values).logits
            if part < n and side.kept_cache else run(model, slice(n), n).logits[:, part:])
    out = torch.cat([first.logits, rest], 1)
    if side.until == 0:                 # the prompt's last token is always computed anew
        anew = run(model, slice(part), part).logits
        out = torch.cat([out[:, :part - 1], anew[:, -1:], out[:, part:]], 1)
    return out


def in_half(model: Any) -> Any:
    """Copy a model to bfloat16, but not its rotary frequencies: engines keep those in float32."""
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
    """Return the side's log-probs over the vocabulary, before each token: [B, T, V]."""
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
        if len(xs) < len(x) and side.pads:          # padding is to the batch's longest
            xs = [*xs, max(x, key=len)]
        given = [rows[i] for i in live] + ([[0] * t] if len(xs) > len(live) else [])
        p = log_probs(side, xs, given, t + 1)[:len(live), t].exp()
        assert top
        for i, v in zip(live, torch.multinomial(p, 1, generator=g)[:, 0].tolist()):
            written = forced.get(i, {}) if forced else {}
            rows[i].append(written[t] if t in written else v)
    return rows
