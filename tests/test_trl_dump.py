"""The doctor reads a dump by TRL's own trainer, whose sampler has another temperature, or a cut."""

import types

import pytest
import torch
from test_trl import Engine, trainer  # noqa: F401  (a fixture)

from adapters.dumps import read
from doctor import examine
from estimators import sampling_log_probs

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
    from adapters.trl import dump
    with pytest.raises(ValueError, match="no old_per_token_logps and no sampling_per_token_logps: "
                                         "a dump needs use_vllm=True"):
        dump({"completion_mask": torch.ones(1, 1)}, str(tmp_path / "dump.jsonl"))


def test_a_tools_tokens_are_dumped_and_do_not_count(tmp_path):
    from adapters.trl import dump
    ids, log_prob = torch.tensor([[5, 6, 7, 0]]), torch.full((1, 4), -1.0)
    dump({"prompt_ids": torch.tensor([[3]]), "prompt_mask": torch.tensor([[1]]),
          "completion_ids": ids, "completion_mask": torch.tensor([[1, 1, 1, 0]]),
          "tool_mask": torch.tensor([[1, 0, 1, 1]]), "sampling_per_token_logps": log_prob,
          "old_per_token_logps": log_prob}, str(tmp_path / "dump.jsonl"))
    [response] = read(tmp_path / "dump.jsonl")
    assert response.token_ids == [5, 6, 7] and response.mask == [True, False, True]


@pytest.mark.parametrize("how, cause", [({}, None), ({"temperature": 0.6}, "temperature"),
                                        ({"top_p": 0.8}, "cut")])
def test_the_doctor_finds_what_trls_sampler_does_otherwise(
        how, cause, trainer, tmp_path, monkeypatch):  # noqa: F811
    import trl

    from adapters.trl import dump

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
