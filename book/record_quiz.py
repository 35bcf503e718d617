"""Record the quiz's dumps: a planted cause each, the five panels thinned, and the doctor's answer.

    python book/record_quiz.py         # half a minute: book/assets/quiz.json
"""

import json
import random
from pathlib import Path

import torch

from three_policies import doctor
from three_policies.doctor import plants, sides
from three_policies.doctor.causes import CAUSES
from three_policies.doctor.dumps import response
from three_policies.doctor.tokens import log_odds, pairs

ROOT = Path(__file__).resolve().parent.parent

QUIZ = ("healthy", "temperature", "raw", "cut", "shift", "padding", "retokenised", "in-flight",
        "penalty", "softcap")


def planted(cause):
    """Return the doctor's report on a dump of a model that chapter 8's picture does not show."""
    with torch.no_grad():
        variant = "bf16-sampler" if cause == "healthy" else None
        rows = plants.plant(sides.subject(6, "Llama"), cause, 6, severity=0.6, variant=variant)
    return doctor.examine([response(i, row) for i, row in enumerate(rows, 1)])


def signature(report, size=200, points=150):
    """Thin the five panels of panels.py to whole numbers of at most `size`."""
    x, gap = report.examined, report.examined.e()
    wide = gap.abs().quantile(0.99).clamp(min=0.05).item()

    def drawn(low, high, *columns):                            # columns of y: from the top
        step = max(1, len(columns[0]) // points)
        return [[max(0, min(size, round(size * (v - low) / (high - low)))) for v in c[::step]]
                for c in (column.tolist() for column in columns)]

    def cloud(mu, pi):
        ends = [f(torch.cat([mu, pi])).item() for f in (torch.min, torch.max)]
        return {"ends": [f"{v:.1f}" for v in ends], "dots": drawn(*ends, mu, pi)}

    rows = [[0.0] * 40 for _ in range(24)]
    for row, t, e in zip(x.row.unique(return_inverse=True)[1].tolist(), x.t.tolist(), gap.tolist()):
        if row < 24:
            rows[row][t] = max(-4, min(4, round(4 * e / wide)))
    i, j, *_ = pairs(x)
    over, n = (x.pi - x.mu).clamp(max=20).expm1(), torch.arange(1, len(gap) + 1)
    mean, error = over.cumsum(0) / n, 2 * over.square().cumsum(0).sqrt() / n
    high = (mean.abs() + error)[10:].max().item()
    [across], [along] = drawn(0, int(x.t.max()), x.t), drawn(-1.3 * wide, 1.3 * wide, gap)
    return {"clouds": [cloud(log_odds(x.mu), log_odds(x.pi)),
                       cloud(x.mu[i] - x.mu[j], x.pi[i] - x.pi[j])],
            "gaps": {"ends": f"{1.3 * wide:.2f}", "dots": [across, along]},
            "grid": ["".join("abcd.efgh"[int(v) + 4] for v in row) for row in rows],
            "running": {"ends": f"{high:.3f}", "lines": drawn(
                -high, high, mean[10:], (mean - error)[10:], (mean + error)[10:])}}


def record():
    """Write the dumps in an order that gives nothing away, each with the doctor's answer."""
    dumps = []
    for cause in random.Random(0).sample(QUIZ, len(QUIZ)):
        report = planted(cause)
        name = report.causes[0].cause if report.causes else "healthy"
        assert name == cause, f"the doctor says {name} of a planted {cause}"
        what = CAUSES[cause][0] if report.causes else "two kernels, one of them in bfloat16"
        dumps.append({"cause": cause, "what": what, "said": report.in_short(),
                      **signature(report)})
    lines = ",\n".join(json.dumps(dump, ensure_ascii=False) for dump in dumps)
    (ROOT / "book" / "assets" / "quiz.json").write_text(f"[{lines}]\n")


if __name__ == "__main__":
    record()
