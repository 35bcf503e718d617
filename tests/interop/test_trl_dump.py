"""The doctor reads a dump by TRL's own trainer, whose sampler has another temperature, or a cut."""

import types

import pytest
import torch

from three_policies.doctor import examine
from three_policies.doctor.dumps import read
from three_policies.estimators import sampling_log_probs
from three_policies.tests.support.trl_stub import Engine, config, environment, first_batches

pytestmark = pytest.mark.usefixtures("trl_required")


class Sampler(Engine):
    """A Sampler stands for vLLM: it draws from the model, and records what it drew from."""

    how = types.MappingProxyType({})

    def generate(self, prompts, num_generations, **_):
        drawn = [self.draw(prompt) for prompt in prompts]
        return None, [ids for ids, _ in drawn], [log_probs for _, log_probs in drawn], None

    @torch.no_grad()
    def draw(self, prompt):
        ids, log_probs = [], []
        while len(ids) < self.longest and self.tokenizer.eos_token_id not in ids:
            logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            log_mu, _ = sampling_log_probs(logits, **self.how)
            [token] = torch.multinomial(log_mu.exp(), 1, generator=self.generator).tolist()
            ids.append(token)
            log_probs.append([log_mu[token].item()])
        return ids, log_probs


def test_a_batch_without_log_probs_is_one_sentence(tmp_path):
    from three_policies.interop.trl import dump
    with pytest.raises(ValueError, match="no old_per_token_logps and no sampling_per_token_logps: "
                                         "a dump needs use_vllm=True"):
        dump({"completion_mask": torch.ones(1, 1)}, str(tmp_path / "dump.jsonl"))


def test_a_tools_tokens_are_dumped_and_do_not_count(tmp_path):
    from three_policies.interop.trl import dump
    ids, log_prob = torch.tensor([[5, 6, 7, 0]]), torch.full((1, 4), -1.0)
    dump({"prompt_ids": torch.tensor([[3]]), "prompt_mask": torch.tensor([[1]]),
          "completion_ids": ids, "completion_mask": torch.tensor([[1, 1, 1, 0]]),
          "tool_mask": torch.tensor([[1, 0, 1, 1]]), "sampling_per_token_logps": log_prob,
          "old_per_token_logps": log_prob}, str(tmp_path / "dump.jsonl"))
    [response] = read(tmp_path / "dump.jsonl")
    assert response.token_ids == [5, 6, 7] and response.mask == [True, False, True]


def test_the_trainer_says_what_its_pair_is(tiny_model, tmp_path):
    """vLLM's dtype is known where it is in this process; autocast is the trainer's precision."""
    from transformers import AutoModelForCausalLM

    from three_policies.interop.trl import dump, pair
    of = types.SimpleNamespace
    engine = of(llm_engine=of(model_config=of(dtype=torch.bfloat16, quantization=None)))
    trainer = of(model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
                 accelerator=of(mixed_precision="no"), vllm_generation=of(llm=engine))
    assert pair(trainer) == {"engine": "torch.bfloat16", "quantize": None,
                             "trainer": "torch.float32", "experts": False}
    trainer.accelerator.mixed_precision, trainer.vllm_generation = "bf16", of()
    assert pair(trainer)["trainer"] == "bf16" and pair(trainer)["engine"] is None
    one, minus = torch.ones(1, 1, dtype=torch.int64), -torch.ones(1, 1)
    names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
    dump(dict.fromkeys(names, one) | {"sampling_per_token_logps": minus,
                                      "old_per_token_logps": minus}, tmp_path / "one", trainer)
    [response] = read(tmp_path / "one")
    assert response.pair == pair(trainer)


@pytest.mark.parametrize("how, cause", [({}, None), ({"temperature": 0.6}, "temperature"),
                                        ({"top_p": 0.8}, "cut")])
def test_the_doctor_finds_what_trls_sampler_does_otherwise(
        how, cause, trainer, tmp_path, monkeypatch):
    import trl

    from three_policies.interop.trl import dump

    class Dumping(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            dump(batch, tmp_path / "dump.jsonl")
            return batch
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration",
                        type("Sampler", (Sampler,), {"how": how}))
    run = trainer(Dumping, max_steps=1, num_generations=4, per_device_train_batch_size=64,
                  gradient_accumulation_steps=1, mask_truncated_completions=False)
    run.train()
    report = examine(read(tmp_path / "dump.jsonl"))
    assert report.tokens > 300 and [f.cause for f in report.causes][:1] == [cause] * bool(cause)


# ----------------------------------------------------------------- log-probs that vLLM did not give

def missing_share(batches):
    """Return the share of sampled tokens whose log-prob is NaN in TRL's batches."""
    masks = [x["completion_mask"] * x.get("tool_mask", 1) == 1 for x in batches]
    gone = sum(int((x["sampling_per_token_logps"].isnan() & m).sum())
               for x, m in zip(batches, masks))
    return gone / sum(int(m.sum()) for m in masks)


@pytest.mark.parametrize("tools", [False, True])
def test_the_weights_say_how_many_log_probs_are_missing(tools, trainer, monkeypatch):
    """ρ is 1 there, which no other metric shows; a tool's tokens have none, and are not counted."""
    from trl import GRPOTrainer

    from three_policies.interop.trl import MISSING, WeightedGRPOTrainer
    generate, seen = GRPOTrainer._generate_and_score_completions, []
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions",
                        lambda self, inputs: seen.append(generate(self, inputs)) or dict(seen[-1]))
    ours = trainer(WeightedGRPOTrainer, correction=config("token_truncate"),
                   rollout_func=environment if tools else None)
    ours.model.train()
    ours._generate_and_score_completions([{"prompt": f"{i}="} for i in range(8) for _ in range(2)])
    [logged] = ours._metrics["train"][MISSING]
    assert logged == pytest.approx(missing_share(seen), rel=1e-6) and 0.02 < logged < 0.3
    assert MISSING.startswith("rollout_corr/") and ours._metrics["train"]["rollout_corr/kl"]


def test_the_loss_logs_how_many_log_probs_are_missing_of_all_tokens(trainer):
    """It is one share of all micro-batches, with and without a rejected token."""
    from three_policies.interop.trl import MISSING, PolicyLossGRPOTrainer
    correction = config("token_truncate", rollout_rs={"token_k1": (0.9, 1.1)})
    ours = trainer(PolicyLossGRPOTrainer, correction=correction, loss_type="grpo")
    batches = list(first_batches(ours, 2))
    for inputs in batches:
        ours._compute_loss(ours.model, inputs)
    ours.log(row := {})
    shares = [missing_share([x]) for x in batches]
    assert row[MISSING] == pytest.approx(missing_share(batches), rel=1e-6) and max(shares) > 0
    assert "missing" not in row and "sampled" not in row


def test_a_batch_with_missing_log_probs_is_a_dump_that_says_so(tmp_path):
    from three_policies.interop.trl import dump
    log_prob = torch.full((2, 3), -1.0)
    sampled = torch.tensor([[float("nan")] * 3, [-1.0, float("nan"), float("nan")]])
    dump({"prompt_ids": torch.tensor([[3]] * 2), "prompt_mask": torch.ones(2, 1),
          "completion_ids": torch.tensor([[5, 6, 7]] * 2), "completion_mask": torch.ones(2, 3),
          "tool_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]), "sampling_per_token_logps": sampled,
          "old_per_token_logps": log_prob}, str(tmp_path / "dump.jsonl"))
    assert examine(read(tmp_path / "dump.jsonl")).lost == (4, 2, 1)
