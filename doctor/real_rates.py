"""Ask the doctor about dumps of a real model, whose causes are known: SmolLM2-135M-Instruct.

    python studies/sizes.py --model DIR --out SIZES                     # hours: makes the dumps
    python doctor/real_rates.py SIZES [--write doctor/real-rates.txt]

Each dump is one row of studies/sizes.py: 16 responses of at most 256 tokens. It is asked about at
16, 8 and 4 of them, with the class of the pair stated, and once without.
"""

import argparse
from pathlib import Path

import torch

from three_policies import doctor
from three_policies.doctor.dumps import read
from three_policies.doctor.normal import Class

ROWS = (16, 8, 4)
# Each dump, the precision of its pair, and the cause that is right; None is a healthy pair. What is
# rounded is stated as bf16, which a user would say who does not know of the rounding.
DUMPS = {"float32": ("fp32", None), "fp16": ("fp16", None), "head-bf16": ("bf16", None),
         "bf16": ("bf16", None), "bf16-head-bf16": ("bf16", None), "vllm-bf16": ("bf16", None),
         "int8": ("bf16", "weights"), "int7": ("bf16", "weights"),
         "float8-e4m3": ("bf16", "weights"), "int6": ("bf16", "weights"),
         "temperature": ("bf16", "temperature"), "layer-left-out": ("bf16", "weights"),
         "int4-group-32": ("bf16", "weights"), "int4": ("bf16", "weights")}


def table(folder: Path) -> str:
    """Return a row for each dump, and a sentence that counts them."""
    lines = ["| dump | class | k3 | named | 16 rows | 8 rows | 4 rows | 16 rows, class open |",
             "|---|---|---|---|---|---|---|---|"]
    named, alarms, silent, faults = 0, 0, 0, 0
    for name, (precision, cause) in DUMPS.items():
        responses = list(read(folder / f"{name}.jsonl"))
        reports = [doctor.examine(responses[:n], Class(precision, experts=False)) for n in ROWS]
        verdicts = [report.verdict for report in reports]
        causes = " > ".join(f.cause for f in reports[0].causes) or "nothing"
        lines.append(f"| {name} | {precision}, dense | {reports[0].k3:.2g} | {causes} | "
                     f"{' | '.join(verdicts)} | {doctor.examine(responses).verdict} |")
        first = [f.cause for f in reports[0].causes][:1]
        named += cause is not None and first == [cause]
        faults += cause is not None
        silent += cause is not None and "healthy" in verdicts
        alarms += cause is None and "fault" in verdicts
    return "\n".join([*lines, "", f"{named} of {faults} faults are named first at 16 rows. At any "
                      f"size {silent} are called healthy, and {alarms} of {len(DUMPS) - faults} "
                      "healthy pairs raise an alarm."])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="SIZES")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = f"# The doctor on a real model\n\n{table(given.folder)}\n"
    print(text)
    if given.write:
        given.write.write_text(text)
