"""Count how often the doctor names the planted cause, on models that its rules never saw.

The rules of laws.py, places.py and causes.py were written while looking at the dumps of the split
`written` and at those of earlier judgements: seeds from 5000, 9000, 13000, 17000, 21000 and 27000.
They are judged on the split `judged`: other architectures, seeds from 31000. These were judged
once, after the rules had been committed. doctor/rates.txt is the output.

    python doctor/rates.py --cache DIR [--split judged] [--write doctor/rates.txt]

A plant must be seen to count: see `visible`. Where the cache has both splits, both are held against
the limits that were set by hand.
"""

import argparse
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from three_policies import doctor
from three_policies.doctor import causes, laws, plants, sides
from three_policies.doctor.dumps import read
from three_policies.doctor.places import places
from three_policies.doctor.tokens import Tokens, log_odds

SPLITS = {"written": ("Qwen2", "Llama", "Mixtral", "Olmo2"),
          "judged": ("Gemma2", "Qwen2Moe", "Mistral", "Qwen3")}
FIRST_SEED = {"written": 0, "judged": 31000}
JUDGED = """\
Judged once, on dumps with seeds from 31000, made by models that the rules had not seen. The rules
were committed before. They were written on the split `written` and on the misses of six earlier
judgements. Chapter 8 has the last two of these, with seeds from 21000 and 27000, and what one rule
that followed from this judgement changes.
"""
LIMITED = """\
How far values lie from the limits of laws.py that were set by hand, at 128 rows. A cause may be
found beyond its limit and still not be named, if another explains more.
"""
MIXTURES = ("Mixtral", "Qwen2Moe")
ROWS = (128, 64, 32, 16, 8)
VISIBLE, STEP = 2.0, 0.15               # a planted gap over that of two kernels; of a severity
BELOW = "-below"                        # names a dump with the severity before it was raised
ALWAYS = ("shift", "order", "tool", "retokenised", "bf16-log-softmax")   # not by a size
EACH, HEALTHY = 8, 40                   # dumps of each cause, and of no cause, in each split
PAIRS = (("temperature", "eos"), ("temperature", "weights"), ("shift", "temperature"),
         ("cut", "eos"), ("cut", "weights"), ("eos", "weights"), ("padding", "eos"),
         ("tool", "temperature"), ("retokenised", "weights"), ("window", "temperature"),
         ("penalty", "eos"), ("raw", "weights"), ("in-flight", "temperature"),
         ("tool", "weights"), ("shift", "weights"), ("temperature", "retokenised"),
         ("shift", "raw"))


class Case(NamedTuple):
    """A Case is one dump: its model, what is planted, how strongly."""

    name: str
    architecture: str
    model: int
    cause: str
    seed: int
    severity: float
    variant: str | None
    noise: bool
    second: str | None


def cases(split: str) -> Iterator[Case]:
    """Yield every dump of a split: causes, healthy pairs, pairs of causes."""
    names = SPLITS[split]
    mixtures = [name for name in names if name in MIXTURES]
    for c, (cause, variants) in enumerate(plants.VARIANTS.items()):
        count = HEALTHY if cause == "healthy" else 3 * EACH // 2 if cause == "weights" else EACH
        for i in range(count):
            among = mixtures if cause == "flips" else names
            architecture = among[(i + c) % len(among)]
            model = FIRST_SEED[split] + (i * 7 + c) % (6 if cause == "flips" else 4)
            yield Case(f"{cause}-{i}", architecture, model, cause,
                       FIRST_SEED[split] + 100 * c + i, (i * 5 % count) / (count - 1),
                       variants[(i // 2 if len(variants) % 2 == 0 else i) % len(variants)],
                       i % 2 == 1, None)
    for c, (first, second) in enumerate(PAIRS):
        for i in range(2):
            seed = FIRST_SEED[split]
            yield Case(f"{first}+{second}-{i}", names[(c + i) % len(names)], seed + (c + i) % 4,
                       first, seed + 7000 + 10 * c + i, 0.4 + 0.4 * i, None, i == 1, second)


def dumps(split: str, cache: Path) -> Iterator[tuple[Case, Path]]:
    """Yield each case and its file; make what is missing.

    Where a case was raised, the dump before that comes as well, with BELOW in its name.
    """
    folder = cache / split
    folder.mkdir(parents=True, exist_ok=True)
    raised = folder / "raised.json"             # by name: its model's seed and its severity
    known = json.loads(raised.read_text()) if raised.exists() else {}
    for case in sorted(cases(split), key=lambda case: (case.architecture, case.model)):
        if case.name not in known:
            shown = visible(case)
            known[case.name] = [shown.model, shown.severity]
        model, severity = known[case.name]
        shown = case._replace(model=model, severity=severity)
        below = [case._replace(name=case.name + BELOW)] if shown != case else []
        for one in [*below, shown]:
            path = folder / f"{one.name}.jsonl"
            if not path.exists():
                plants.write(planted(one), path)
                raised.write_text(json.dumps(known))
            yield one, path


def planted(case: Case) -> list[plants.Row]:
    return plants.plant(subject(case.model, case.architecture), case.cause, case.seed,
                        case.severity, case.variant, case.noise, case.second)


@functools.lru_cache(3)
def subject(model: int, architecture: str) -> sides.Subject:
    return sides.subject(model, architecture)


def visible(case: Case) -> Case:
    """Return the case, with its severity raised until its plant can be seen.

    It can be seen if what is planted alone, without noise, makes a gap at least VISIBLE times as
    large as bfloat16 makes between two kernels of the same model. If not even the largest severity
    does, the next model of the architecture is taken, three times at most. The doctor has no part
    in this.
    """
    if case.cause in ("healthy", *ALWAYS) or case.second:
        return case
    # Two sides with the same mistake have no gap: what is seen is the gap to what was drawn.
    variant = "tau" if (case.cause, case.variant) == ("raw", "both") else case.variant
    for model in range(case.model, case.model + 4):
        of, severity = subject(model, case.architecture), case.severity
        noise = size(plants.plant(of, "healthy", model, variant="bf16-sampler", groups=8))
        while severity <= 1:
            if VISIBLE * noise <= size(plants.plant(of, case.cause, case.seed, severity, variant,
                                                    groups=8)):
                return case._replace(model=model, severity=severity)
            severity = min(1.0, severity + STEP) if severity < 1 else math.inf
    return case._replace(severity=1.0)          # at any severity two kernels hide it


def size(rows: list[plants.Row]) -> float:
    """Return the mean gap, in log-odds, of the tokens that a plant touches."""
    mu, pi = (torch.tensor([x for row in rows for x in row[name]]).double().clamp(-40, 0)
              for name in ("rollout_log_probs", "train_log_probs"))
    gap = (log_odds(pi) - log_odds(mu)).abs()
    touched = gap[gap > 1e-3]
    return touched.mean().item() if len(touched) else 0.0


def judge(split: str, cache: Path, rows: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Count, for each cause, the dumps and the answers that name it first or among two.

    And of those that do not name it first, the verdicts.
    """
    count: Counter[tuple[str, str]] = Counter()
    missed: list[tuple[Case, float, str]] = []
    noise: dict[tuple[str, int], float] = {}            # of a model's healthy pairs the largest gap

    for case, path in dumps(split, cache):
        report = doctor.examine(dump_rows(path, rows))
        found = [finding.cause for finding in report.causes]
        gap, model = report.examined.e().abs().mean().item(), (case.architecture, case.model)
        if case.cause == "healthy":
            noise[model] = max(gap, noise.get(model, 0.0))
        if case.name.endswith(BELOW):
            count["below", "n"] += 1
            count["below", "first"] += found[:1] == [case.cause]
            continue

        if case.second:
            both = {case.cause, case.second}
            cause, first = "pairs of causes", found[:1] and found[0] in both
            two = both <= set(found)
        elif case.cause == "healthy":
            cause, first, two = case.cause, not report.faulty, not report.faulty
        else:
            cause, first, two = case.cause, found[:1] == [case.cause], case.cause in found[:2]

        count[cause, "n"] += 1
        count[cause, "first"] += bool(first)
        count[cause, "two"] += bool(two)
        count[cause, report.verdict] += not first or case.cause == "healthy"
        if not first:
            missed.append((case, gap, " > ".join(found) or "healthy"))
    return count, [
        f"{case.name} ({case.architecture}, {case.variant}, severity {case.severity:.2f}"
        f"{', bf16' if case.noise else ''}; gap {gap:.3f}, healthy up to "
        f"{noise.get((case.architecture, case.model), math.nan):.3f}): {found}"
        for case, gap, found in missed]


def dump_rows(path: Path, rows: int) -> Iterator[Any]:
    for response in read(path):
        if response.line > rows:
            return
        yield response


def table(split: str, cache: Path) -> str:
    """Return the rates as markdown: by cause at 128 rows, and of all causes by number of rows."""
    lines = [f"Dumps of {', '.join(SPLITS[split])}: 16 prompts × 8 responses × at most 40 tokens.",
             "", "| cause | dumps | first | among two | undecided | healthy |",
             "|---|---|---|---|---|---|"]

    count, missed = judge(split, cache, 128)
    for cause in [*plants.VARIANTS, "pairs of causes"]:
        n, first, two = (count[cause, x] for x in ("n", "first", "two"))
        second = f"{two} both" if cause.startswith("pairs") else two
        undecided, healthy = (count[cause, x] for x in ("cannot tell", "healthy"))
        lines.append(f"| {'no alarm on healthy' if cause == 'healthy' else cause} | {n} | {first} "
                     f"| {second} | {undecided} | {healthy} |")

    lines += ["", "| rows | first | among two | false alarms | undecided | called healthy | pairs: "
              "one first | both |", "|---|---|---|---|---|---|---|---|"]
    for rows in ROWS:
        got = count if rows == 128 else judge(split, cache, rows)[0]
        single = [c for c in plants.VARIANTS if c != "healthy"]
        n, first, two = (sum(got[c, x] for c in single) for x in ("n", "first", "two"))
        pairs, one, both = (got["pairs of causes", x] for x in ("n", "first", "two"))
        undecided, healthy = (sum(got[c, x] for c in single) for x in ("cannot tell", "healthy"))
        lines.append(f"| {rows} | {first / n:.1%} | {two / n:.1%} | "
                     f"{got['healthy', 'fault']} of {got['healthy', 'n']} | "
                     f"{undecided / n:.1%} | {healthy / n:.1%} | "
                     f"{one / pairs:.0%} | {both / pairs:.0%} |")

    changed = [f"{case.name} ({before.architecture} {before.model}, {before.variant}) from "
               f"{before.severity:.2f} to {case.severity:.2f}"
               + f", model {case.model}" * (case.model != before.model)
               for (before, _), (case, _) in itertools.pairwise(dumps(split, cache))
               if before.name == case.name + BELOW]
    lines += ["", "Not named first, at 128 rows, with the mean gap in logits and the largest of a "
              "healthy pair of that model:", "", *(f"* {x}" for x in missed), "",
              f"{len(changed)} severities were raised, until the planted gap alone was {VISIBLE:g} "
              "times that of two kernels, or to 1. As they were before, "
              f"{count['below', 'first']} of them are named first:", "",
              *(f"* {x}" for x in changed), ""]
    return "\n".join(lines)


# The causes that the limits are for, where the limit's name is not the cause's.
FOR = {"E[ρ]": ("cut", "raw"), "tail": ("cut",), "division": ("temperature",),
       "slope": ("temperature", "raw", "softcap"), "slope of pairs": ("temperature", "softcap"),
       "calibration": ("raw",), "numerics": ("weights", "scatter"), "loud": ("weights", "scatter"),
       "scatter": ("flips", "scatter"), "rare scatter": ("flips",), "step": ("in-flight",),
       "rows": ("context",), "depth": ("weights",)}


def met(x: Tokens) -> dict[str, float]:
    """Return the largest value that was held against each limit in a dump."""
    with laws.watched() as held:
        places(x)
        for law in causes.LAWS:
            law(x)
        causes.texture(x, alone=True)

    found: dict[str, float] = {}
    for name, value in held:
        if value == value:                      # NaN: too few tokens
            found[name] = max(value, found.get(name, -math.inf))
    return found


def limits(split: str, cache: Path) -> str:
    """Return how far from each limit of doctor/laws.py its value lies, as a table.

    A dump's value is the largest that the rule met in it. Rules that do not apply to a dump, such
    as those of padding where all prompts are equally long, have none.
    """
    with_cause: dict[str, list[float]] = {name: [] for name in laws.LIMITS}
    without: dict[str, list[tuple[float, str]]] = {name: [] for name in laws.LIMITS}
    for case, path in dumps(split, cache):
        if case.second or case.name.endswith(BELOW):
            continue
        for name, value in met(Tokens.of(list(read(path)))).items():
            if case.cause in FOR.get(name, (name.split(",")[0],)):
                with_cause[name].append(value)
            else:
                without[name].append((value, case.cause))
    def short(value: float) -> str:
        return "> 1000" if value > 1000 else f"{value:.3g}"
    lines = [f"Seeds from {FIRST_SEED[split]}, {', '.join(SPLITS[split])}:", "",
             "| limit | set to | with the cause: lowest, quarter, median | without: highest |",
             "|---|---|---|---|"]
    for name, limit in laws.LIMITS.items():
        own = torch.tensor(with_cause[name], dtype=torch.float64)
        low = ", ".join(short(own.quantile(q).item()) for q in (0, 0.25, 0.5) if len(own))
        high = ", ".join(f"{short(value)} {cause}"
                         for value, cause in sorted(without[name])[:-4:-1])
        lines.append(f"| {name} | {limit:.3g} | {low} | {high} |")
    return "\n".join(lines) + "\n"


def noise(split: str, cache: Path) -> str:
    """Return a sentence on how far apart healthy pairs are if one engine computes in bfloat16."""
    sizes: list[float] = []
    for case, path in dumps(split, cache):
        if case.cause == "healthy":
            d = Tokens.of(list(read(path))).d()
            sizes.append(d.square().mean().sqrt().item())
    noisy = torch.tensor([x for x in sizes if x > 1e-4])
    low, middle, high = (noisy.quantile(q).item() for q in (0, 0.5, 1))
    return (f"{len(noisy)} of the {len(sizes)} healthy pairs have an engine in bfloat16. Their log "
            f"ρ has {low:.3f} to {high:.3f} nats r.m.s., median {middle:.3f}.\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--split", choices=SPLITS, default="judged")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = table(given.split, given.cache) + "\n" + noise(given.split, given.cache)
    text += "\n" + LIMITED + "\n" + "\n".join(
        limits(split, given.cache) for split in SPLITS if (given.cache / split).exists())
    print(text)
    if given.write:
        given.write.write_text(f"# How often the doctor names the cause\n\n{JUDGED}\n{text}")
