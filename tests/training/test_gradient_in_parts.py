"""Splitting the work over ranks, micro-batches and slices of the vocabulary changes nothing.

The trainer computes what its engine sampled from, of the whole vocabulary and of what was kept.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from three_policies import oracle, trainer
from three_policies.engines.choice import make_engine
from three_policies.estimators import sampling_log_probs
from three_policies.policy import Policy, full_weights, load_policy
from three_policies.rollout import Sample, WeightSync
from three_policies.tests.support.certified import certifies
from three_policies.tests.support.launching import shell, torchrun
from three_policies.tests.support.tolerances import gamma, norm, of_sum
from three_policies.training.faults import process_group
from three_policies.training.heads import TokenLogProbs, widen_head
from three_policies.training.models import attend

GRADIENT = """
import itertools, sys, torch, torch.distributed as dist
from three_policies import trainer
from dataclasses import replace
from types import SimpleNamespace
from three_policies.presets import PRESETS, RolloutCorrectionConfig
from three_policies.correction import correct
from three_policies.metrics import merge
from three_policies.training.faults import process_group
from three_policies.policy import full_tensor, load_policy
from three_policies.tests.support.tolerances import in_float64
in_float64()
path, out, results = sys.argv[1], sys.argv[2], {}
with process_group() as device:
    rank, world = dist.get_rank(), dist.get_world_size()
    config = trainer.Config()
    config.train.max_grad_norm = 1e9
    generator = torch.Generator().manual_seed(0)
    def draw(*shape): return torch.randn(*shape, generator=generator).double()
    prompts = [[3 + (i * j) % 20 for j in range(1 + i % 3)] for i in range(8)]
    lengths = [6, 1, 3, 2, 6, 5, 4, 1]
    samples = [trainer.Sample([3 + (i + t) % 20 for t in range(n)], (-3 + 0.3 * draw(n)).tolist(),
                              True, [[t, 3 + (i + t) % 20, 9][i % 2:] for t in range(n)])
               for i, n in enumerate(lengths)]
    advantages, noise = draw(8), 0.3 * draw(8, 6)
    mine = slice(rank, None, world)
    cases = [("decoupled_seq_is_rs", "token-mean", "fixed", False),
             ("decoupled_seq_is_rs", "seq-mean-token-mean", "kept", True),
             ("bypass_pg_rs", "token-mean", "kept", True),
             ("bypass_pg_is", "seq-mean-token-sum-norm", "fixed", False)]
    policy = load_policy(path, 1.0, "float32", device)           # no step is taken: for all cases
    splits = [*[1, 2, 4, 8][:4 - world // 2], "tokens", "groups", "packed"]
    for parts, case in itertools.product(splits, cases):
        preset, aggregation, denominator, normalize = case
        config.train.micro_batch_tokens = {"tokens": 13, "groups": 24, "packed": 13}.get(parts)
        config.policy.packed = parts == "packed"
        config.rollout.samples = 2 if parts == "groups" else 8
        config.train.micro_batch_size = 1 if isinstance(parts, str) else 8 // world // parts
        rejecting = RolloutCorrectionConfig("token", 2.0, normalize, {"seq_sum_k1": [0.01, 1.0]},
                                            True, "reinforce")
        options = rejecting if preset == "bypass_pg_rs" else PRESETS[preset]()
        options = replace(options, rollout_is_batch_normalize=normalize)
        config.loss = replace(config.loss, aggregation=aggregation, denominator=denominator)
        batch = trainer.pad(prompts[mine], samples[mine], advantages[mine], device)
        if preset != "bypass_pg_is":                   # in which μ was cut
            batch = batch._replace(kept_ids=None)
        # every rank pads to its own longest response
        current = trainer.score(policy, batch, config)
        near = torch.nn.functional.pad(noise[mine], (0, 0))[:, :current.shape[1]]
        batch = batch._replace(rollout_log_prob=current + near, old_log_prob=current + near / 2)
        given = None if options.bypass_mode else correct(
            batch.old_log_prob, batch.rollout_log_prob, batch.response_mask, options,
            batch.advantages, dist.group.WORLD)
        gradient = {}
        class Recorder:
            def step(self):
                for name, parameter in policy.named_parameters():
                    gradient[name] = full_tensor(parameter.grad).clone()
            def zero_grad(self): policy.zero_grad()
        run = SimpleNamespace(config=config, loaded=SimpleNamespace(
            policy=policy, optimizer=Recorder()))
        made = trainer.update(run, batch, options, given)
        merged = merge(made.corrections, dist.group.WORLD)
        results.setdefault(parts, {})[preset, denominator] = (gradient, {**made.metrics, **merged})
    if rank == 0: torch.save(results, out)
"""


@pytest.fixture(scope="module")
def gradients(tiny_model, forks, tmp_path_factory):
    """Return gradients and metrics of one update, by (ranks, micro-batches of each).

    Some of its 8 rows are rejected. "tokens" and "groups" are budgets of 13 tokens, and of 24 with
    whole groups of two rows; "packed" is one of 13 tokens of packed rows. Of four ranks three need
    two micro-batches for 13 padded tokens, and the last one needs one.
    """
    directory, found = tmp_path_factory.mktemp("gradients"), {}
    (directory / "gradient.py").write_text(GRADIENT)
    for ranks in (1, 2, 4):
        command = torchrun(ranks, forks, "gradient.py", str(tiny_model), "out.pt")
        result = shell(command, directory)
        assert result.returncode == 0, result.stderr
        cases = torch.load(directory / "out.pt", weights_only=True)
        found |= {(ranks, parts): case for parts, case in cases.items()}
    return found


@pytest.mark.parametrize("split", [
    (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2),
    *((ranks, budget) for ranks in (1, 2, 4) for budget in ("tokens", "groups", "packed"))])
def test_ranks_and_micro_batches_change_nothing(gradients, split):
    for case, (expected, metrics) in gradients[1, 1].items():
        gradient, other = gradients[split][case]
        scale = max(g.abs().max() for g in expected.values())
        assert scale > 1e-4
        for name, g in expected.items():
            assert g.dtype == torch.float64
            assert (gradient[name] - g).abs().max() <= 1e-12 * scale, (case, name)
        for name, value in metrics.items():
            found, value = other[name].double(), value.double()
            assert torch.isclose(found, value, rtol=1e-12, atol=1e-12), (case, name)
    _, metrics = gradients[1, 1]["decoupled_seq_is_rs", "fixed"]
    assert 0 < metrics["rollout_corr/rollout_rs_seq_masked_fraction"] < 1


def test_a_budget_of_tokens_holds_and_every_rank_has_as_many_parts(monkeypatch):
    """A part's rows times its longest prompt and response are within it, but for a row alone."""
    config = trainer.Config()
    config.rollout.samples, config.train.micro_batch_tokens = 2, 24
    lengths = [1, 9, 2, 8, 5, 5, 30, 7, 1, 1]                   # of five prompts, of 1 to 5 tokens
    samples = [Sample([3] * n, [-1.0] * n, True) for n in lengths]
    prompts = [[3] * (1 + i // 2) for i in range(10)]
    batch = trainer.pad(prompts, samples, torch.zeros(10), torch.device("cpu"))

    def split(budget, together=False, parts=1):
        """Return the parts of a rank beside another one that needs so many."""
        monkeypatch.setattr(trainer.dist, "all_reduce", lambda x, how: x.clamp_(min=parts))
        config.train.micro_batch_tokens = budget
        found = trainer.micro_batches(batch, config, together)
        assert sorted(torch.cat(found).tolist()) == list(range(10))
        return [part.tolist() for part in found]

    def cost(part):
        return len(part) * (max(len(prompts[i]) for i in part) + max(lengths[i] for i in part))

    parts = split(24)
    assert parts[-1] == [6] and all(cost(part) <= 24 for part in parts[:-1])
    assert all(cost([*a, b[0]]) > 24 for a, b in itertools.pairwise(parts))            # are full
    assert split(24, together=True) == parts                  # whole groups would not be within it
    for budget in (34, 67):                            # a row of 34 tokens fits, its group does not
        assert split(budget, together=True) == split(budget)
    whole = split(68, together=True)                   # the largest group fits, so all are whole
    assert all(i ^ 1 in part for part in whole for i in part) and len(whole) == 3
    for count in (6, 10):
        assert len(split(24, parts=count)) == count and all(split(24, parts=count))


@pytest.mark.parametrize("size, together, expected", [
    (4, True, [[2, 4, 5, 3], [0, 1]]),                 # in the order of each pair's longer one
    (4, False, [[0, 2, 4, 5], [3, 1]]),
    (3, True, [[0, 2, 4], [5, 3, 1]])])                # no whole pairs, so each row by itself
def test_samples_of_a_prompt_stay_together_where_whole_groups_fit(size, together, expected):
    config = trainer.Config()
    config.rollout.samples, config.train.micro_batch_size = 2, size
    samples = [Sample([3] * n, [-1.0] * n, True) for n in (1, 6, 2, 5, 3, 4)]
    batch = trainer.pad([[3]] * 6, samples, torch.zeros(6), torch.device("cpu"))
    found = trainer.micro_batches(batch, config, together)
    assert [part.tolist() for part in found] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "engine"])
def test_logits_of_half_precision_products_are_float32(device, dtype):
    """Only float32's sums are rounded: bfloat16's logits of 30 would be off by up to 0.06."""
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(2, 3, 32, generator=g).to(dtype), torch.nn.Linear(32, 5000).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(5000, 32, generator=g))
        exact = torch.nn.functional.linear(hidden.double(), head.weight.double())   # [2, 3, V]
        bound = of_sum(hidden.double().abs() @ head.weight.double().abs().T, 32, before=1)
        if device == "engine":
            exact += head.bias.double()
            widen_head(head)
            found, bound = head(hidden), bound + gamma(1) * (exact.abs() + bound)
        else:
            targets = torch.arange(5000).expand(6, -1)
            found = TokenLogProbs.apply(hidden.flatten(0, 1), head.weight, None, targets, 1.0, None)
            exact = exact.log_softmax(-1).flatten(0, 1)
            bound = 2 * bound.amax(-1).flatten()[:, None] + gamma(99) * exact.abs()
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= bound).all()
    assert (exact.to(dtype) - exact).abs().max() > 10 * bound.max()       # what rounding would cost


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts_and_slices_give_the_log_probs_of_the_whole_logits(
        checkpointing, tiny_model, monkeypatch):
    """Log-probs are those of the whole logits, even for rows that share a prompt.

    Rows 0 and 2 do. The last row has the same numbers, but a token where they have padding.
    """
    tokens = torch.tensor([[0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 0], [0, 5, 6, 9, 0, 0],
                           [5, 5, 6, 9, 3, 1], [0, 5, 6, 7, 8, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0],
                              [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    monkeypatch.setattr("transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm.forward", norm)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=attention, position_ids=positions).logits
    logits = logits[:, 2:-1] / 0.7
    whole = logits.log_softmax(-1).gather(-1, tokens[:, 3:, None]).squeeze(-1)        # [5, 3]
    mask = attention[:, 3:].bool()
    whole[:4][mask[:4]].square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    policy = Policy(model, 0.7)
    # The slices of 5 × 3 tokens' 26 logits are 10, 10 and 6 wide.
    monkeypatch.setattr("three_policies.training.heads.CHUNK", 15 * 10)
    sliced = policy(tokens, attention, 3)
    sliced[:4][mask[:4]].square().sum().backward()
    assert torch.allclose(sliced[mask], whole[mask], rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(p.grad, g, rtol=1e-10, atol=1e-10)
               for p, g in zip(model.parameters(), expected))


def test_candidates_are_in_their_tokens_places_where_responses_are_shorter_than_the_batch(
        tiny_model):
    """Each token is its own only candidate; no row of a micro-batch has the batch's width."""
    tokens = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 9, 0, 0, 0]])
    policy = Policy(transformers.AutoModelForCausalLM.from_pretrained(tiny_model), 1.0)
    own, others = policy(tokens, (tokens > 0).long(), 4, None, None, tokens[:, 2:, None])
    assert own.equal(others[..., 0]) and (own[:, :1] < 0).all() and (own[:, 2:] == 0).all()


def operations(node):
    """Return the names of a graph's operations."""
    return {node.name()}.union(*(operations(x) for x, _ in node.next_functions if x is not None))


@pytest.mark.parametrize("threads, queries, keys, fused", [
    (1, 4, 12, True), (2, 4, 12, False), (2, 1, 12, True), (2, 64, 32, False), (2, 64, 33, True)])
def test_few_queries_on_several_threads_leave_torchs_fused_kernel(threads, queries, keys, fused):
    """What they attend to stays the same, with its gradient. The last row has padding alone."""
    g, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    q, k, v = (torch.randn(3, 2, n, 8, generator=g, dtype=torch.float64, requires_grad=True)
               for n in (queries, keys, keys))
    mask = torch.arange(keys) >= torch.tensor([0, 3, keys])[:, None, None, None]    # [3, 1, 1, L]
    torch.set_num_threads(threads)
    found, _ = attend(SimpleNamespace(is_causal=True), q, k, v, mask.expand(3, 1, queries, keys))
    torch.set_num_threads(before)
    scores = (q @ k.mT / math.sqrt(8))[:2].masked_fill(~mask[:2], -math.inf)
    attended = (scores.softmax(-1) @ v[:2]).transpose(1, 2)
    expected = torch.cat([attended, torch.zeros_like(found[2:])])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for of_found, right in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True)
                                 for x in (found, expected))):
        torch.testing.assert_close(of_found, right, rtol=1e-12, atol=1e-12)
    assert any("FlashAttention" in name for name in operations(found.grad_fn)) == fused


def test_two_threads_add_up_the_gradient_of_shared_prompts_in_one_order():
    """Rows that share a prompt are far apart, so both threads have parts of each sum."""
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=30, hidden_size=256, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4))
    policy, g = Policy(model, 1.0), torch.Generator().manual_seed(0)
    rows = torch.arange(256)[torch.randperm(256, generator=g)] // 8           # 8 of each prompt
    tokens = torch.randint(3, 30, (256, 8), generator=g)
    tokens[:, :6] = tokens[rows, :6]
    upstream, found, threads = torch.randn(256, 2, generator=g), set(), torch.get_num_threads()
    torch.set_num_threads(2)
    for _ in range(8):
        policy.zero_grad()
        policy(tokens, torch.ones_like(tokens), 2).backward(upstream)
        found.add(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
    torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("chunk", [1, 7 * 4, 7 * 11, 2 ** 20])     # slices of 1, 4, 11 and all
@pytest.mark.parametrize("with_bias, temperature, softcap", [
    (False, 1.0, None), (True, 0.7, None), (True, 1.3, 2.0)])
@pytest.mark.parametrize("cut", [False, True])
def test_slices_of_the_vocabulary_change_nothing(
        cut, with_bias, temperature, softcap, chunk, monkeypatch):
    """Value and gradients are those of the same thing written out and left to autograd.

    This holds for the whole vocabulary, and for sets that differ from token to token: from one
    alone to all, in any order, filled up with the token itself.
    """
    monkeypatch.setattr("three_policies.training.heads.CHUNK", chunk)
    g = torch.Generator().manual_seed(0)
    drawn = dict(generator=g, dtype=torch.float64, requires_grad=True)
    hidden, weight, bias = (torch.randn(*shape, **drawn) for shape in ((7, 5), (11, 5), (11,)))
    given = [hidden, weight, bias][:2 + with_bias]
    targets = torch.tensor([0, 3, 4, 10, 7, 3, 8])[:, None]
    if not cut:            # and of two candidates in the place of each, here and there itself
        candidates = [[1, 2], [3, 5], [4, 4], [0, 10], [6, 7], [9, 9], [0, 8]]
        targets = torch.cat([targets, torch.tensor(candidates)], 1)
    upstream = torch.randn(targets.shape, generator=g, dtype=torch.float64)
    z = torch.nn.functional.linear(*given)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    kept = None
    if cut:
        sets = [[0], [3, 10], [9, 4, 0, 1], list(range(10, -1, -1)), [7, 8, 6], [3, 0], [8, 7]]
        kept = torch.tensor([[*ids, *[y] * (11 - len(ids))]
                             for ids, [y] in zip(sets, targets.tolist())], dtype=torch.int)
        left_out = torch.tensor([[v not in ids for v in range(11)] for ids in sets])
        z = z.masked_fill(left_out, -math.inf)
    plain = z.log_softmax(-1).gather(-1, targets)
    ours = TokenLogProbs.apply(*given[:2], bias if with_bias else None, targets, temperature,
                               softcap, kept)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, given, upstream),
                    torch.autograd.grad(plain, given, upstream)):
        assert (a - b).norm() <= 1e-12 * b.norm()
    assert not cut or (ours[0] == 0 and ours[1:].max() < 0)        # one alone is certain
    sizes = [z.shape[1] for _, z, *_ in TokenLogProbs.slices(
        hidden.detach(), weight.detach(), None, targets, 1.0, None)]
    assert sum(sizes) == 11 and max(sizes) == max(1, min(11, chunk // 7))


@pytest.mark.parametrize("logits, widths", [(7 * 150, [128, 72]), (7 * 64, [64, 64, 64, 8]),
                                            (7 * 63, [63, 63, 63, 11])])
def test_slices_are_aligned_where_they_are_wider_than_64(logits, widths, monkeypatch):
    """A GPU multiplies matrices whose rows are not aligned by slower kernels."""
    monkeypatch.setattr("three_policies.training.heads.CHUNK", logits)
    slices = TokenLogProbs.slices(torch.zeros(7, 2), torch.zeros(200, 2), None,
                                  torch.zeros(7, 1, dtype=torch.long), 1.0, None)
    assert [z.shape[1] for _, z, *_ in slices] == widths


def replayed(policy, kept):
    """Return log π of every sequence of the oracle, [N, T], by the code that trains.

    kept [S, V] are the sets, None if all is kept.
    """
    rows, (S, V) = policy.states.flatten(), policy.logits.shape
    ids = None
    if kept is not None:               # the places of other tokens hold the token itself
        ids = torch.where(kept[rows], torch.arange(V), policy.tokens.flatten()[:, None])
    hidden = torch.eye(S, dtype=torch.float64)[rows]
    targets = policy.tokens.flatten()[:, None]
    log_probs = TokenLogProbs.apply(hidden, policy.logits.T, None, targets, 1.0, None, ids)
    return torch.where(policy.mask, log_probs.view(policy.tokens.shape), 0.0)


@certifies("float64")
@pytest.mark.parametrize("top_p, top_k, min_p", [
    (0.8, 0, 0.0), (1.0, 2, 0.0), (0.9, 3, 0.0), (1.0, 0, 0.5)])
@pytest.mark.parametrize("size", [0.0, 0.5])       # μ is π_old but for the cut, or far from it
def test_over_the_set_that_mu_kept_the_mean_ratio_is_one(size, top_p, top_k, min_p):
    """eq:sampling: over μ's sets E_μ[Πρ] = 1 and E_μ[Πρ Σg] = 0; without the sets neither is."""
    old = oracle.Policy(V=4, T=3)
    mu = old.perturbed(size=size)
    log_mu, mass = sampling_log_probs(mu.logits.detach(), top_k=top_k, top_p=top_p, min_p=min_p)
    kept = log_mu > -math.inf
    of_mu = torch.where(mu.mask, log_mu[mu.states, mu.tokens], 0.0)                      # [N, T]
    prob = of_mu.sum(-1).exp()                                                           # [N]
    drawn = prob > 0
    assert oracle.close(prob.sum(), 1.0) and not drawn.all()
    of_mu = of_mu[drawn]
    for sets in kept, None:
        log_prob = replayed(old, sets)[drawn]                                            # [N, T]
        weighted = (log_prob - of_mu).sum(-1).exp().detach() * prob[drawn]               # μ(y) Πρ
        drift = oracle.exact_gradient(old, weighted @ log_prob.sum(-1))
        if sets is None:
            assert weighted.sum() < 0.95 and drift.norm() > 0.01
        else:
            assert oracle.close(weighted.sum(), 1.0)
            assert oracle.close(drift, torch.zeros_like(drift))
        if size == 0:                  # token by token it is μ itself, or the mass is missing
            lost = mass[mu.states].log() if sets is None else 0 * mass[mu.states]
            missing = torch.where(mu.mask, lost, 0.0)
            assert oracle.close(log_prob - of_mu, missing[drawn])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_alone_has_fsdp_only_to_cast_or_to_move(dtype, offload, tiny_model):
    """test_capacity.py compares a run that has FSDP with one that has none, bit by bit."""
    with process_group() as device:
        policy = load_policy(str(tiny_model), 1.0, dtype, device, cpu_offload=offload)
        assert isinstance(policy, FSDPModule) == (dtype == "bfloat16" or offload)
        if isinstance(policy, FSDPModule):                      # sums over ranks are in float32
            how = policy._get_fsdp_state()._mp_policy
            assert how == MixedPrecisionPolicy(getattr(torch, dtype), torch.float32)
        reference = load_policy(str(tiny_model), 1.0, dtype, device, frozen=True,
                                gradient_checkpointing=True)
        assert reference.model.is_gradient_checkpointing        # the path that π_θ takes


@pytest.mark.parametrize("cut", [{}, dict(top_p=0.9), dict(top_p=0.9, top_k=8), dict(top_k=5)])
def test_engine_and_trainer_agree_before_and_after_a_sync(engine_name, cut, tiny_model):
    config = trainer.Config()
    config.rollout.temperature = 0.7
    prompts = [[3 + i, 5, 7][:1 + i % 3] for i in range(12)]
    with process_group() as device:
        policy = load_policy(str(tiny_model), 0.7, "float32", device)
        engine = make_engine(engine_name, str(tiny_model), dtype="float32", max_model_len=64,
                             device=device, batch_size=16, **cut)

        def gap(batch):
            return trainer.score(policy, batch, config) - batch.rollout_log_prob
        try:
            for seed in range(2):
                samples = engine.generate(prompts, list(range(12)), temperature=0.7, max_tokens=40,
                                          eos_ids=[1])
                batch = trainer.pad(prompts, samples, torch.zeros(12), device)
                mask = batch.response_mask
                assert mask.sum() > 100 and gap(batch)[mask].abs().max() < 1e-4
                if cut:                            # without the sets the mass is missing
                    missing = gap(batch._replace(kept_ids=None))[mask]
                    assert missing.max() < 1e-4 and missing.min() < -0.05
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.mul_(1.05)
                assert seed or gap(batch).abs().max() > 1e-2
                WeightSync(engine, 0, None).push(full_weights(policy))
        finally:
            engine.close()


def test_many_slices_in_16_bits_add_up_their_gradient_in_float32(monkeypatch):
    """1023 slices add −1/1024 each to hidden's gradient, and sums in bfloat16 would stop at −¼."""
    monkeypatch.setattr("three_policies.training.heads.CHUNK", 1)
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight[0] = 0
    TokenLogProbs.apply(hidden, weight, None, torch.tensor([[0]]), 1.0, None).sum().backward()
    assert hidden.grad.item() == -1.0                          # the bfloat16 nearest to −1023/1024


def test_no_rows_have_no_log_probs():
    hidden, weight = torch.ones(0, 4, requires_grad=True), torch.ones(7, 4, requires_grad=True)
    found = TokenLogProbs.apply(hidden, weight, None, torch.zeros(0, 2, dtype=torch.long), 1.0,
                                None)
    assert found.shape == (0, 2)
    found.sum().backward()
    assert hidden.grad.shape == (0, 4) and (weight.grad == 0).all()
