"""Find the causes of a mismatch from log μ and log π of sampled tokens.

This file decides which law names which cause: the laws of laws.py and the parts of places.py
compete by the share of the gap that each leaves. The best one's effect is taken out of the data,
and the rest is looked at again. doctor/rates.txt says how often all of it is right.
Derivation: math/8-what-is-wrong.md.

    print(*find_causes(Tokens.of(dumps.read("dump.jsonl"))), sep="\n")
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math

from torch import Tensor

from three_policies.doctor.laws import (RECORD, Finding, barred, beyond, calibration,
                                        is_broken, order, record, shift, sixteen_bits, slope_of)
from three_policies.doctor.places import decode, deeper, over_time, penalty, places
from three_policies.doctor.tokens import (FLOOR, Tokens, confident, evenness, floor, numerics,
                                          off_median, pairs, scatter, size_of, sorted_rows,
                                          z_of_rho)

MOST, FEW = 3, 20       # most causes that are named; of so few tokens none is
LAWS = (sixteen_bits, shift, order, penalty, decode, record, slope_of, calibration)
# Parts where π is another distribution: they do not make log ρ one number after each prefix.
OF_ANOTHER = {"context", "padding", "window", "in-flight", "stale"}
# A cause that was found silences these besides itself: they would be what it leaves.
RECORDS = {"temperature", "softcap", "raw", "cut"}
SILENCED = {"shift": {"order", "decode"}, "order": {"decode"}, **dict.fromkeys(RECORDS, RECORDS),
            "penalty": RECORDS | {"in-flight", "window", "decode"}}


def find_causes(x: Tokens, experts: bool | None = None, coarse: bool = False) -> list[Finding]:
    """Return at most three causes: what explains most of the gap, then what explains the rest.

    experts: whether the model has some; None is not known. coarse: weights were rounded on purpose,
    so that no token can be too sure.
    """
    x = sorted_rows(x)
    never = barred(x)                   # its few −∞ would decide all others
    found = [never] if never else list[Finding]()
    x = never.rest if never and never.rest else x
    silent = {f.cause for f in found}   # no record is: without its −∞ nothing is left of this cut
    chosen = False          # end tokens are out: what was drawn chose the rest, whose E[ρ] is not 1

    while len(found) < MOST and len(x.t) > FEW:
        ranked = by_share(candidates(x, silent, chosen))
        first = ranked[0] if ranked else without_mark(x, found, chosen, experts, coarse)
        if first is None or first.cause in silent:
            break

        found.append(first._replace(other=first.other or close_second(ranked)))
        if first.rest is None:
            break
        silent |= {first.cause} | SILENCED.get(first.cause, set())
        chosen = chosen or (first.cause == "eos" and not is_broken(x))
        x = first.rest
    return with_seconds(found)


def candidates(x: Tokens, silent: set[str], chosen: bool) -> list[Finding]:
    """Return what explains the gap: parts of the tokens, and laws."""
    parts = parts_that_begin(x, silent)
    laws = [f for law in LAWS if (f := law(x)) and f.cause not in silent]
    if any(f.cause == "shift" for f in laws):           # the simplest order
        laws = [f for f in laws if f.cause != "order"]
    if "penalty" not in silent | {f.cause for f in laws}:
        laws += hidden_penalty(x, parts)
    if chosen or any(is_whole(f.rest) for f in parts if not (
            f.cause in OF_ANOTHER and beyond("even", evenness(x)))):
        laws = [f for f in laws if f.left != RECORD]        # few tokens made π improper
    return parts + laws


def parts_that_begin(x: Tokens, silent: set[str]) -> list[Finding]:
    """Return the parts that have the gap, but not `in-flight` where it has no first token."""
    parts = [f for f in places(x) if f.cause not in silent]
    if any(f.cause == "in-flight" for f in parts):
        smooth, _ = over_time(x)
        if smooth and smooth.cause in ("context", "padding"):
            return [f for f in parts if f.cause != "in-flight"]
    return parts


def hidden_penalty(x: Tokens, parts: list[Finding]) -> list[Finding]:
    """Return a weak penalty if there is a place: ever more tokens were seen, so it looks like one.

    The place is what else it may be.
    """
    begun = [f for f in parts if f.cause in ("window", "in-flight")]
    weak = penalty(x, easier=2) if begun else None
    return [weak._replace(other=min(begun, key=lambda f: f.left))] if weak else []


def is_whole(x: Tokens | None) -> bool:
    """True if there are tokens whose record is right: π is a distribution over them."""
    return x is not None and len(x.t) > FEW and not record(x)


def by_share(found: list[Finding]) -> list[Finding]:
    """Sort by the share left; where nine digits are equal, by the order of CAUSES, not rounding."""
    return sorted(found, key=lambda f: (float(f"{f.left:.9g}"), [*CAUSES].index(f.cause)))


def close_second(ranked: list[Finding]) -> Finding | None:
    """Return the second of what is ranked if it saves more than half of the first one's nats."""
    if len(ranked) < 2:
        return None
    first, second, *_ = ranked
    return second if RECORD < first.left > second.left ** 2 else None


def without_mark(x: Tokens, found: list[Finding], chosen: bool,
                 experts: bool | None = None, coarse: bool = False) -> Finding | None:
    """Return what a gap without a place and a law is, unless the last cause leaves only noise."""
    if found and found[-1].enough:
        return None
    first = texture(x, experts=experts, coarse=coarse)
    return None if chosen and first and first.cause in RECORDS else first


def with_seconds(found: list[Finding]) -> list[Finding]:
    """Return three at most: each cause, and after it what explains the gap almost as well."""
    listed: dict[str, Finding] = {}
    for f in found:
        listed[f.cause] = f
        if f.other:
            listed.setdefault(f.other.cause, f.other._replace(left=1.0))
    return list(listed.values())[:MOST]


# ------------------------------------------------------------------- a gap that is everywhere

def texture(x: Tokens, alone: bool = False, experts: bool | None = None,
            coarse: bool = False) -> Finding | None:
    """Name a gap that is everywhere: by its randomness, its tail, how it fades, or not at all.

    Unless it is asked `alone`, a gap without a mark gets the likeliest other cause as its second.
    """
    limit, whole, z, lean = numerics(x), size_of(x.e()), z_of_rho(x.d()), x.d().mean().item()
    sure = confident(x) * (not (experts or coarse))     # another expert moves logits by more
    x = x.take(x.unsure())
    e = x.e()
    middle = e.abs().median().item()
    d = x.d().abs()
    loud = d[d <= d.quantile(0.97)].square().mean().item() / 2      # k3 without the rarest tokens
    quiet = not beyond("numerics", min(whole, 1.3 * middle) / limit) and not beyond("loud", loud)
    evidence = (f"of {sure} tokens μ is above ½ and π over 2 nats less, as no noise is without "
                "experts; ") * (sure > 0) + f"mean gap {size_of(e):.3f} logits"

    if random := random_gap(x, e, evidence, experts):
        return random
    clear, vague = over_time(x)
    if clear and (not quiet or clear.left < math.exp(-25 / len(e))):
        return clear._replace(left=1.0, other=vague)
    if quiet and not sure:
        return quiet_record(z, lean)
    if not alone and (deep := deeper(x)):
        return Finding("weights", 1.0, f"{evidence}; {deep.evidence}", other=deep)
    weak = [] if alone else [f for f in (vague, slope_of(x, sure=False), *places(x, 2)) if f]
    return Finding("weights", 1.0, evidence, other=min(weak, key=lambda f: f.left, default=None))


def random_gap(x: Tokens, e: Tensor, evidence: str, experts: bool | None) -> Finding | None:
    """Test whether a few tokens have most of the gap, or a token drawn again has another one.

    Only what is outside the prefix makes it another one: dropout, a neighbour in a packed row, the
    batch. Where experts change, most tokens keep theirs.
    """
    middle, rare = e.abs().median().item(), e.abs().quantile(0.97).item()
    _, _, k, m = pairs(x)
    again, (nats, size, n) = (e[k] - e[m]).abs(), scatter(x)
    drawn = (f"; drawn again after the same prefix ({n} times), a token's gap is another one by "
             f"{size:.3f}")
    scatters = n >= 5 and beyond("scatter, nats", nats)
    rarely = n >= 5 and off_median(e, k, m).median() < numerics(x)      # most keep their gap

    part = size / (size_of(e[k]) + size_of(e[m]) + FLOOR)
    few = rarely and beyond("scatter", part) and beyond(
        "rare scatter", size / max(again.median().item(), 1e-9))
    if experts is not False and rare > 0.2 and (rarely or not scatters) and (
            beyond("flips", rare / (middle + floor(e))) or few):
        return Finding("flips", 1.0, f"{evidence}; half of the tokens are below {middle:.3f}, one "
                       f"in 33 above {rare:.3f}" + drawn * (n > 0))
    if scatters:
        return Finding("scatter", 1.0, evidence + drawn,
                       other=Finding("dropout", 1.0, evidence + drawn))
    return None


def quiet_record(z: float, lean: float) -> Finding | None:
    """Test a gap no larger than two kernels': E[ρ] may still be z standard errors from 1."""
    if beyond("E[ρ]", z) and lean > 0:                      # (eq:record-sign)
        return Finding("raw", 1.0, f"E[ρ] is {z:.0f} standard errors above 1 and E[log ρ] = "
                       f"{lean:+.4f}: log μ is not of what was drawn, if only by another kernel's "
                       "noise")
    return Finding("cut", 0.99, f"E[ρ] is {-z:.0f} standard errors below 1") if z < -5 else None


# ----------------------------------------------------------------------------- what to change

# Both records are right and the policies differ: a correction is the answer to these causes alone.
HONEST = {"in-flight", "stale", "weights", "depth", "numerics"}
# What two kernels do as well, to a lesser size: suggested, it is a fault if the class says so.
BY_SIZE = {"weights", "depth", "scatter", "dropout", "flips", "context", "in-flight"}

# Each cause, with what it is and what to change, in the words of this trainer and of others.
CAUSES = {
    "temperature": ("the two sides score at different temperatures",
                    "one temperature, before the softmax: rollout.temperature here, the actor's "
                    "temperature in verl, temperature in TRL, sampling_params in SkyRL"),
    "raw": ("log μ is not of what was drawn, as if recorded before the temperature or the cut",
            "ask the engine for processed log-probs: logprobs_mode=processed_logprobs in vLLM; "
            "with speculative decoding, accept without loss: else the draft's tokens are not μ's"),
    "cut": ("top-p, top-k or min-p do not cut the same from μ and from π",
            "top_p=1, top_k=-1 and min_p=0, or replay the kept ids; no weight repairs it, for what "
            "was cut is never sampled"),
    "shift": ("one column is off by one token",
              "log-probs of token t come from the logits of t − 1: check the slice, and whether "
              "the padding moved it"),
    "order": ("one column's blocks stand in another order",
              "undo what splits a sequence over devices before the gather (context parallelism, "
              "zigzag), and compare one row's log-probs with those of one device"),
    "first-token": ("the first token alone differs",
                    "its log-prob comes from the prompt's last logits: check the slice there, and "
                    "that packed rows leave no gap and share no attention"),
    "decode": ("the first token alone is right: what follows the prompt is computed wrongly",
               "compare one request alone, with enforce_eager, with another attention backend, and "
               "with prefix caching and an 8-bit cache off; in the trainer look at position_ids, "
               "mask and slice after the prompt"),
    "eos": ("the end token alone differs",
            "the same end token, counted by both: no label −100 on it, no min_tokens, no ban"),
    "tool": ("tokens that nobody sampled are counted",
             "mask what a tool or the environment wrote: response_mask here, in verl and in SkyRL, "
             "the completion mask in TRL"),
    "retokenised": ("some responses were decoded to text and tokenised again",
                    "hand the sampled token ids on, never the text"),
    "padding": ("rows that were padded on the left are scored wrongly",
                "pass attention_mask, and position_ids that begin at 0 after the padding"),
    "window": ("beyond one position a side sees less of the context",
               "one max_model_len, sliding_window and rope scaling on both sides"),
    "context": ("the two sides see different prompts, or one a stale prefix cache",
                "compare the prompt's ids (template, system prompt, BOS twice), and reset the "
                "prefix cache when weights change; if whole responses differ, look for an index "
                "that pairs them with another row's prompt"),
    "in-flight": ("the weights changed while responses were being written",
                  "drain before an update, or record log μ token by token and correct by it: "
                  "without bias with sequence weights (correction.preset=decoupled_seq_is), more "
                  "quietly with token weights"),
    "penalty": ("the sampler penalises tokens that occurred before",
                "repetition_penalty=1, presence_penalty=0, frequency_penalty=0, and look into "
                "generation_config.json"),
    "softcap": ("one side leaves out the final logit softcap",
                "apply final_logit_softcapping on both sides: fused heads often forget it"),
    "scatter": ("something outside the prefix changes the scores: dropout, packing or the batch",
                "model.eval(); score one row alone and then packed or in a batch, and mask what "
                "other rows of a pack must not see"),
    "dropout": ("the trainer applies dropout while it scores",
                "model.eval(), or dropout 0 and lora_dropout 0 in the config"),
    "flips": ("a mixture of experts routes some tokens differently",
              "replay the engine's routing (verl: router replay, SkyRL: r3), or compute the "
              "router in float32; token weights bound what is left"),
    "bf16-log-softmax": ("the log-softmax was computed in 16 bits",
                         "logits.float() before log_softmax"),
    "stale": ("older versions of the weights drew a part of the tokens",
              "fewer steps of delay: rollout.staleness here, the asynchronous level elsewhere; or "
              "token weights (correction.preset=decoupled_token_is)"),
    "weights": ("the weights differ: stale, rounded, partly synchronised, or another LoRA",
                "sync all weights before a rollout, unrounded; three-policies doctor DUMP "
                "--model DIR tells which differ; until then sequence weights "
                "(correction.preset=decoupled_seq_is)"),
    "depth": ("the gap grows with the position",
              "one rope scaling and base on both sides, positions in whole numbers or float32, and "
              "no cache of keys and values in 8 bits; until then token weights "
              "(correction.preset=decoupled_token_is)"),
    "below-grid": ("the update is below the engine's grid: rounding to 16 bits takes it away",
                   "train in the engine's precision, so that both sides hold one set of weights, "
                   "or run the engine in float32; else larger steps between two syncs, by train.lr "
                   "or more updates. Engines round to the nearest number, never stochastically, "
                   "so another sync of the same weights brings nothing"),
    "numerics": ("the noise of two kernels", "nothing"),
}
