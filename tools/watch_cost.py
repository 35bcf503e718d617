"""Measure what the doctor costs a trainer that it watches: seconds a batch, share of a step.

    python tools/watch_cost.py [--step SECONDS]

This file decides what is measured: processor time of one thread, from a padded batch of tensors to
the metrics, as doctor/watch.py spends it. A step of 60 s is what a small run on one GPU takes.
"""

import argparse
import time

import torch
from torch.nn.utils.rnn import pad_sequence

from three_policies.doctor import plants, sides
from three_policies.doctor.dumps import rows_of
from three_policies.doctor.watch import EXAMINED, Watch, leading


def batch(tokens: int) -> list[torch.Tensor]:
    """Return a healthy batch of a model of two layers, padded: what `rows_of` takes."""
    rows = plants.plant(sides.subject(3, "Qwen2"), "healthy", 3, 0.5, "bf16-sampler",
                        groups=max(1, tokens // 250))

    def padded(name: str) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
    masks = {name: pad_sequence([torch.ones(len(row[name])) for row in rows], batch_first=True)
             for name in ("prompt_ids", "token_ids")}
    return [padded("prompt_ids"), masks["prompt_ids"], padded("token_ids"), masks["token_ids"],
            masks["token_ids"], padded("rollout_log_probs"), padded("train_log_probs")]


def seconds(columns: list[torch.Tensor], times: int = 5) -> float:
    """Return the median processor time of a batch that the doctor examines."""
    found = []
    for step in range(times):
        watch, began = Watch(say=lambda line: None), time.process_time()
        watch.see(step, lambda: rows_of(*(x[leading(columns[3])] for x in columns)))
        found.append(time.process_time() - began)
    return sorted(found)[times // 2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", type=float, default=60, help="seconds of a step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in (1000, 4000, EXAMINED):
        columns = batch(tokens)
        cost = seconds(columns)
        print(f"{int(columns[3].sum()):6d} tokens: {cost:.2f} s, {cost / given.step:.2%} of a step "
              f"of {given.step:g} s")
