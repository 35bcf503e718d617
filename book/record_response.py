"""Record a response of SmolLM2-135M by both sides, at four sizes of the mismatch.

The responses are those of studies/sizes.py. Of a row's sixteen it takes the typical one: that whose
Σ (log ρ)² over the first 64 tokens is the median.

    python studies/sizes.py --model smollm2 --out runs/sizes
    python book/record_response.py smollm2 runs/sizes         # writes book/assets/response.json
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# By the k3 per token of the second study's runs beside it: their regime and arm, the row of
# studies/sizes.py whose k3 is nearest, and what its engine does.
SIZES = {"0": ("int4_slow", "matched", "float32", "in float32"),
         "0.0006": ("int6", "naive", "bf16", "in bfloat16"),
         "0.005": ("int5", "naive", "int8", "with weights in 8 bits"),
         "0.013": ("int4_slow", "naive", "int7", "with weights in 7 bits")}
LENGTH, OUT = 64, ROOT / "book" / "assets" / "response.json"


def typical(path: Path) -> dict:
    """Return the first tokens of a dump's response with the median Σ (log ρ)²."""
    with path.open() as file:
        rows = [row for row in map(json.loads, file) if len(row["token_ids"]) >= LENGTH]
    sides = [[row[name][:LENGTH] for name in ("rollout_log_probs", "train_log_probs")]
             for row in rows]
    apart = [sum((pi - mu) ** 2 for mu, pi in zip(*both, strict=True)) for both in sides]
    at = sorted(range(len(rows)), key=apart.__getitem__)[len(rows) // 2]
    mu, pi = ([round(x, 4) for x in column] for column in sides[at])
    return {"of": len(rows), "ids": rows[at]["token_ids"][:LENGTH], "rollout": mu, "old": pi}


def main(model: str, dumps: str) -> None:
    from transformers import AutoTokenizer
    tokenizer, found = AutoTokenizer.from_pretrained(model), {}
    for size, (_, _, row, engine) in SIZES.items():
        one = typical(Path(dumps) / f"{row}.jsonl")
        words = [tokenizer.decode([token]) for token in one.pop("ids")]
        found[size] = {"engine": engine, "row": row, **one,
                       "tokens": [word.replace("\n", "⏎").strip() or "␣" for word in words]}
    OUT.write_text(json.dumps({"how": "python book/record_response.py", "sizes": found},
                              ensure_ascii=False) + "\n")
    print(OUT.relative_to(ROOT))


if __name__ == "__main__":
    main(*sys.argv[1:])
