"""The studies' tasks: a grammar judges brackets, and a wrong lesson is wrong at one place."""

import functools
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from three_policies import trainer
from three_policies.checks import UserError
from three_policies.studies import study
from three_policies.training import demo, tasks
from three_policies.training.settings import TaskConfig, load_config


# ----------------------------------------------------------------------------------------- brackets

@functools.cache
def words(length, depth):
    """Return all words, by the grammar: a word is empty or ( word of smaller depth ) word."""
    if length == 0:
        return {""}
    if depth == 0:
        return set()
    return {f"({inner}){rest}" for n in range(0, length, 2) for inner in words(n, depth - 1)
            for rest in words(length - 2 - n, depth)}


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_the_checker_is_the_grammar(depth):
    for length in range(0, 13, 2):
        strings = {"".join(x) for x in itertools.product("()", repeat=length)}
        assert {x for x in strings if tasks.balanced(x, depth)} == words(length, depth)
    assert len(words(8, 3)) == 13                         # as many as oracle/words.py enumerates
    assert not any(tasks.balanced(x, depth) for x in ("(", "(()", "()x", "()>", "( )"))


@pytest.mark.parametrize("start", ["", "(", "((", "()(("])
def test_a_beginning_goes_on_in_every_way_that_is_right_and_in_no_other(start):
    rng, length = random.Random(0), 8 + start.count("(") - start.count(")")
    drawn = {start + tasks.completion(start, length, 3, rng) for _ in range(3000)}
    assert drawn == {word for word in words(len(start) + length, 3) if word.startswith(start)}


def test_the_reward_of_brackets_is_the_checker_on_the_whole_word():
    task = tasks.make_task(TaskConfig(kind="dyck", length=6, depth=3, eval_size=50), seed=1)
    asked = [p.question for p in (*task.train, *task.held_out)]
    # 1597 is the 17th number of Fibonacci.
    assert len(set(asked)) == len(asked) == 1597 and len(task.held_out) == 50
    assert all(task.reward(p, p.answer) == 1 for p in (*task.train, *task.held_out))
    for problem in task.held_out[:5]:
        for end in map("".join, itertools.product("()", repeat=6)):
            assert task.reward(problem, end) == ((problem.question[:-1] + end) in words(22, 3))
        assert not any(task.reward(problem, problem.answer + more) for more in ("()", ">", ")"))
        assert task.reward(problem, "") == 0


def test_a_wrong_lesson_has_one_wrong_digit():
    rng = random.Random(0)
    for answer in ["7", "99", "120"] * 50:
        wrong = demo.corrupt(answer, rng)
        assert [a != b for a, b in zip(wrong, answer, strict=True)].count(True) == 1


def test_a_wrong_lesson_has_one_forced_bracket_wrong():
    task, rng = (tasks.make_task(TaskConfig(kind="dyck", length=12, eval_size=50), seed=1),
                 random.Random(2))
    for problem in task.train[:200]:
        word, right = problem.question[:-1], demo.lesson(task, problem, False, rng)
        wrong = demo.unbalance(word, right, 3, rng)
        [at] = [i for i in range(12) if wrong[i] != right[i]]
        assert len(tasks.next_brackets(word + right[:at], 12 - at, 3)) == 1
        assert (task.reward(problem, right) == 1
                and task.reward(problem, demo.lesson(task, problem, True, rng)) == 0)
    lessons = [demo.lesson(task, task.train[0], False, rng) for _ in range(50)]
    assert len(set(lessons)) > 10                      # not the one that the problem came with


@pytest.mark.parametrize("given, said", [
    (["task.length=63", "rollout.max_tokens=65"],
     "task.length must be even, as brackets come in pairs, not 63"),
    (["task.length=64"],
     "rollout.max_tokens must be at least 65, for the brackets of task.length and the end token, "
     "not 10"),
    (["task.length=64", "rollout.max_tokens=64"],
     "rollout.max_tokens must be at least 65, for the brackets of task.length and the end token, "
     "not 64"),
    (["task.depth=1", "rollout.max_tokens=65"], "task.depth must be 2 to 9, not 1")])
def test_brackets_that_cannot_be_asked_for_are_one_sentence(given, said):
    with pytest.raises(UserError) as found:
        load_config(["task.kind=dyck", *given])
    assert str(found.value) == said


@pytest.fixture(scope="module")
def untaught(tmp_path_factory):
    """Return a directory with a model that knows brackets and no rules.

    Of two brackets it is right now and then.
    """
    directory, tokenizer = tmp_path_factory.mktemp("untaught"), demo.character_tokenizer("()>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
            tie_word_embeddings=True, initializer_range=0.1, dtype="float32", bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def brackets(untaught, tmp_path, monkeypatch):
    """brackets(NAME, "key=value" …) trains it, and returns its answers to held-out beginnings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "evaluate", trainer.evaluate)       # put back after the test

    def call(name, *overrides):
        assert trainer.main([
            "task.kind=dyck", "task.length=2", "task.depth=4", "task.eval_size=64", "train.steps=1",
            "rollout.prompts=4", "rollout.samples=2", "rollout.max_tokens=3",
            "train.mini_batches=1", f"policy.path={untaught}", f"run={name}", *overrides]) == 0
        return [json.loads(line)
                for line in Path(f"runs/{name}/eval.jsonl").read_text().splitlines()]
    return call


def is_right(answer):
    word = answer["question"][:-1] + answer["response"]
    return len(answer["response"]) == 2 and set(word) <= set("()") and word in words(len(word), 4)


@pytest.mark.made_here
def test_brackets_are_answered_and_checked(brackets):
    answers = brackets("x", "rollout.engine=transformers", "task.eval_size=700")
    assert ([a["reward"] for a in answers] == [is_right(a) for a in answers]
            and any(map(is_right, answers)))


def test_brackets_with_vllm(brackets, vllm_required):
    answers = brackets("v", "rollout.engine=vllm", "task.eval_size=700")
    assert ([a["reward"] for a in answers] == [is_right(a) for a in answers]
            and any(map(is_right, answers)))


@pytest.mark.made_here
def test_one_evaluator_judges_all_arms_in_float32(brackets):
    exact, coarse = (["rollout.engine=transformers", "train.lr=0"],
                     ["rollout.dtype=bfloat16", "task.eval_size=512"])
    as_it_is = brackets("full", *exact, "task.eval_size=512")
    assert brackets("half", *exact, *coarse) != as_it_is            # bfloat16 does answer otherwise
    trainer.evaluate = study.in_float32(trainer.evaluate)
    assert brackets("judged", *exact, *coarse) == as_it_is
