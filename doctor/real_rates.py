"""Ask the doctor about dumps of a real model, whose causes are known: SmolLM2-135M-Instruct.

    python studies/sizes.py --model DIR --out SIZES                     # hours: makes the dumps
    python studies/sizes.py --model DIR --out LARGER --prompts 128 --first 16 --tokens 64
    python doctor/real_rates.py SIZES LARGER [--write doctor/real-rates.txt]

Each dump is one row of studies/sizes.py: in SIZES 16 responses of at most 256 tokens, in LARGER 128
to other questions, of at most 64. A second cause is planted into some of LARGER by moving log π by
one token. A dump is asked about whole and in part, with the class of the pair stated, and once
without.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from three_policies import doctor
from three_policies.doctor.dumps import Response, read
from three_policies.doctor.normal import Class

ROWS = {16: (16, 8, 4), 128: (128, 64, 16)}             # of a dump: how many are asked about
TIMES = 4               # a fault of at most so many times k3 of bfloat16 is not asked to be named
SHIFTED = " and a shift"


class Known(NamedTuple):
    """The precision of a pair, as a user states it, and all right causes: none if it is healthy."""

    precision: str
    causes: tuple[str, ...] = ()


# What is rounded is stated as bf16, which a user would say who does not know of the rounding.
DUMPS = {"float32": Known("fp32"), "fp16": Known("fp16"),
         **dict.fromkeys(("head-bf16", "bf16", "bf16-head-bf16", "vllm-bf16"), Known("bf16")),
         **dict.fromkeys(("below-the-grid", "stale-1", "stale-4", "lora-merged", "stale-8", "int8",
                          "int7", "float8-e4m3", "int6"), Known("bf16", ("weights",))),
         **dict.fromkeys(("top-p", "top-k"), Known("bf16", ("cut",))),
         "temperature": Known("bf16", ("temperature",)),
         **dict.fromkeys(("layer-left-out", "int4-group-32", "int4"), Known("bf16", ("weights",)))}
TWO = ("bf16", "int6", "temperature")                   # of LARGER, with a shift


def shifted(response: Response) -> Response:
    """Return the response with each log π one token late, as a wrong slice leaves it."""
    late = response.train_log_probs
    return response._replace(train_log_probs=[late[0], *late[:-1]])


def dumps(folder: Path) -> Iterator[tuple[str, Known, list[Response]]]:
    """Yield each dump that the folder has, and of 128 responses those with a second cause."""
    for name, known in DUMPS.items():
        if (path := folder / f"{name}.jsonl").exists():
            responses = list(read(path))
            yield name, known, responses
            if len(responses) == max(ROWS) and name in TWO:
                yield (name + SHIFTED, known._replace(causes=("shift", *known.causes)),
                       [shifted(one) for one in responses])


def table(folder: Path) -> str:
    """Return a row for each dump, and a sentence that counts them."""
    every = [*dumps(folder)]
    rows = ROWS[len(every[0][2])]
    least = TIMES * next(doctor.examine(x).k3 for name, _, x in every if name == "bf16")
    lines, counts = list[str](), Counter[str]()

    for name, (precision, right), responses in every:
        reports = [doctor.examine(responses[:n], Class(precision, experts=False)) for n in rows]
        verdicts = [report.verdict for report in reports]
        found = [f.cause for f in reports[0].causes]
        lines.append(f"| {name} | {precision}, dense | {reports[0].k3:.2g} | "
                     f"{' > '.join(found) or 'nothing'} | {' | '.join(verdicts)} | "
                     f"{doctor.examine(responses).verdict} |")

        kind = "healthy" if not right else "large" if reports[0].k3 > least else "small"
        counts[kind] += 1
        counts["named"] += kind == "large" and found[:1] != [] and found[0] in right
        counts["silent"] += kind == "large" and "healthy" in verdicts
        counts["alarms"] += kind == "healthy" and "fault" in verdicts
        counts["misnamed"] += kind != "large" and bool({*found} - {*right})
    return "\n".join([
        "| dump | class | k3 | named | " + " | ".join(f"{n} rows" for n in rows)
        + f" | {rows[0]} rows, class open |", "|---|---|---|---|---|---|---|---|", *lines, "",
        f"Of {counts['large']} faults above {TIMES} times the k3 of bf16, {counts['named']} are "
        f"named first at {rows[0]} rows, and {counts['silent']} are called healthy at some size. "
        f"Of {counts['small']} smaller ones and {counts['healthy']} healthy pairs, "
        f"{counts['misnamed']} get a wrong cause; {counts['alarms']} healthy pairs are alarmed."])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="SIZES")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = "\n\n".join(["# The doctor on a real model", *map(table, given.folders)]) + "\n"
    print(text)
    if given.write:
        given.write.write_text(text)
