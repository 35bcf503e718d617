"""TRL's trainer with a stub in the place of vLLM, and the losses of both on one batch."""

import pytest
import torch

from three_policies.tests.support.tolerances import of_sum

MODES = {"token_truncate": ("token", 2.0), "token_mask": ("token", (0.5, 2.0)),
         "sequence_truncate": ("sequence", 2.0), "sequence_mask": ("sequence", (0.5, 2.0))}
LOSSES = {"dapo": {}, "grpo": {}, "bnpo": {}, "dr_grpo": {}, "sapo": {"sapo_temperature_neg": 1.3},
          "cispo": {"epsilon_high": 1.2}, "dapo delta": {"delta": 1.06, "epsilon": 0.05}}


class Engine:
    """An Engine stands for vLLM: lengths 1 to 8, every second response cut, noisy log-probs."""

    def __init__(self, *, model, processing_class, max_completion_length, **_):
        self.model, self.tokenizer = model, processing_class
        self.longest, self.generator = max_completion_length - 2, torch.Generator().manual_seed(0)

    def sync_weights(self):
        pass

    def generate(self, prompts, num_generations, **_):
        def draw(low, high, *size):
            return torch.randint(low, high, size, generator=self.generator)
        responses = [draw(4, 26, int(draw(1, self.longest + 1, 1))).tolist() for _ in prompts]
        responses = [[*ids[:-1], self.tokenizer.eos_token_id] if i % 2 else ids
                     for i, ids in enumerate(responses)]
        return None, responses, [self.log_probs(*both) for both in zip(prompts, responses)], None

    @torch.no_grad()
    def log_probs(self, prompt, response):
        ids = torch.tensor(prompt + response)
        log_prob = self.model(ids[None]).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        log_prob = log_prob[range(len(response)), response]
        log_prob += 0.4 * torch.randn(len(response), generator=self.generator)
        missing = torch.rand(len(response), generator=self.generator) < 0.1
        return [[None if gone else x] for x, gone in zip(log_prob.tolist(), missing.tolist())]


@pytest.fixture
def trainer(tiny_model, tmp_path, monkeypatch):
    """trainer(class, mode, **settings) has 16 prompts of its own, and two completions for each."""
    import datasets
    import transformers
    import trl
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def reward(completion_ids, **_):
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    def make(kind, mode="token_truncate", correction=None, rollout_func=None, **settings):
        defaults = {"use_vllm": True, "gradient_accumulation_steps": 2, "num_generations": 2,
                    "per_device_train_batch_size": 4, "max_completion_length": 10, "beta": 0.0,
                    "learning_rate": 1e-2, "max_steps": 4, "lr_scheduler_type": "constant",
                    "mask_truncated_completions": True, "logging_steps": 1}
        args = trl.GRPOConfig(
            output_dir=str(tmp_path), report_to="none", save_strategy="no", use_cpu=True,
            bf16=False,
            disable_tqdm=True, seed=1, vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=2.0,
            vllm_importance_sampling_clip_min=0.5 if mode.endswith("mask") else None,
            **defaults | settings)
        rows = datasets.Dataset.from_list(
            [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)])
        given = {} if correction is None else {"correction": correction}
        return kind(model=transformers.AutoModelForCausalLM.from_pretrained(
                        tiny_model, dtype=torch.float64),
                    processing_class=transformers.AutoTokenizer.from_pretrained(tiny_model),
                    reward_funcs=reward, args=args, train_dataset=rows, rollout_func=rollout_func,
                    **given)

    return make


def config(mode, **options):
    from three_policies.presets import RolloutCorrectionConfig
    return RolloutCorrectionConfig(*MODES[mode], **options)


def gradient(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def both_losses(trainer, inputs):
    """Return (loss, gradient) by TRL and by the trainer itself, and how far the losses may differ.

    The weights have moved. A loss is a float32 sum over the tokens. Each term is in one of the two
    losses with A = ±|A|, each of which has terms of one sign: they add up to Σ|term| at least. A
    term is rounded less than 24 times before it is added: twelve for a weight that is a product of
    ten ratios, three for r, and the rest for products and denominators.
    """
    from trl import GRPOTrainer
    results, A = [], inputs["advantages"].abs()
    with torch.no_grad():
        size = sum(trainer._compute_loss(
            trainer.model, inputs | {"advantages": a}).abs().item() for a in (A, -A))
    for compute in (GRPOTrainer._compute_loss, type(trainer)._compute_loss):
        loss = compute(trainer, trainer.model, inputs)
        results.append((loss.item(), gradient(trainer, loss)))
    return *results, 2 * of_sum(size, inputs["completion_mask"].numel(), before=24)


def first_batches(trainer, number):
    """Return what TRL's loop would pass to the first losses; weights move after the first."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    batches = iter(trainer.get_train_dataloader())
    for trainer._step in range(number):
        inputs = trainer._prepare_inputs(next(batches))
        if trainer._step == 0:
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.mul_(1.03)
        yield inputs


def environment(prompts, trainer):
    """Return a rollout_func: the stub's tokens, of which every third is a tool's."""
    ids = trainer.processing_class(text=prompts)["input_ids"]
    engine = Engine(model=trainer.model, processing_class=trainer.processing_class,
                    max_completion_length=10)
    _, responses, log_probs, _ = engine.generate(ids, 2)
    return {"prompt_ids": ids, "completion_ids": responses,
            "logprobs": [[x[0] for x in row] for row in log_probs],
            "env_mask": [[int(t % 3 != 1) for t in range(len(row))] for row in responses]}
