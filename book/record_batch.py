"""Record six responses of a real run, which the reading edition steps through.

    python book/record_batch.py         # half a minute: book/assets/batch.json
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def record(step=8):
    """Record six different responses to two prompts: the last update of a run, late and coarse."""
    from three_policies import trainer
    settings = ["rollout.prompts=32", "rollout.staleness=4", "rollout.quantize_bits=4",
                "rollout.engine=transformers", "train.mini_batches=2", "train.lr=1e-3",
                f"train.steps={step}", "task.eval_size=64", "run=recorded"]
    updates, update = [], trainer.update

    def watched(run, batch, *how):
        updates.append(batch)
        if len(updates) == 2 * step:
            width, groups = batch.response_mask.shape[1], {}
            for i, row in enumerate(batch.tokens.tolist()):
                groups.setdefault(i // run.config.rollout.samples, {}).setdefault(tuple(row), i)
            rows = [i for group in groups.values() if len(group) > 2
                    for i in list(group.values())[:3]][:6]
            words = [run.loaded.tokenizer.convert_ids_to_tokens(batch.tokens[i].tolist())
                     for i in rows]
            numbers = {"advantages": batch.advantages[:, 0], "rollout": batch.rollout_log_prob,
                       "old": batch.old_log_prob,
                       "current": trainer.score(run.loaded.policy, batch, run.config)}
            kept = batch.response_mask[rows].tolist()
            (ROOT / "book/assets/batch.json").write_text(json.dumps({
                "how": "python trainer.py " + " ".join(settings),
                "prompts": ["".join(word for word in row[:-width] if "<" not in word)
                            for row in words],
                "tokens": [[w if m else None for w, m in zip(row[-width:], mask)]
                           for row, mask in zip(words, kept)],
                **{name: x[rows].double().mul(1e4).round().div(1e4).tolist()
                   for name, x in numbers.items()}}) + "\n")
        return update(run, batch, *how)

    trainer.update = watched
    return trainer.main(settings)


if __name__ == "__main__":
    raise SystemExit(record())
