"""Train a language model on one node, in one loop from a question to an updated policy.

A step: prompts → rollouts from π_rollout → rewards → advantages → log-probs under π_old (not in
bypass mode) → `correct` → epochs × mini-batches × micro-batches of π_θ → weights into the engine.

This file decides
* A loss is a sum over tokens divided by a global count, so ranks and micro-batches only split the
  work: mini-batch m has the same prompts on one rank as on eight, and gradients are summed.
* Everything random is drawn from (seed, purpose, step, index). A killed run therefore continues as
  if it had not been killed, on any number of ranks, and no random state is saved. On a CPU it ends
  with the same bits; a GPU's atomic additions come in any order.
Left out are tensor parallelism, value functions, reward models, rollouts of several turns with
tools (math/17-turns-and-tools.md), and replayed routes (math/18-routes.md).

    python trainer.py [FILE.yaml] [section.key=value …]    # default: configs/demo.yaml, and with
                                                           # task.kind=jsonl or parquet gsm8k.yaml
    torchrun --nproc-per-node 2 trainer.py correction.preset=bypass_pg_is rollout.engine=vllm
"""

if __name__ == "__main__":
    from three_policies.training import signals
    signals.catch()                # before the other imports, which take seconds

import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from three_policies.correction import Correction, correct, importance_weights
from three_policies.estimators import grpo_advantages, reinforce_advantages, rloo_advantages
from three_policies.kl import kl_penalty, kl_ratio
from three_policies.losses import Counts, LossConfig, count, kl_loss, loss_means, policy_loss
from three_policies.metrics import merge
from three_policies.policy import Policy, full_tensor, set_aside
from three_policies.presets import RolloutCorrectionConfig
from three_policies.ratios import masked_log_ratio
from three_policies.rollout import Sample as Sample      # re-exported
from three_policies.training import signals
from three_policies.training.batches import Batch, micro_batches, nonfinite_rows, pad
from three_policies.training.faults import report_errors
from three_policies.training.packing import Packing
from three_policies.training.run import Run, open_run
from three_policies.training.settings import Config, correction_of, help_text, kl_of, load_config
from three_policies.training.shapes import Shape, to_device
from three_policies.training.tasks import seed_of


def train(run: Run) -> None:
    config, options, record = run.config, correction_of(run.config), run.record
    policy, reference = run.loaded.policy, run.loaded.reference
    before, evaluation = run.checkpoints.saved.get("before"), None
    if first := before is None:
        before = evaluate(run).accuracy
    run.push_weights(evaluated=first)
    for step in run.steps(before):
        with record.time_part("rollout"):
            batch, metrics = sample(run, step)
        with record.time_part("log_probs"):
            if not options.bypass_mode or penalizes(config):    # in bypass mode only a KL needs it
                batch = batch._replace(old_log_prob=score(policy, batch, config))
            if reference is not None:
                batch = batch._replace(ref_log_prob=score(reference, batch, config))
            sampled = batch.response_mask               # before it loses what is not finite
            batch = with_kl_in_reward(without_nonfinite(run, batch), config)
        if record.wants_doctor():
            with record.time_part("doctor"):
                every = batch._replace(response_mask=sampled)
                record.consult(log_probs_of(policy, every, config))

        with record.time_part("update"):
            set_learning_rate(run, step)
            metrics |= learn(run, batch, options)
        with record.time_part("sync"):
            if due := step == config.train.steps or step % config.train.eval_every == 0:
                evaluation = evaluate(run)
                metrics["eval/accuracy"] = evaluation.accuracy
            elif step == 1:
                metrics["eval/accuracy"] = before
            run.push_weights(evaluated=due)
        run.log(step, metrics)
        run.save_if_due(step, before)
    # There is no evaluation if the run was killed after its last step.
    run.finish(before, *(evaluation or evaluate(run)))


def learn(run: Run, batch: Batch, options: RolloutCorrectionConfig) -> dict[str, Any]:
    """Take all updates of a step, epochs × mini-batches, and return their metrics."""
    config, correction = run.config, None   # bypass: ρ = π_θ/π_rollout changes with every update
    if not options.bypass_mode and batch.old_log_prob is not None:
        correction = correct(batch.old_log_prob, batch.rollout_log_prob, batch.response_mask,
                             options, batch.advantages, dist.group.WORLD)
    updates, size = [], len(batch.tokens) // config.train.mini_batches
    for _ in range(config.train.epochs):
        for rows in (slice(i, i + size) for i in range(0, len(batch.tokens), size)):
            part = correction and correction.rows(rows)
            updates.append(update(run, batch.rows(rows, rows), options, part))

    metrics = average(updates)
    first_epoch = [c for u in updates[:config.train.mini_batches] for c in u.corrections]
    if correction or first_epoch:              # neither: every update was skipped
        metrics |= merge([correction] if correction else first_epoch, dist.group.WORLD)
    return metrics


class Outcomes(NamedTuple):
    """What became of N samples, floats [N] each: ranks gather them as one tensor."""

    rewards: Tensor                    # some may be NaN or infinite
    lengths: Tensor                    # in tokens
    finished: Tensor                   # 1 if it ended by itself, not at the limit
    empty: Tensor                      # 1 if it has no text
    crossed: Tensor                    # 1 if the weights changed within it

    @property
    def known(self) -> Tensor:
        return self.rewards.isfinite()

    def learned(self, mask_truncated: bool) -> Tensor:
        """Return a mask of the samples that have a token to train on."""
        return self.known & (self.lengths > 0) & (self.finished.bool() | (not mask_truncated))

    def of_all_ranks(self, n: int) -> "Outcomes":
        """Gather those of all ranks, n to a prompt, in the order that one rank would have."""
        own = torch.stack(self, 1)                                                      # [B, 5]
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        prompts = torch.stack([x.view(-1, n, len(self)) for x in everyone], 1)
        return Outcomes(*prompts.view(-1, len(self)).T)                                 # 5 × [N]


def sample(run: Run, step: int) -> tuple[Batch, dict]:
    """Sample this rank's prompts (every world-th of the step); return a batch and its metrics."""
    config, loaded, n = run.config, run.loaded, run.config.rollout.samples
    rank, world, size = dist.get_rank(), dist.get_world_size(), config.rollout.prompts
    chosen = loaded.task.order(config.seed, (step - 1) * size, size)
    rows = [(p, j) for p in range(rank, size, world) for j in range(n)]
    prompts = [loaded.prompts[chosen[p]] for p, _ in rows]
    seeds = [seed_of(config.seed, "sample", step, *r) for r in rows]
    samples, texts = run.generate(prompts, seeds, step)
    loaded.engine.sleep()

    problems = [loaded.task.train[chosen[p]] for p, _ in rows]
    rewards = [loaded.task.reward(problem, text) for problem, text in zip(problems, texts)]
    run.record.show_first(loaded.tokenizer.decode(prompts[0]), texts[0], rewards[0])
    run.record.judge_match(problems, texts, rewards)
    own = Outcomes(*torch.tensor([[reward, len(s.tokens), s.finished, not text, s.crossed]
                                  for reward, s, text in zip(rewards, samples, texts)]).T)
    everyone = own.of_all_ranks(n)      # baselines need whole groups and batches
    if not everyone.known.all():
        run.record.nonfinite("samples", [
            f"the reward of {text!r} for {problems[i].where} is "
            f"{own.rewards[i]:g}" for i, text in enumerate(texts) if not own.known[i]])

    advantages = advantages_of(everyone, config)                                        # [N]
    mine = advantages.view(-1, n)[rank::world].flatten()                                # [B]
    batch = pad(prompts, samples, mine, run.device)
    learned = own.learned(config.rollout.mask_truncated)                                # [B]
    mask = batch.response_mask & to_device(run.device, learned)[0][:, None]             # [B, T]
    return batch._replace(response_mask=mask), sample_metrics(everyone, advantages, config)


def advantages_of(everyone: Outcomes, config: Config) -> Tensor:
    """Return the advantages of all ranks' samples; a reward that is not finite counts as 0: [N]."""
    known = everyone.known
    rewards = torch.where(known, everyone.rewards, 0.0)
    groups = torch.arange(config.rollout.prompts).repeat_interleave(config.rollout.samples)
    return {
        "grpo": lambda: grpo_advantages(rewards, groups, config.advantage.normalize_std, known),
        "rloo": lambda: rloo_advantages(rewards, groups, known),
        "reinforce": lambda: reinforce_advantages(rewards, known),
    }[config.advantage.kind]()


def sample_metrics(everyone: Outcomes, advantages: Tensor, config: Config) -> dict:
    """Measure rewards and responses of all ranks."""
    known, lengths, n = everyone.known, everyone.lengths, config.rollout.samples
    rewards = torch.where(known, everyone.rewards, 0.0)
    best = torch.where(known, rewards, -math.inf).view(-1, n).amax(1)                   # [prompts]
    worst = torch.where(known, rewards, math.inf).view(-1, n).amin(1)
    learned = everyone.learned(config.rollout.mask_truncated)
    return {
        "reward/mean": rewards.sum() / known.sum().clamp(min=1),
        "reward/std": rewards[known].std(correction=0) if known.any() else torch.tensor(0.0),
        "reward/groups_without_signal": (best <= worst).float().mean(),
        "reward/advantage_max": torch.where(known, advantages, 0.0).abs().max(),
        "response/count": len(lengths),
        "response/learned_fraction": learned.float().mean(),
        "response/learned_length_mean": lengths[learned].sum() / learned.sum().clamp(min=1),
        "response/crossed_fraction": everyone.crossed.mean(),
        "response/tokens": lengths.sum(), "response/length_mean": lengths.mean(),
        "response/length_max": lengths.max(),
        "response/truncated_fraction": 1 - everyone.finished.mean(),
        "response/empty_fraction": everyone.empty.mean()}


def log_probs(policy: Callable[..., Any], batch: Batch, candidates: Tensor | None = None,
              packed: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return log π of these rows' tokens, renormalised over what μ kept: [B, T].  (eq:sampling)

    The second result is that of the candidates in each token's place, [B, T, K], or None.
    """
    width, device = batch.response_mask.shape[1], batch.response_mask.device
    shape = (Packing if packed else Shape).of(batch.tokens, batch.attention, width, device)
    given = *to_device(device, batch.tokens, batch.attention), width, shape, batch.kept_ids
    return (policy(*given), None) if candidates is None else policy(*given, candidates)


@torch.no_grad()
def score(policy: Callable[..., Any], batch: Batch, config: Config) -> Tensor:
    """Return log-probs of all rows under a policy, without a graph: [B, T]."""
    log_prob = torch.zeros_like(batch.rollout_log_prob)
    for rows in micro_batches(batch, config):
        [there] = to_device(log_prob.device, rows)
        log_prob[there], _ = log_probs(policy, batch.rows(rows, there), packed=config.policy.packed)
    return log_prob


def log_probs_of(policy: Policy, batch: Batch, config: Config) -> dict[str, Tensor | None]:
    """Return what `rows_of` takes of a batch; bypass mode computes π_old for this alone."""
    old, start = batch.old_log_prob, batch.tokens.shape[1] - batch.response_mask.shape[1]
    old = score(policy, batch, config) if old is None else old
    (prompts, tokens), (prompt_mask, token_mask) = (
        x.tensor_split([start], 1) for x in (batch.tokens, batch.attention))
    return {"prompts": prompts, "prompt_mask": prompt_mask, "tokens": tokens,
            "token_mask": token_mask, "response_mask": batch.response_mask,
            "rollout_log_prob": batch.rollout_log_prob, "train_log_prob": old,
            "versions": batch.versions}


def without_nonfinite(run: Run, batch: Batch) -> Batch:
    """Raise on rows with a log-prob that is not finite, or mask them (train.on_nonfinite)."""
    names = ("π_rollout", "π_old", "π_ref")
    policies = {name: x for name, x in zip(names, batch[4:7], strict=True) if x is not None}
    fault = ~torch.stack(list(policies.values())).isfinite() & batch.response_mask   # […, B, T]
    faults = fault.any(-1).sum()
    dist.all_reduce(faults)        # all ranks decide the same
    if faults:
        run.record.nonfinite("samples", nonfinite_rows(batch, policies, run.loaded.tokenizer))
    return batch._replace(response_mask=batch.response_mask & ~fault.any(0).any(-1, keepdim=True))


def with_kl_in_reward(batch: Batch, config: Config) -> Batch:
    """Subtract kl_coef · `kl_penalty` of π_old from the advantages, in both modes."""
    if not penalizes(config) or batch.old_log_prob is None or batch.ref_log_prob is None:
        return batch
    kind, level = kl_of(config.loss)
    penalty = kl_penalty(batch.old_log_prob, batch.ref_log_prob, batch.rollout_log_prob,
                         batch.response_mask, kind, level,
                         None if level is None else
                         loss_weights(batch.old_log_prob, batch, correction_of(config)))
    return batch._replace(advantages=batch.advantages - config.loss.kl_coef * penalty)


def penalizes(config: Config) -> bool:
    return config.loss.kl_in == "reward" and config.loss.kl_coef != 0


def loss_weights(old_log_prob: Tensor, batch: Batch,
                 options: RolloutCorrectionConfig) -> Tensor | None:
    """Return the factor of each token's score in the loss at π_θ = π_old, clip aside: [B, T]."""
    given = old_log_prob, batch.rollout_log_prob, batch.response_mask
    if options.bypass_mode and options.loss.level is not None:        # the loss's own ratio
        return importance_weights(masked_log_ratio(*given), batch.response_mask,
                                  options.loss.level, math.inf)
    return correct(*given, options, batch.advantages, dist.group.WORLD).weights


def loss_of(config: Config) -> LossConfig:
    """Return the section `loss` as `policy_loss` takes it; the horizon is rollout.max_tokens."""
    return replace(config.loss, horizon=config.loss.horizon or config.rollout.max_tokens)


class Update(NamedTuple):
    metrics: dict[str, Tensor]
    corrections: list
    empty: bool = False                # nothing was kept


def update(run: Run, batch: Batch, options: RolloutCorrectionConfig,
           correction: Correction | None = None) -> Update:
    """Take one optimizer step on one mini-batch, given this rank's rows of it.

    If the gradient is 0, because all advantages are 0 or nothing is kept, no step is taken: AdamW
    would still move the weights, by its momentum and by weight decay. A mini-batch of which nothing
    is kept counts in train/empty_updates, unless a KL term in the loss or score centering learns
    from its rejected tokens.
    """
    config, policy = run.config, run.loaded.policy
    kept_counts = config.loss.denominator == "kept"
    if correction is None and (options.of_whole_batches or kept_counts):
        # What is kept, and the mean weight, are known only after a pass over the mini-batch.
        correction = correct(score(policy, batch, config), batch.rollout_log_prob,
                             batch.response_mask, options, batch.advantages, dist.group.WORLD)
    whole = global_counts(batch.response_mask)
    counts = global_counts(correction.mask) if correction and kept_counts else whole

    sums, corrections, gradients = defaultdict[str, Any](float), [], dict[Tensor, Tensor]()
    shares = not (config.policy.gradient_checkpointing or config.policy.packed)     # its prompts
    for rows in micro_batches(batch, config, together=shares):
        [there] = to_device(batch.response_mask.device, rows)
        part, decided = batch.rows(rows, there), correction and correction.rows(there)
        loss, metrics, decided = loss_of_part(policy, part, options, config, decided, counts, whole)
        (loss * dist.get_world_size()).backward()   # FSDP averages over ranks; these are summands
        if config.policy.cpu_offload:
            set_aside(policy, gradients)
        corrections.append(decided)
        for name, value in metrics.items():
            sums[name] = sums[name] + value
    for weight, gradient in gradients.items():
        weight.grad = gradient

    totals = torch.stack(list(sums.values()))
    dist.all_reduce(totals)
    norm: Any = nn.utils.clip_grad_norm_(policy.parameters(), config.train.max_grad_norm)
    norm = full_tensor(norm)                                    # of all ranks' shards
    finite, learns = step_or_skip(run, norm, totals, learning=list(sums).index("learning"))

    if not finite:
        run.record.nonfinite("updates", nonfinite_rows(
            batch, {"π_θ": score(policy, batch, config)}, run.loaded.tokenizer))
        return Update({}, [])
    learns = learns or options.score_centering or (
        config.loss.kl_in == "loss" and config.loss.kl_coef != 0)
    means = loss_means({name: x for name, x in zip(sums, totals) if name != "learning"})
    return Update({**means, "grad_norm": norm}, [correction] if correction else corrections,
                  empty=not learns)


def loss_of_part(policy: Policy, part: Batch, options: RolloutCorrectionConfig, config: Config,
                 correction: Correction | None, counts: Counts, whole: Counts
                 ) -> tuple[Tensor, dict[str, Tensor], Correction]:
    """Return a micro-batch's summand of the loss, its sums, and the correction of its rows.

    `counts` divide the policy's loss, `whole` the KL term, which rejected tokens keep.
    """
    log_prob, of_candidates = log_probs(policy, part, part.candidates,
                                        config.policy.packed)                   # [B, T], [B, T, K]
    candidates: Any = None if of_candidates is None else (of_candidates, part.candidate_log_prob)
    if correction is None:
        correction = correct(log_prob, part.rollout_log_prob, part.response_mask, options,
                             part.advantages)
    loss, metrics = policy_loss(
        log_prob, part.old_log_prob, part.rollout_log_prob, part.advantages, part.response_mask,
        options, loss_of(config), correction=correction, counts=counts, candidates=candidates)

    if part.ref_log_prob is not None:
        kl = kl_to_reference(log_prob, part, config, whole)
        metrics["loss/kl"] = kl.detach()
        if config.loss.kl_in == "loss":
            loss = loss + config.loss.kl_coef * kl
    metrics["learning"] = tokens_to_learn_from(correction, options)
    return loss, metrics, correction


def step_or_skip(run: Run, norm: Tensor, totals: Tensor, learning: int) -> tuple[bool, bool]:
    """Take the optimizer's step if the gradient is finite and not 0.

    Returns whether all is finite, and whether any token was learned from: totals[learning] > 0.
    """
    finite = norm.isfinite() & totals.isfinite().all()
    finite, learns, moves = torch.stack(
        [finite, totals[learning] > 0, finite & (norm > 0)]).tolist()
    if moves:
        run.loaded.optimizer.step()
    run.loaded.optimizer.zero_grad()
    return finite, learns


def kl_to_reference(log_prob: Tensor, batch: Batch, config: Config, counts: Counts) -> Tensor:
    """Return KL(π_θ‖π_ref) of these rows as loss.kl_kind and loss.kl_correction estimate it."""
    assert batch.ref_log_prob is not None
    kind, level = kl_of(config.loss)
    ratio = None if level is None else kl_ratio(
        log_prob, batch.rollout_log_prob, batch.response_mask, kind, level)
    return kl_loss(log_prob, batch.ref_log_prob, batch.response_mask, kind, config.loss.aggregation,
                   ratio=ratio, counts=counts, horizon=config.rollout.max_tokens)


def tokens_to_learn_from(correction: Correction, options: RolloutCorrectionConfig) -> Tensor:
    """Return the number of tokens that are kept and have a weight above 0."""
    kept, weights = correction.mask.bool(), correction.weights
    if weights is not None and not options.ratio_is_the_weight:
        kept = kept & (weights > 0)
    return kept.sum().float()


def global_counts(mask: Tensor) -> Counts:
    counts = torch.stack(count(mask))
    dist.all_reduce(counts)
    return Counts(*counts)


def average(updates: list[Update]) -> dict[str, Tensor | float]:
    """Average over a step's updates; loss/bypass_clip_fraction is the first's, before θ moved."""
    metrics = [u.metrics for u in updates if u.metrics]
    means = {name: torch.stack([m[name] for m in metrics]).mean()
             for m in metrics[:1] for name in m}
    first = {name: x for name, x in updates[0].metrics.items()
             if name == "loss/bypass_clip_fraction"}
    return {**means, **first, "train/empty_updates": float(sum(u.empty for u in updates))}


def set_learning_rate(run: Run, step: int) -> None:
    """Warm the learning rate up, then keep it or let it fall, by half a cosine."""
    train = run.config.train
    warm = min(1.0, step / (train.warmup_steps + 1))
    left = min(1.0, (train.steps - step + 1) / max(1, train.steps - train.warmup_steps))
    falls = {"constant": 1.0, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[train.schedule]
    for group in run.loaded.optimizer.param_groups:
        group["lr"] = train.lr * (warm * falls)


class Evaluation(NamedTuple):
    accuracy: float                    # of all ranks
    answers: list[dict]                # of this rank, with their questions


def evaluate(run: Run) -> Evaluation:
    """Measure the share of held-out problems with reward 1, by one sample each, of fixed seeds.

    The engine gets the policy's weights (in its dtype), neither rounded nor stale, and samples at
    the training temperature and cut: what is measured is what is trained. A reward that is not
    finite counts as 0.
    """
    run.load_weights()
    task = run.loaded.task
    own = range(dist.get_rank(), len(task.held_out), dist.get_world_size())
    _, texts = run.generate([run.loaded.held_out_prompts[i] for i in own],
                            [seed_of(run.config.seed, "eval", i) for i in own])
    answers = [{"question": p.question, "answer": p.answer, "response": text,
                "reward": reward if math.isfinite(reward := task.reward(p, text)) else 0.0}
               for p, text in zip((task.held_out[i] for i in own), texts)]
    right = torch.tensor(float(sum(a["reward"] == 1 for a in answers)))
    dist.all_reduce(right)
    return Evaluation(right.item() / len(task.held_out), answers)


def start(config: Config) -> None:
    with open_run(config) as run:
        if run is not None:
            train(run)


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        signals.show(f"{__doc__}\n{help_text()}")
        return 0
    with report_errors() as outcome:
        signals.listen()
        start(load_config(argv))
    signals.done(failed=outcome.code != 0)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
