"""The weights that an engine is given are rounded and stale, and the same after a restart.

Where they change within a response, what is recorded is what sampled (eq:recorded).
"""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, strategies
from transformers import AutoModelForCausalLM

from three_policies.doctor.dumps import read
from three_policies.engines.choice import make_engine
from three_policies.rollout import InFlight, Sample, WeightSync, quantize_weights
from three_policies.tests.support.tolerances import gamma


@given(strategies.integers(2, 8), strategies.integers(0, 2**31))
def test_rounding_keeps_its_promises(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 40, generator=generator) * torch.rand(6, 1, generator=generator) * 9
    w[2] = 0
    norm = torch.randn(40, generator=generator)
    rounded = dict(quantize_weights([("w", w), ("norm", norm)], bits))
    assert torch.equal(rounded["norm"], norm)
    q = rounded["w"]
    step = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((q - w).abs() <= step / 2 * (1 + 1e-4) + 1e-12).all()
    assert all(len(row.unique()) <= 2**bits - 1 for row in q)
    assert torch.equal(dict(quantize_weights([("w", -w)], bits))["w"], -q)
    assert torch.allclose(dict(quantize_weights([("w", q)], bits))["w"], q, rtol=gamma(6), atol=0)
    assert dict(quantize_weights([("w", w.bfloat16())], bits))["w"].dtype == torch.bfloat16


def test_no_bits_means_no_rounding_and_impossible_bits_are_refused():
    w = torch.randn(3, 3)
    assert dict(quantize_weights([("w", w)], None))["w"] is w
    for bits in (0, 1, 17, 2.5):
        with pytest.raises(ValueError, match=f"quantize={bits} must be null, a"):
            quantize_weights([], bits)
        with pytest.raises(ValueError, match="rollout.quantize="):
            WeightSync(None, quantize=bits)
    with pytest.raises(ValueError, match="staleness=-1"):
        WeightSync(None, staleness=-1)


class Recorder:
    """A Recorder is an engine that remembers its one weight's value after each update."""

    def __init__(self):
        self.held = []

    def update_weights(self, named_tensors):
        [(name, tensor)] = named_tensors
        assert name == "w"
        self.held.append(tensor[0, 0].item())


def push(sync, weight, values):
    for value in values:
        weight.fill_(value)  # in place, as an optimiser does
        sync.push([("w", weight)])


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_after_push_n_the_engine_holds_push_n_minus_staleness(staleness):
    weight, straight, resumed = torch.zeros(2, 2), Recorder(), Recorder()
    push(WeightSync(straight, staleness), weight, range(8))
    assert straight.held == [max(0, n - staleness) for n in range(8)]
    for interrupted in range(8):  # stop after push `interrupted`, save, resume, push it again
        sync = WeightSync(Recorder(), staleness)
        push(sync, weight, range(interrupted + 1))
        state = sync.state_dict()
        engine = Recorder()
        resumed = WeightSync(engine, staleness)
        resumed.load_state_dict(state)
        push(resumed, weight, range(interrupted, 8))
        assert engine.held == straight.held[interrupted:]


def test_late_weights_are_rounded_too():
    engine = Recorder()
    sync = WeightSync(engine, staleness=1, quantize=2)
    for value in (1.0, 2.0):
        sync.push([("w", torch.tensor([[0.4 * value, value], [0.6 * value, value]]))])
    assert engine.held == [0.0, 0.0]  # 0.4 of the largest weight is nearer to 0 than to 1


def test_a_sample_is_immutable():
    with pytest.raises(AttributeError):
        Sample([1], [0.0], True).tokens = []  # pyright: ignore[reportAttributeAccessIssue]


def test_late_matrices_wait_in_the_engines_dtype_and_vectors_as_they_are():
    sync = WeightSync(None, 1, None, "bfloat16")
    for shape, dtype in (((2, 3), torch.bfloat16), ((3,), torch.float32)):
        assert sync.copy_to_host(("w", torch.ones(shape)))[1].dtype == dtype


PROMPTS, ENDS = [[5, 6], [7, 8, 9], [4]] * 8, (1,)
LARGEST = 60.0                         # of the logits at temperature 0.7: the test checks it
STALE = ["rollout.staleness=2", "rollout.quantize=null", "train.lr=0.05", "train.steps=4"]


@pytest.fixture(scope="module")
def engine(tiny_model):
    made: Any = make_engine("transformers", tiny_model, dtype="float32", max_model_len=32,
                            batch_size=10)
    made.model.double()                # so that only its sampler rounds to float32: see `bound`
    return made


@pytest.fixture(scope="module")
def versions(engine):
    """Return two sets of weights, which give a token log-probs that are about 1 nat apart."""
    first = {name: x.clone() for name, x in engine.model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    second = {name: x + 0.05 * torch.randn(x.shape, generator=generator)
              for name, x in first.items()}
    return [(4, first), (5, second | {"lm_head.weight": second["model.embed_tokens.weight"]})]


def sample(engine, versions, recompute, every=3, **options):
    given = dict(temperature=0.7, max_tokens=10, eos_ids=ENDS) | options
    return engine.generate(PROMPTS, range(len(PROMPTS)), **given,
                           in_flight=InFlight(every, recompute, versions))


def scored(tiny_model, prompt, response, parts):
    """Return log-probs of a response; each part, (first, last, weights, cache kept), by its own.

    With `cache kept` a part sees what earlier parts left of the tokens before it, otherwise it runs
    them again.
    """
    tokens, found, cache, seen = torch.tensor([prompt + response]), [], None, 0
    for first, last, weights, kept in parts:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
        model.load_state_dict(weights)
        cache, seen = (cache, seen) if kept else (None, 0)
        end = len(prompt) + last - 1                       # the token before the part's last
        output = model(tokens[:, seen:end], past_key_values=cache, use_cache=True)
        assert output.logits.abs().max() / 0.7 < LARGEST
        log_probs = (output.logits[0] / 0.7).log_softmax(-1)[len(prompt) + first - 1 - seen:]
        found += log_probs.gather(-1, tokens[0, len(prompt) + first:end + 1, None])[:, 0].tolist()
        cache, seen = output.past_key_values, end
    return found


def bound(log_probs):
    """Bound the rounding of a log-softmax of 26 logits in float32, of which each is given rounded.

    Logit, division by τ, the sum of 26 exponentials (twice rounded each), logarithm and difference
    are at most 40 roundings of numbers no larger than the largest logit and log-prob.
    """
    return gamma(40) * (1 + 2 * LARGEST + log_probs.abs().max().item())


@pytest.mark.made_here
@pytest.mark.parametrize("recompute", [False, True])
def test_every_token_is_recorded_as_it_was_drawn(recompute, engine, versions, tiny_model):
    (_, old), (_, new) = versions
    samples, worst, apart = sample(engine, versions, recompute), -1.0, 0.0
    for prompt, s in zip(PROMPTS, samples):
        n = len(s.tokens)
        assert s.versions == ([4] * 3 + [5] * 7)[:n] and s.crossed == (n > 3)
        parts = [(0, min(n, 3), old, False)] + [(3, n, new, not recompute)] * (n > 3)
        other = [(first, last, weights, not kept) for first, last, weights, kept in parts[1:]]
        log_probs = torch.tensor(s.rollout_log_prob)
        found = torch.tensor(scored(tiny_model, prompt, s.tokens, parts))
        worst = max(worst, (found - log_probs).abs().max().item() - bound(found))
        if n > 3:
            other = torch.tensor(scored(tiny_model, prompt, s.tokens, parts[:1] + other))
            apart = max(apart, (other - log_probs).abs().max().item())
    assert worst <= 0 and apart > 0.1                          # rounding alone; another cache


def test_responses_end_before_at_and_after_an_update(engine, versions):
    samples = sample(engine, versions, False)
    assert {len(s.tokens) < 3 for s in samples} == {len(s.tokens) > 3 for s in samples} == {
        True, False}
    for s in samples:
        assert len(s.versions) == len(s.rollout_log_prob) == len(s.tokens)
        assert s.finished == (s.tokens[-1] in ENDS) and not set(ENDS) & set(s.tokens[:-1])
        assert s.finished or len(s.tokens) == 10


def test_the_first_tokens_are_those_of_the_first_weights_alone(engine, versions):
    """Each batch begins with the oldest weights again, whatever the engine was left with."""
    crossing, alone = sample(engine, versions, False), sample(engine, versions[:1], False)
    assert all(a.tokens[:3] == b.tokens[:3] for a, b in zip(crossing, alone))
    assert any(a.tokens != b.tokens for a, b in zip(crossing, alone))
    late = sample(engine, versions, False, every=10)            # no response is as long
    assert [s.tokens for s in late] == [s.tokens for s in alone]


@pytest.mark.parametrize("every, most, expected", [
    (3, 10, [(1, 3), (2, 3), (3, 4)]), (5, 10, [(1, 5), (2, 5)]), (4, 6, [(1, 4), (2, 2)]),
    (9, 4, [(1, 4)]), (1, 1, [(1, 1)])])
def test_every_weights_have_their_tokens_and_the_newest_the_rest(every, most, expected):
    flight = InFlight(every, False, [(1, {}), (2, {}), (3, {})])
    assert [(push, n) for push, _, n in flight.stages(most)] == expected


def test_a_run_says_which_weights_drew_a_token(run, tmp_path):
    code, lines = run(*STALE, "rollout.update_every=2", "train.dump=4")
    assert code == 0 and lines[0]["response/crossed_fraction"] == 0  # nothing is stale at first
    assert all(line["response/crossed_fraction"] > 0.3 for line in lines[1:])
    for step in 1, 2, 4:
        rows = list(read(tmp_path / f"runs/x/dumps/step-{step:06d}.jsonl"))
        newest, oldest = step - 1, max(0, step - 3)      # after push n − 2 come n − 1 and n
        for row in rows:
            expected = [min(oldest + t // 2, newest) for t in range(len(row.token_ids))]
            assert row.versions == expected, step
    # The newest weights are π_old's, and the first token of all sees no cache.
    text = (tmp_path / "runs/x/dumps/step-000004.jsonl").read_text()
    assert all(json.loads(line)["weight_version"][0] == 1 for line in text.splitlines())


@pytest.mark.made_here
def test_newest_weights_with_a_new_cache_sample_from_the_policy_itself(run, tmp_path):
    """ρ = 1 for tokens of the newest version, if and only if the cache is computed again."""
    worst = {}
    for recompute in "true", "false":
        name = f"recompute-{recompute}"
        run(*STALE, "rollout.update_every=1", f"rollout.recompute_cache={recompute}",
            "train.dump=4", name=name)
        rows = read(tmp_path / "runs" / name / "dumps/step-000004.jsonl")
        worst[recompute] = max(abs(pi - mu) for row in rows for pi, mu, version in zip(
            row.train_log_probs, row.rollout_log_probs, row.versions or []) if version == 3)
    assert 1000 * worst["true"] < worst["false"], worst      # rounding, and another cache


def test_what_changes_nothing_is_said(run, capsys):
    run(*STALE, "rollout.update_every=5", "train.steps=1")
    assert "rollout.update_every=5 changes no response" in capsys.readouterr().err
    run("rollout.recompute_cache=true", "train.steps=1", name="y")
    assert "rollout.recompute_cache=true has no effect" in capsys.readouterr().err
