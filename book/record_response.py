"""Record one response of the second study's first step, at each width of the engine's weights.

The warm start is that of seed 101. A width keeps the prompts and the samples' seeds. Of the 256
responses it shows the typical one: that whose Σ (log ρ)² is the median. About five minutes:

    python book/record_response.py       # writes book/assets/response.json
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The arm at each width, all of one learning rate; `matched` has no rounding.
ARMS = {"float32": ("int4_slow", "matched"), "6": ("int6", "naive"), "5": ("int5", "naive"),
        "4": ("int4_slow", "naive")}
SEED, OUT = 101, ROOT / "book" / "assets" / "response.json"


def respond(config, task):
    """Return one response of step 1: of its batch's it has the median Σ (log ρ)²."""
    import torch
    from transformers import AutoTokenizer

    from three_policies import trainer
    from three_policies.engines.choice import make_engine
    from three_policies.training.demo import make_demo_model
    from three_policies.training.tasks import seed_of
    from three_policies.policy import full_weights, load_policy
    from three_policies.rollout import WeightSync
    path, rollout, device = make_demo_model(config, task), config.rollout, torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = load_policy(path, rollout.temperature, config.policy.dtype, device)
    engine = make_engine("transformers", path, dtype=rollout.dtype, max_model_len=1024)
    WeightSync(engine, 0, rollout.quantize).push(full_weights(policy))
    chosen = task.order(SEED, 0, rollout.prompts)
    rows = [(p, j) for p in range(rollout.prompts) for j in range(rollout.samples)]
    problems = [task.train[chosen[p]] for p, _ in rows]
    prompts = tokenizer([problem.question for problem in problems]).input_ids
    samples = engine.generate(
        prompts, [seed_of(SEED, "sample", 1, *row) for row in rows],
        temperature=rollout.temperature, max_tokens=rollout.max_tokens,
        eos_ids=[tokenizer.eos_token_id])
    batch = trainer.pad(prompts, samples, torch.zeros(len(rows)), device)
    old = trainer.score(policy, batch, config)
    apart = torch.where(batch.response_mask, old - batch.rollout_log_prob, 0.0).square().sum(-1)
    at = int(apart.argsort(stable=True)[len(rows) // 2])
    tokens = samples[at].tokens
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return {"prompt": problems[at].question, "of": len(rows), "row": at,
            "tokens": tokenizer.convert_ids_to_tokens(tokens),
            "rollout": [round(x, 4) for x in samples[at].rollout_log_prob],
            "old": [round(x, 4) for x in old[at, :len(tokens)].tolist()],
            "reward": task.reward(problems[at], text)}


def main():
    from three_policies.studies import study
    from three_policies.training.faults import process_group
    from three_policies.training.tasks import make_task
    declared, found = study.declared("sixty-four"), {}
    for width, (regime, arm) in ARMS.items():
        config = study.config_of(declared, regime, arm, SEED)
        with process_group():
            found[width] = respond(config, make_task(config.task, config.seed))
    OUT.write_text(json.dumps({"how": "python book/record_response.py", "seed": SEED,
                               "widths": found}) + "\n")
    print(OUT.relative_to(ROOT))


if __name__ == "__main__":
    main()
