"""Sample with one model, score with another, and compare their whole distributions.

The sampler runs token by token, the trainer's model whole responses at once, in float32. Moments
of ρ are sums over the vocabulary in float64, along the prefixes that the sampler drew.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from three_policies.engines.choice import make_engine
from three_policies.estimators import sampling_log_probs
from three_policies.training.shapes import pad_rows

CANDIDATES = 64                                        # of vLLM


# ---------------------------------------------------------------------------------- the sampler

class Drawn(NamedTuple):
    """A response, log μ as the sampler recorded it, and all of μ or of its likeliest tokens."""

    tokens: list[int]
    log_mu: list[float]
    ids: Tensor | None                                 # [|y|, K]; None: the whole vocabulary
    table: Tensor                                      # log μ of `ids`, [|y|, K or V]


class Skipped(nn.Module):
    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


@torch.inference_mode()
def draw(model: Any, head: Tensor, prompts: list[list[int]], end: list[int], limit: int,
         first: int = 0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
         ) -> list[Drawn]:
    """Sample token by token from a cache, as engines do; a prompt has the same noise in each call.

    `head`: the weight [V, hidden] that makes logits, in a dtype of its own. `first`: the number of
    the first prompt, from which its noise comes.
    """
    device, last = head.device, torch.tensor(end, device=head.device)
    noise = [torch.Generator(device).manual_seed(first + i) for i in range(len(prompts))]
    ids, attention = (x.to(device) for x in pad_rows(prompts, "left"))
    places, cache = (attention.cumsum(-1) - 1).clamp(min=0), None
    open_ = torch.arange(len(prompts), device=device)
    tokens = torch.full((len(prompts), limit), end[0], device=device)
    table = torch.empty(len(prompts), limit, len(head), device=device)

    for t in range(limit):
        found = model.get_decoder()(input_ids=ids, attention_mask=attention, position_ids=places,
                                    past_key_values=cache, use_cache=True)
        cache, hidden = found.past_key_values, found.last_hidden_state[:, -1]
        logits = F.linear(hidden.to(head.dtype), head).float()
        log_mu, _ = sampling_log_probs(logits, temperature, top_k, top_p)
        waits = torch.stack([log_mu.new_empty(len(head)).exponential_(generator=noise[i])
                             for i in open_])
        ids = (log_mu - waits.log()).argmax(-1, keepdim=True)
        table[open_, t], tokens[open_, t] = log_mu, ids[:, 0]

        goes_on = (~torch.isin(ids[:, 0], last)).nonzero()[:, 0]
        if not len(goes_on):
            break
        cache.batch_select_indices(goes_on)
        open_, ids, places = open_[goes_on], ids[goes_on], places[goes_on, -1:] + 1
        attention = F.pad(attention[goes_on], (0, 1), value=1)
    return [cut(*of, last) for of in zip(tokens, table, strict=True)]


def cut(y: Tensor, table: Tensor, end: Tensor) -> Drawn:
    """Return a response up to its end token, if it has one."""
    places = torch.isin(y, end).nonzero()[:, 0].tolist()
    n = places[0] + 1 if places else len(y)
    log_mu = table[:n].gather(-1, y[:n, None])[:, 0]
    return Drawn(y[:n].tolist(), log_mu.tolist(), None, table[:n])


def draw_with_vllm(path: Path, dtype: str, prompts: list[list[int]], end: list[int], limit: int,
                   device: str) -> list[Drawn]:
    engine = make_engine("vllm", path, dtype=dtype, candidates=CANDIDATES, device=device,
                         max_model_len=max(map(len, prompts)) + limit)
    try:
        samples = engine.generate(prompts, [*range(len(prompts))], temperature=1.0,
                                  max_tokens=limit, eos_ids=end)
        return [Drawn(one.tokens, one.rollout_log_prob, one.candidates[0].long(), one.candidates[1])
                for one in samples if one.candidates]
    finally:
        engine.close()


# ---------------------------------------------------------------------------------- the trainer

class Compared(NamedTuple):
    """What is known of the tokens of one response: [|y|] each."""

    log_pi: Tensor              # float32
    entropy: Tensor             # of π
    kl: Tensor                  # Σ_v μ(v) log μ(v)/π(v), as those below in float64
    k3: Tensor                  # E_μ[ρ − 1 − log ρ]: the KL, unless μ cannot draw what π can
    mass: Tensor                # E_μ[ρ]
    second: Tensor              # E_μ[ρ²]


@torch.inference_mode()
def score(model: Any, prompts: list[list[int]], drawn: list[Drawn], rows: int = 8
          ) -> Iterator[Compared]:
    """Run prompts and responses at once, and compare each token's π with the sampler's μ.

    Logits are float32 whatever the layers compute in.
    """
    head = model.get_output_embeddings().weight.float()
    for first in range(0, len(drawn), rows):
        part, before = drawn[first:first + rows], prompts[first:first + rows]
        x, here = pad_rows(before, "left")
        y, there = pad_rows([one.tokens for one in part], "right")
        ids, attention = (z.to(head.device) for z in (torch.cat([x, y], 1),
                                                      torch.cat([here, there], 1)))
        hidden = model.get_decoder()(
            input_ids=ids, attention_mask=attention,
            position_ids=(attention.cumsum(-1) - 1).clamp(min=0)).last_hidden_state
        for one, of in zip(part, hidden[:, x.shape[1] - 1:], strict=True):
            found = compared(one, F.linear(of[:len(one.tokens)].float(), head))
            yield Compared(*(z.cpu() for z in found))


def compared(one: Drawn, logits: Tensor) -> Compared:
    drawn = torch.tensor(one.tokens, device=logits.device)[:, None]
    log_pi = logits.log_softmax(-1).gather(-1, drawn)[:, 0]
    p, m = logits.double().log_softmax(-1), one.table.to(logits.device).double()
    entropy = -(p.exp() * p).sum(-1)
    if one.ids is not None:                            # the rest is one more token
        p, m = (torch.cat([x, (-x.exp().sum(-1, keepdim=True)).clamp(min=-1 + 1e-12).log1p()], -1)
                for x in (p.gather(-1, one.ids.to(p.device)), m))
    m = m - m.logsumexp(-1, keepdim=True)              # float32's normalisation is off by 1e-7
    kept = m > -math.inf
    log_rho = torch.where(kept, p - m, 0.0)
    weight = m.exp()
    return Compared(log_pi, entropy.float(), -(weight * log_rho).sum(-1),
                    (weight * (log_rho.expm1() - log_rho)).sum(-1),
                    (weight * log_rho.exp()).sum(-1), (weight * (2 * log_rho).exp()).sum(-1))
