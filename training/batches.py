"""Make a step's batch from samples, and split it into micro-batches.

    batch = pad(prompts, samples, advantages, device)
    for rows in micro_batches(batch, config): …
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from three_policies.centering import candidate_tables
from three_policies.rollout import Sample
from three_policies.training.settings import Config
from three_policies.training.shapes import pad_rows, to_device


class Batch(NamedTuple):
    """One step's rollouts on this rank: B = prompts × samples / ranks rows.

    Prompts are padded to P, responses to T. Tokens and attention stay on the host, where they
    decide shapes; the rest is on the device.
    """

    tokens: Tensor                                  # [B, P + T]
    attention: Tensor                               # [B, P + T]
    response_mask: Tensor                           # [B, T]
    advantages: Tensor                              # [B, T]
    rollout_log_prob: Tensor                        # [B, T]  π_rollout
    old_log_prob: Tensor | None = None              # [B, T]  π_old
    ref_log_prob: Tensor | None = None              # [B, T]  π_ref
    kept_ids: Tensor | None = None                  # [B, T, K]  the ids that μ kept, by token
    candidates: Tensor | None = None                # [B, T, K]  likeliest ids in a token's place,
    candidate_log_prob: Tensor | None = None        # [B, T, K]  and their log π_rollout; −∞: none
    versions: Tensor | None = None                  # [B, T]  the push whose weights drew the token

    def rows(self, index: Any, there: Any) -> "Batch":
        """Select rows by an index given on the host and on the device, which avoids a sync."""
        beside: Any = (None if x is None else x[there] for x in self[2:])
        return Batch(self.tokens[index], self.attention[index], *beside)


def pad(prompts: list[list[int]], samples: list[Sample], advantages: Tensor,
        device: torch.device) -> Batch:
    """Pad prompts on the left and responses on the right; advantages [B] go to every token."""
    (before, prompt_mask), (after, mask) = (
        pad_rows(prompts, "left"), pad_rows([s.tokens for s in samples], "right", least=1))
    rollout_log_prob, _ = pad_rows([s.rollout_log_prob for s in samples], "right", least=1)
    batch = Batch(torch.cat([before, after], 1), torch.cat([prompt_mask, mask], 1),
                  *to_device(device, mask.bool(), advantages[:, None].expand_as(mask),
                             rollout_log_prob.float()))
    if samples[0].kept_ids is not None:
        [ids] = to_device(device, gather_kept_ids(samples, after))
        batch = batch._replace(kept_ids=ids)
    if samples[0].versions is not None:
        versions, _ = pad_rows([s.versions or [] for s in samples], "right", least=1)
        [versions] = to_device(device, versions)
        batch = batch._replace(versions=versions)
    if samples[0].candidates is not None:
        tables = [s.candidates for s in samples if s.candidates is not None]
        ids, log_mu = to_device(device, *candidate_tables(tables, mask.bool()))
        batch = batch._replace(candidates=ids, candidate_log_prob=log_mu)
    return batch


def gather_kept_ids(samples: list[Sample], tokens: Tensor) -> Tensor:
    """Return the ids that μ kept, [B, T, K]; each set is padded with its own sampled token."""
    sizes, _ = pad_rows([[len(ids) for ids in s.kept_ids or []] for s in samples], "right", least=1)
    kept = tokens[:, :, None].repeat(1, 1, max(1, int(sizes.max()))).int()
    kept[torch.arange(kept.shape[-1]) < sizes[:, :, None]] = torch.tensor(
        [v for s in samples for ids in s.kept_ids or [] for v in ids], dtype=torch.int)
    return kept


def micro_batches(batch: Batch, config: Config, together: bool = False) -> list[Tensor]:
    """Return row numbers, micro_batch_size or _tokens at a time, rows of similar length together.

    With `together` the samples of a prompt stay together, if micro-batches hold whole groups. The
    prompt then runs once for all of them.
    """
    lengths, n = batch.attention.sum(-1), config.rollout.samples                        # [B]
    length, size, most = lengths, config.train.micro_batch_size, config.train.micro_batch_tokens
    groups = together and (size % n == 0 if most is None else n * int(lengths.max()) <= most)
    if groups:
        length = lengths.view(-1, n).amax(1).repeat_interleave(n)     # the group's longest: [B]
    order = length.argsort(stable=True)
    parts = order.split(size) if most is None else within_budget(
        order, batch, most, n if groups else 1, config.policy.packed)
    return [rows[lengths[rows].argsort(stable=True)] for rows in (x.sort().values for x in parts)]


def within_budget(order: Tensor, batch: Batch, most: int, together: int, packed: bool
                  ) -> list[Tensor]:
    """Split rows into parts of at most `most` tokens, padding included; a longer row runs alone.

    Packed rows have no padding.

    FSDP needs equally many forward passes on every rank, so ranks with fewer parts halve their
    largest. Each rank has the same number of rows, and no part is empty.
    """
    start = batch.tokens.shape[1] - batch.response_mask.shape[1]
    spans = torch.stack([x.sum(-1) for x in batch.attention.tensor_split([start], 1)], -1)  # [B, 2]
    parts = [order[:0]]
    for rows in order.split(together):
        joined = torch.cat([parts[-1], rows])
        tokens = spans[joined].sum() if packed else len(joined) * spans[joined].amax(0).sum()
        if len(parts[-1]) and tokens > most:
            parts.append(rows)
        else:
            parts[-1] = joined
    count = torch.tensor(len(parts))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        parts[largest:largest + 1] = parts[largest].tensor_split(2)
    return parts


def nonfinite_rows(batch: Batch, policies: dict[str, Tensor], tokenizer: Any) -> list[str]:
    """Return policy, token and prompt of each row's first log-prob that is not finite."""
    found, width = {}, batch.response_mask.shape[1]
    for policy, log_prob in policies.items():
        for row, t in (~log_prob.isfinite() & batch.response_mask).nonzero().tolist():
            prompt = batch.tokens[row, :-width][batch.attention[row, :-width].bool()]
            prompt, token = map(tokenizer.decode, (prompt, batch.tokens[row, t - width]))
            found.setdefault(row, f"{policy} has the log-prob {log_prob[row, t].item()} for "
                             f"token {t + 1}, {token!r}, after the prompt {prompt[-200:]!r}")
    return list(found.values())
