"""Count how often the doctor names the planted cause, on models that its rules never saw.

The rules of laws.py, places.py and causes.py were written while looking at dumps of other models,
and at what earlier judgements missed: seeds below 72000. They are judged on models with seeds from
81000, whose dumps no rule was written on. doctor/rates.txt is the output.

    python doctor/rates.py --cache DIR [--split judged] [--write doctor/rates.txt]

A model has one dump of each variant of each cause, at severities from 0 to 1, every other one with
an engine in bfloat16. The weakest plants are no larger than that engine's noise.
"""

import argparse
import functools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from three_policies import doctor
from three_policies.doctor import causes, laws, plants, sides
from three_policies.doctor.dumps import read
from three_policies.doctor.normal import Class
from three_policies.doctor.places import places
from three_policies.doctor.tokens import Tokens

SPLITS = {"written": ("Llama", "Qwen2", "Mixtral"), "judged": ("Qwen3", "Gemma2", "Qwen2Moe")}
FIRST_SEED = {"written": 41000, "judged": 81000}
JUDGED = """\
Judged on dumps of three models, with seeds from 81000, on which no rule was written: the rules were
written on dumps of six other models with seeds below 52000, of these three architectures and three
others. The misses of an earlier judgement, with seeds from 71000, were known by name and size.
After a first judgement (94.1 and 95.3 %, at 32 rows 85.2 and 89.3) three rules changed: a token
drawn again is compared with the median of its draws, since a test asked for it; a first or an end
token must stand out further, since dumps of a real model did not; and padding is told from another
context as it was before, since at 32 rows the judgement of seeds from 71000 had got worse.
"""
LIMITED = """\
How far values lie from the limits of laws.py that were set by hand, at 128 rows. A cause may be
found beyond its limit and still not be named, if another explains more.
"""
MIXTURES = ("Mixtral", "Qwen2Moe")
PAIR, VERDICTS = "two causes", ("fault", "cannot tell", "healthy")
ROWS = (128, 32, 8)
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
    severity: float = 0.6
    variant: str | None = None
    noise: bool = False
    second: str | None = None


def cases(split: str) -> Iterator[Case]:
    """Yield every dump of a split: each variant of each cause and of a healthy pair, two causes."""
    first = FIRST_SEED[split]
    for a, architecture in enumerate(SPLITS[split]):
        variants = [(c, cause, k, kind) for c, (cause, kinds) in enumerate(plants.VARIANTS.items())
                    for k, kind in enumerate(kinds)
                    if cause != "flips" or architecture in MIXTURES]
        for n, (c, cause, k, kind) in enumerate(variants, 1):
            yield Case(f"{cause}__{kind}__{architecture}{first + a}-{n % 2}", architecture,
                       first + a, cause, first + 100 * c + 10 * a + k,
                       (37 * n + 13 * a) % 100 / 100, kind, n % 2 == 1)
    for c, (cause, second) in enumerate(PAIRS):
        yield Case(f"{cause}+{second}", SPLITS[split][0], first, cause, first + 9000 + 10 * c,
                   noise=c % 2 == 1, second=second)


def dumps(split: str, cache: Path) -> Iterator[tuple[Case, Path]]:
    """Yield each case and its file; make what is missing."""
    folder = cache / split
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases(split):
        path = folder / f"{case.name}.jsonl"
        if not path.exists():
            plants.write(planted(case), path)
        yield case, path


def planted(case: Case) -> list[plants.Row]:
    return plants.plant(subject(case.model, case.architecture), case.cause, case.seed,
                        case.severity, case.variant, case.noise, case.second)


@functools.lru_cache(3)
def subject(model: int, architecture: str) -> sides.Subject:
    return sides.subject(model, architecture)


def judge(split: str, cache: Path, rows: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Count, for each cause, the dumps, the names first and second, and the three verdicts.

    And the verdicts (`stated …`) if the pair is said to be of bf16, with experts or without.
    """
    count: Counter[tuple[str, str]] = Counter()
    missed: list[tuple[Case, doctor.Report, str]] = []
    noise: dict[tuple[str, int], float] = {}            # of a model's healthy pairs the largest k3

    for case, path in dumps(split, cache):
        report = doctor.examine(dump_rows(path, rows))
        stated = report._replace(of=Class("bf16", case.architecture in MIXTURES))
        found, model = [f.cause for f in report.causes], (case.architecture, case.model)
        if case.cause == "healthy":
            noise[model] = max(report.k3, noise.get(model, 0.0))

        cause, planted = (PAIR if case.second else case.cause), {case.cause, case.second}
        first = found[:1] == [case.cause] or bool(case.second and found and found[0] in planted)
        second = planted <= set(found) if case.second else case.cause in found[1:2]
        for name, here in (("n", True), ("first", first), ("second", second),
                           (report.verdict, True), (f"stated {stated.verdict}", True)):
            count[cause, name] += here
        if report.faulty if case.cause == "healthy" else not first:
            missed.append((case, report, stated.verdict))
    return count, [
        f"{case.name} ({case.architecture}, {case.variant}, severity {case.severity:.2f}"
        f"{', bf16' if case.noise else ''}; k3 {report.k3:.2g}, of its healthy pairs up to "
        f"{noise.get((case.architecture, case.model), math.nan):.2g}): "
        f"{' > '.join(f.cause for f in report.causes) or 'no cause'}; {report.verdict}, with its "
        f"class {stated}" for case, report, stated in missed]


def dump_rows(path: Path, rows: int) -> Iterator[Any]:
    for response in read(path):
        if response.line > rows:
            return
        yield response


def table(split: str, cache: Path) -> str:
    """Return the rates as markdown: by cause at 128 rows, and of all causes by number of rows."""
    lines = [f"Dumps of {', '.join(SPLITS[split])}: 16 prompts × 8 responses × at most 40 tokens.",
             "", "| cause | dumps | first | second | fault | cannot tell | healthy |",
             "|---|---|---|---|---|---|---|"]

    count, missed = judge(split, cache, 128)
    for cause in [*(c for c in plants.VARIANTS if c != "healthy"), "healthy", PAIR]:
        cells = [str(count[cause, x]) for x in ("n", "first", "second", *VERDICTS)]
        if cause == "healthy":
            cells[1:3] = "", ""
        elif cause == PAIR:
            cells[2] += " both"
        lines.append(f"| {' | '.join(['no cause' if cause == 'healthy' else cause, *cells])} |")

    lines += ["", "| rows | first | among two | false alarms | cannot tell | healthy | class "
              "stated: cannot tell | healthy | false alarms | healthy pairs called so | two causes:"
              " one first | both |", f"|{12 * '---|'}"]
    for rows in ROWS:
        got = count if rows == 128 else judge(split, cache, rows)[0]
        lines.append(f"| {rows} | {of_size(got)} |")

    lines += ["", "Not named first, or alarmed though healthy, at 128 rows:", "",
              *(f"* {x}" for x in missed), ""]
    return "\n".join(lines)


def of_size(got: Counter[tuple[str, str]]) -> str:
    """Return the cells of a number of rows: names, and verdicts without and with the class."""
    single = [c for c in plants.VARIANTS if c != "healthy"]
    n, first, second, unsure, silent, stated_unsure, stated_silent = (
        sum(got[c, x] for c in single) for x in (
            "n", "first", "second", *VERDICTS[1:], *(f"stated {x}" for x in VERDICTS[1:])))
    healthy, pairs = got["healthy", "n"], got[PAIR, "n"]
    return " | ".join([
        *(f"{x / n:.1%}" for x in (first, first + second)),
        f"{got['healthy', 'fault']} of {healthy}",
        *(f"{x / n:.1%}" for x in (unsure, silent, stated_unsure, stated_silent)),
        *(f"{got['healthy', f'stated {x}']} of {healthy}" for x in ("fault", "healthy")),
        *(f"{got[PAIR, x] / max(1, pairs):.0%}" for x in ("first", "second"))])


# The causes that the limits are for, where the limit's name is not the cause's.
FOR = {"E[ρ]": ("cut", "raw"), "tail": ("cut",), "division": ("temperature",),
       "slope": ("temperature", "raw", "softcap"),
       "slope, alone": ("temperature", "raw", "softcap"),
       "slope of pairs": ("temperature", "softcap"),
       "calibration": ("raw",), "numerics": ("weights", "scatter"), "loud": ("weights", "scatter"),
       "scatter": ("flips", "scatter"), "rare scatter": ("flips",),
       "scatter, nats": ("scatter",), "step": ("in-flight",), "rows": ("context",),
       "depth": ("weights",), "even": ("cut", "raw")}


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
        if case.second:
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
