"""Say what is wrong: judge a run's metrics, and name the cause of a mismatch in a dump.

This file decides what is healthy. Its limits are HEALTHY (a range), SEVERE (far beyond it),
NO_LESSON (a step that teaches nothing) and UNCORRECTED. Where a law says what is possible, the law
is tested, in standard errors. Derivation, and how many runs each limit warned of:
math/12-diagnostics.md.

    print(*diagnose(correct(old_log_prob, rollout_log_prob, mask, config).metrics), sep="\n")

A dump has log μ and log π of sampled tokens. causes.py has the laws that tell its cause.

    python doctor.py DUMP.jsonl [--json] [--figure FILE.png]
    python doctor.py [DUMP.jsonl] --model DIR [--older DIR …]      # without a dump it samples
"""

import math
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from three_policies.causes import CAUSES, ROUNDING, Finding, Tokens, find_causes, one_sided, undrawn
from three_policies.metrics import to_host

FAR = 0.15              # k3 per token
# Each row: metric, lowest and highest healthy value, what a value outside means, what to change.
# A table of chapter 12 counts the runs of chapter 15 that each row warned of, and the false alarms.
# verl advises to raise the veto's bound if it rejects too much. It must be lowered instead.
HEALTHY = (
    ("all_rejected", 0, 0, "every token was rejected, so the step taught nothing",
     "widen rollout_rs, take a larger batch or new rollouts; or a bug makes the policies differ"),
    ("train/empty_updates", 0, 0, "of some mini-batches nothing was kept; they took no step",
     "widen rollout_rs, raise rollout.max_tokens under rollout.mask_truncated, or take fewer and "
     "larger mini-batches"),
    ("rollout_is_mean", 0.1, 2, "the mean weight is far from 1: low if a cap takes the rest or the "
     "batch missed a heavy tail, high if it met one",
     "take token instead of sequence weights, or lower rollout.staleness"),
    ("rollout_is_raw_eff_sample_size", 0.005, 1, "weighted, 200 samples are worth less than one",
     "take token instead of sequence weights, reject with seq_mean_k1, or lower rollout.staleness"),
    ("rollout_is_std", 0, 1, "the weights scatter widely, so the gradient is noisy",
     "lower rollout_is_threshold (token 1.5–5, sequence 2–10, geometric 1.0002–1.001)"),
    ("rollout_is_masked_fraction", 0, 0.5, "most tokens have the weight 0 and teach nothing",
     "widen the pair of rollout_is_threshold, or truncate with a single number"),
    ("rollout_is_catastrophic_token_fraction", 0, 0.01, "π_train finds many tokens near impossible",
     "compare both log-probs on one prompt: a template, dtype or temperature differs"),
    ("rollout_is_veto_fraction", 0, 0.1, "the veto rejects many sequences",
     "check the log-probs first; then lower the bound of seq_max_k1 (1e-4 → 1e-6)"),
    ("rollout_rs_seq_masked_fraction", 0, 0.5, "over half of the sequences lose tokens",
     "widen rollout_rs: 0.1 % (0.999–1.001) suits long responses and small mismatch only"),
    ("rollout_rs_masked_fraction", 0, 0.9, "fewer than one token in ten is left to learn from",
     "widen rollout_rs: of chapter 15's 60 nine-token runs with so few left, two ended above "
     "their start"),
    ("loss/bypass_clip_fraction", 0, 0.005, "bypass mode's clip acts on the mismatch, and pulls "
     "π_θ towards π_rollout: a brake if that is an old policy, ruin if it is a rounded one",
     "recompute π_old (bypass_mode false), take a loss without a clip (preset bypass_pg_is), or "
     "open it: loss.clip_low=1, loss.clip_high=1e9"),
    ("k3_kl", 0, FAR, "π_rollout and π_old are far apart",
     "lower rollout.staleness, raise rollout.dtype or rollout.quantize_bits"),
    ("chi2_token", -1, 5, "a large shift: at χ² = 5 five samples of six are lost",
     "lower rollout.staleness, or truncate with rollout_is_threshold"),
    ("ppl_ratio", 0.8, 1.25, "one policy finds the samples far likelier than the other",
     "check temperature, top-p and top-k on both sides"),
)


# Where a response has one weight, the ESS is over responses: over tokens a long one counts often.
# Means and shares stay those of tokens, which are what the loss sums.
BY_SEQUENCE = {"rollout_is_raw_eff_sample_size": "rollout_is_raw_seq_eff_sample_size"}
SEVERE = {"chi2_token": (10, "a severe shift: more than nine samples in ten are lost",
                         "sample anew with today's weights; no bound repairs such a batch")}
DUMP = " Dump a step (run.dump=1), and python doctor.py names the cause."
UNCORRECTED = 0.002     # k3 per token without correction; chapter 15's six-bit runs have less


def _improper(values: Mapping[str, float]) -> list[str]:
    """Report values that are impossible for samples of μ, whatever the policies.  (eq:martingale)

    If π is a distribution over what μ sampled, the mean of ρ is 1 and that of k1 at least 0. z is
    the distance in standard errors; the second condition of each test keeps rounding out.
    """
    found: list[str] = []
    mean, z = (values.get(x, math.nan) for x in ("is_ratio_mean", "is_ratio_z"))
    unless = " (unless much of π_train's mass is on tokens that were never drawn)" * (
        mean < 1 and values.get("k3_kl", 0) > FAR)
    if abs(z) > 5 and abs(mean - 1) > 0.002:
        found.append(
            f"is_ratio_mean is {mean:.4g}, {abs(z):.1f} standard errors from 1: π_train is not a "
            f"distribution over what π_rollout sampled{unless}, and no weight repairs that; "
            + ("replay what top-p, top-k or min-p kept, or leave them out." if mean < 1 else
               "look for a wrong record of log μ: before temperature or cut, shifted by a token, "
               "of another prompt.") + DUMP)
    kl, z = (values.get(x, math.nan) for x in ("kl", "kl_z"))
    if z < -5 and kl < -1e-4:
        found.append(f"kl is {kl:.2g}, {-z:.1f} standard errors below 0: on average, samples of "
                     "π_rollout cannot be likelier under π_train; π_rollout's log-probs are not of "
                     "the distribution that was sampled from: check its temperature." + DUMP)
    return found


# Why a step can teach nothing, whatever the policies; only the first row that holds is reported.
# Each row: metrics with the values that they then have, what that means, what to change.
NO_LESSON = (
    ({"response/learned_fraction": 0, "response/truncated_fraction": 1}, "every response was cut, "
     "and rollout.mask_truncated leaves out those", "raise rollout.max_tokens"),
    ({"response/learned_fraction": 0}, "no response has a token to learn from",
     "look at the engine's output: are the responses empty?"),
    ({"response/truncated_fraction": 1}, "every response was cut at rollout.max_tokens, before it "
     "had ended", "raise rollout.max_tokens, or ask for less by task.instruction"),
    ({"reward/advantage_max": 0, "reward/mean": 0}, "no response was right, so none is better than "
     "another", "ask easier questions, raise rollout.samples or rollout.max_tokens, and look in "
     "eval.jsonl whether only the form of the responses is wrong"),
    ({"reward/advantage_max": 0, "reward/mean": 1}, "every response was right, so none is better "
     "than another", "ask harder questions"),
    ({"reward/advantage_max": 0}, "in each group all rewards are equal, so none is better than "
     "another", "raise rollout.samples or rollout.temperature, or take advantage.kind=reinforce"),
    ({"grad_norm": 0, "all_rejected": 0, "train/empty_updates": 0}, "rewards differ and tokens "
     "were kept, and yet nothing moves", "look at the weights (rollout_is_max) and at the clip"),
)


def _no_lesson(values: Mapping[str, float]) -> list[str]:
    for metrics, meaning, remedy in NO_LESSON:
        if all(values.get(name) == value for name, value in metrics.items()):
            name, value = next(iter(metrics.items()))
            return [f"{name} is {value}: {meaning}; {remedy}."]
    return []


def _collapsed(values: Mapping[str, float]) -> list[str]:
    """Report a mean reward below a tenth of the best so far, if 25 right responses were expected.

    By chance that happens less than once in 10⁸ steps, P(Poisson(25) ≤ 2), if the responses are
    independent. Those to one prompt are not: with few prompts it happens now and then.
    """
    mean, best, n = (values.get(x, math.nan)
                     for x in ("reward/mean", "reward/best", "response/count"))
    if not (10 * mean < best and n * best >= 25):
        return []
    return [f"reward/mean is {mean:.3g}, and was {best:.3g}: the policy has collapsed; go back to "
            "a checkpoint, with a smaller train.lr, fewer train.epochs or another correction."]


def _uncorrected(values: Mapping[str, float]) -> list[str]:
    """Report a mismatch on which neither weights nor rejection nor a ratio to π_rollout acts."""
    acts = {"rollout_is_mean", "loss/bypass_clip_fraction"} & set(values)
    k3 = values.get("k3_kl", 0.0)
    if acts or values.get("rollout_rs_masked_fraction", 1.0) > 0 or not k3 > UNCORRECTED:
        return []
    measured = "rollout_is_raw_mean" in values
    remedy = ("set correction.metrics_only=false" if measured else
              "take weights (correction.preset=decoupled_token_is)")
    return [f"k3_kl is {k3:.2g} and nothing corrects it (healthy: 0 to {UNCORRECTED:g}): the step "
            f"is that of another objective; {remedy}."]


def diagnose(metrics: Mapping[str, Any]) -> list[str]:
    """Return sentences on what looks wrong and which setting to change; [] if nothing does.

    `metrics`: as `correct` and `policy_loss` return them, tensors or floats, with or without
    "rollout_corr/". A missing metric is not judged; a value that is not finite is always reported.
    Pass loss/bypass_clip_fraction of the first mini-batch: in later ones learning moves it as well.
    """
    values = {name.removeprefix("rollout_corr/"): value for name, value in to_host(metrics).items()}
    if values.get("response/learned_fraction") == 0:         # the other metrics are of nothing
        return _no_lesson(values)
    found = [*_no_lesson(values), *_collapsed(values), *_improper(values), *_uncorrected(values)]
    one_each = values.get("rollout_is_per_sequence") == 1
    for name, low, high, meaning, remedy in HEALTHY:
        name = BY_SEQUENCE.get(name, name) if one_each else name
        value, (limit, *words) = values.get(name), SEVERE.get(name, (math.inf, meaning, remedy))
        if value is not None and value >= limit:
            meaning, remedy = words
        if value is not None and (value < low - 1e-6 or value > high):      # −1e-9 is rounding
            found.append(f"{name} is {value:.3g} (healthy: {low:g} to {high:g}): {meaning}; "
                         f"{remedy}.")
    known = {row[0] for row in HEALTHY}
    found += [f"{name} is {value}: a log-prob was not finite; look at the engine's output first, "
              "and whether the mask has tokens that were not sampled."
              for name, value in values.items() if isinstance(value, float) and (
                  math.isnan(value) or (math.isinf(value) and name not in known))]
    return found


# ------------------------------------------------------------------ from a dump to the cause

LIMIT = 300_000         # most tokens, masked ones too, that are searched for causes
TELLS = 0.05            # E[ρ] is affirmed if its doubt is at most this: see `Report.proper`
COSTS = (("prompt_ids", "temperature, penalty, padding and window are found less well or never"),
         ("entropy", "a mistake that both sides make cannot be found, nor a division after the "
          "softmax told from a cut"))


class Lost(NamedTuple):
    """The sampled tokens of which a side has no finite log-prob."""

    tokens: int = 0
    responses: int = 0                  # that have such a token
    whole: int = 0                      # of these, that have no other sampled token

    def says(self, tokens: int, responses: int) -> str:
        """Return a sentence, given how many other tokens and how many responses there are."""
        rows = (f"whole rows of them, {self.whole} of {responses}" if self.whole == self.responses
                else f"in {self.responses} of {responses} responses, "
                f"{f'{self.whole} of them' if self.whole else 'none'} whole")
        return (f"{self.tokens} of {tokens + self.tokens} sampled tokens have no finite log-prob "
                f"and are left out: {rows}")


class Report(NamedTuple):
    """Hold what a dump says: E[ρ] over all its tokens, and at most three causes."""

    responses: int
    tokens: int
    mean: float                         # E[ρ], and its standard error
    error: float
    missing: tuple[str, ...]            # names of COSTS that the dump lacks
    causes: list[Finding]
    looked_at: Tokens                   # those that were searched for causes
    lost: Lost = Lost()

    @property
    def proper(self) -> bool | None:
        """True if π is a distribution over what μ sampled, False if not, None if undecided.

        A broken record moves E[ρ]: a cut that keeps the mass Z makes it Z. Five standard errors are
        in doubt, and so is what n tokens need not show, a mass of 5/n (`undrawn`). Near 1, E[ρ]
        affirms a distribution if all doubt is at most TELLS, since then a loss of more would have
        been seen. That is 5/n at n = 100, with fewer tokens nothing is said; so the error must be
        at most 0.01. Far from 1, E[ρ] denies it, unless five errors reach 0: then a few tokens
        make up the mean, and its error is as unknown.  (eq:martingale, eq:affirmed)
        """
        if self.tokens < 100:
            return None
        doubt = max(5 * self.error, ROUNDING)
        if abs(self.mean - 1) <= doubt:
            return True if doubt <= TELLS else None
        if self.mean <= doubt or undrawn(self.looked_at.d().expm1(), 1.0):
            return None
        return False

    @property
    def faulty(self) -> bool:
        """True if there is a cause, an E[ρ] that no pair of distributions has, or a lost token."""
        return bool(self.causes or self.proper is False or self.lost.tokens)

    def as_json(self) -> dict[str, Any]:
        """Return what --json prints; `not_finite` is there if such tokens are."""
        lost = {"not_finite": self.lost._asdict()} if self.lost.tokens else {}
        return {"proper": self.proper, "e_rho": [self.mean, self.error], "tokens": self.tokens,
                **lost,
                "causes": [{"cause": f.cause, "confidence": f.confidence, "evidence": f.evidence,
                            "remedy": CAUSES[f.cause][1]} for f in self.causes]}

    def in_short(self) -> str:
        """Return one line: E[ρ], the first cause, and what is not finite."""
        first = self.causes[0] if self.causes else None
        undecided = " (undecided)" * (self.proper is None)
        lost = f"; {self.lost.says(self.tokens, self.responses)}" * bool(self.lost.tokens)
        return f"E[ρ] = {self.mean:.4f} ± {self.error:.4f}{undecided}; " + (
            f"{first.cause} ({first.confidence}): {first.evidence}" if first else
            f"no cause found: {self.without_cause()}") + lost

    def without_cause(self) -> str:
        """Say what is known without a cause: the noise of two kernels explains no E[ρ] but 1."""
        if self.proper is not False:
            return "what differs is within the noise of two kernels"
        return "E[ρ] says only that log μ is not of what was drawn, or that π " + (
            "lacks a cut that μ had" if self.mean < 1 else "adds up to more than 1")

    def verdict(self) -> str:
        """Say whether π is a distribution, or what leaves that undecided."""
        found = f"E[ρ] = {self.mean:.4f} ± {self.error:.4f} (expected 1)"
        if self.proper is None:
            why = ("fewer than 100 tokens cannot tell" if self.tokens < 100 else
                   f"an error above {TELLS / 5:g} would hide a broken record"
                   if self.error > TELLS / 5 else
                   "tokens that were never drawn may make up the difference")
            return f"{found} is undecided: {why}."
        if self.proper:
            return f"π is a distribution over what μ sampled: {found}."
        over = self.looked_at.d().expm1()                           # ρ − 1
        unless = ", unless it has over twice μ's mass on tokens that were never drawn" * (
            bool(over.mean() < 0) and one_sided(over))
        return f"π is NOT a distribution over what μ sampled{unless}: {found}."

    def __str__(self) -> str:
        lines = [f"{self.responses} responses, {self.tokens} tokens.",
                 *([f"{self.lost.says(self.tokens, self.responses)}. Look at the engine's output "
                    "first."] * bool(self.lost.tokens)),
                 *(f"Without {name}: {cost}." for name, cost in COSTS if name in self.missing),
                 self.verdict()]
        others = {f.other.cause for f in self.causes if f.other}
        for f in self.causes:
            what, remedy = CAUSES[f.cause]
            word = "Or" if f.cause in others and f.left >= 1 else "Then"
            lines += [f"{'Cause' if f is self.causes[0] else word:8}{what} ({f.cause}): "
                      f"{f.confidence}", f"        {f.evidence}", f"Do      {remedy}"]
        if not self.causes:
            copied = len(self.looked_at.mu) and not self.looked_at.d().any()
            lines.append("No cause found: " + (
                "both columns are equal to the last digit, as if one were a copy of the other."
                if copied else f"{self.without_cause()}."))
        return "\n".join(lines)


def examine(dump: Iterable[Any]) -> Report:
    """Read responses (adapters.dumps.Response) once: E[ρ] is of all, the causes of a part.

    (eq:affirmed)
    The part has at most LIMIT tokens, in whole groups of equal prompts, chosen by a hash of the
    prompt. So memory is bounded, and tokens after one prefix stay together. Of a group that is
    larger by itself, only a part stays.
    """
    kept: list[tuple[float, Any]] = []
    share, held, responses, tokens, total, squares = 1.0, 0, 0, 0, 0.0, 0.0
    lacking, lost = set[str](), Lost()
    for r in dump:
        columns = zip(r.rollout_log_probs, r.train_log_probs, r.mask)
        over = [math.expm1(min(20.0, pi - mu)) for mu, pi, counts in columns if counts]   # ρ − 1
        responses, tokens = responses + 1, tokens + len(over)
        total, squares = total + sum(over), squares + sum(x * x for x in over)
        lost = Lost(lost.tokens + r.not_finite, lost.responses + (r.not_finite > 0),
                    lost.whole + (r.not_finite > 0 and not over))
        lacking |= {name for name, x in (("prompt_ids", r.prompt_ids), ("entropy", r.entropy))
                    if x is None and r.token_ids}
        text = repr(r.token_ids if r.prompt_ids is None else (r.prompt_ids, r.line >> 12))
        place = zlib.crc32(text.encode()) / 2 ** 32
        if place < share:
            kept.append((place, r))
            held += len(r.token_ids)
        while held > LIMIT and len(kept) > 1:
            share /= 2
            kept = [(p, one) for p, one in kept if p < share] or kept[:len(kept) // 2]
            held = sum(len(one.token_ids) for _, one in kept)
    mean, part = 1 + total / max(1, tokens), Tokens.of([r for _, r in kept])
    return Report(responses, tokens, mean, math.sqrt(squares) / max(1, tokens),
                  tuple(sorted(lacking)), find_causes(part), part, lost)


if __name__ == "__main__":
    from three_policies.plumbing.consult import main
    sys.exit(main())
