"""The doctor watches TRL's own trainer by one line: callbacks=[DoctorCallback()].

The sampler stands for vLLM with weights of its own: TRL's sync brings it the trainer's, as it does.
"""

import pytest
import torch

from three_policies.doctor import examine
from three_policies.doctor.command import main
from three_policies.doctor.dumps import read
from three_policies.estimators import sampling_log_probs
from three_policies.tests.support.trl_stub import Engine

pytestmark = pytest.mark.usefixtures("trl_required")
SYNCS = 10 ** 9


class Sampler(Engine):
    """A Sampler draws from its own copy of the weights, and records what it drew from."""

    temperature, syncs = 1.0, SYNCS

    def __init__(self, *, model, **options):
        # A deep copy would compute with the trainer's weights: TRL wraps `forward` in a closure.
        super().__init__(model=type(model)(model.config).to(model.dtype).eval(), **options)
        self.trained, self.synced = model, 0

    def sync_weights(self):
        if self.synced < self.syncs:
            self.model.load_state_dict(self.trained.state_dict())
            self.synced += 1

    @torch.no_grad()
    def generate(self, prompts, num_generations, **_):
        """Draw a response to each prompt; the prompts here are of one length."""
        ids, drawn = torch.tensor(prompts), []
        for _ in range(self.longest):
            log_mu, _ = sampling_log_probs(self.model(ids).logits[:, -1], self.temperature)
            token = torch.multinomial(log_mu.exp(), 1, generator=self.generator)
            drawn.append((token, log_mu.gather(1, token)))
            ids = torch.cat([ids, token], 1)
        tokens, log_probs = (torch.cat(x, 1).tolist() for x in zip(*drawn))
        end = self.tokenizer.eos_token_id
        sizes = [row.index(end) + 1 if end in row else len(row) for row in tokens]
        return None, [row[:n] for row, n in zip(tokens, sizes)], [
            [[x] for x in row[:n]] for row, n in zip(log_probs, sizes)], None


@pytest.fixture
def watched(trainer, tmp_path, monkeypatch, capsys):
    """watched(steps, **faults) trains with the one line: (what was said, TRL's log, the dumps)."""
    import trl

    from three_policies.interop.trl import DoctorCallback

    def run(steps, **faults):
        monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration",
                            type("Faulty", (Sampler,), faults))

        def with_the_line(**given):
            return trl.GRPOTrainer(**given, callbacks=[DoctorCallback(dump=tmp_path / "dumps")])
        one = trainer(with_the_line, max_steps=steps, num_generations=4,
                      per_device_train_batch_size=64, gradient_accumulation_steps=1,
                      mask_truncated_completions=False)
        one.train()
        said = [line for line in capsys.readouterr().err.splitlines() if "doctor, step" in line]
        return said, one.state.log_history, sorted((tmp_path / "dumps").iterdir())
    return run


def alarms(log):
    return [row["doctor/alarm"] for row in log if "doctor/alarm" in row]


def test_a_healthy_run_is_said_once(watched, capsys):
    said, log, dumps = watched(4)
    assert len(said) == 1 and "doctor, step 1: " in said[0] and "no cause found" in said[0]
    assert alarms(log) == [0.0] * 4 and len(dumps) == 4
    assert main(["--watch", str(dumps[0].parent), "--idle", "0"]) == 0
    assert capsys.readouterr().out.count("no cause found") == 4


def test_a_wrong_temperature_is_said_of_the_first_batch(watched, capsys):
    said, log, dumps = watched(3, temperature=0.6)
    assert "doctor, step 1: " in said[0] and "temperature (certain)" in said[0]
    assert said[0].startswith("ALARM ") and alarms(log) == [1.0] * 3
    assert examine(read(dumps[0])).causes[0].cause == "temperature"
    assert main(["--watch", str(dumps[0].parent), "--idle", "0"]) == 1
    assert capsys.readouterr().out.count("ALARM") == 3


def test_weights_that_are_no_longer_synced_are_said_when_that_begins(watched):
    """Steps 1 and 2 are sampled from the newest weights, and the steps after from those of 2."""
    said, log, _ = watched(6, syncs=2)
    assert "doctor, step 1: " in said[0] and "no cause found" in said[0]
    assert "weights" in said[1] and not any("step 2: " in line for line in said)
    assert alarms(log)[:2] == [0.0, 0.0] and alarms(log)[-1] == 1.0


def test_what_the_doctor_cannot_do_is_one_warning_and_the_run_goes_on(trainer, caplog):
    import trl

    from three_policies.interop.trl import DoctorCallback
    callback = DoctorCallback()
    run = trainer(lambda **given: trl.GRPOTrainer(**given, callbacks=[callback]), use_vllm=False,
                  mask_truncated_completions=False)
    run.train()
    assert run.state.global_step == 4 and callback.watch.broken
    assert [r.message for r in caplog.records if "doctor" in r.name] == [
        "the doctor watches no longer: ValueError: this batch has no old_per_token_logps and no "
        "sampling_per_token_logps: a dump needs use_vllm=True and "
        "vllm_importance_sampling_correction=True, or a rollout_func with log-probs and "
        "num_iterations above 1"]


def test_a_trainer_without_the_line_is_not_watched(trainer, capsys):
    from three_policies.interop import trl as recipe
    recipe.DoctorCallback()                                  # of another trainer
    import trl
    run = trainer(trl.GRPOTrainer, max_steps=1)
    run.train()
    assert "doctor" not in capsys.readouterr().err
    assert not any("doctor/alarm" in row for row in run.state.log_history)
