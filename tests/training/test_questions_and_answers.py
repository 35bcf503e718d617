"""Questions of reasoning-gym, rewards of a user's own, prompts as templates, the end of a line."""

import math
from pathlib import Path

import pytest

from three_policies.checks import UserError
from three_policies.training import tasks
from three_policies.training.rewards import last_number, own_reward, try_out
from three_policies.training.remarks import remarks
from three_policies.training.settings import load_config

GYM = ["task.kind=reasoning_gym", "task.name=chain_sum", "task.questions=40", "policy.path=x",
       "task.options={min_terms: 2, max_terms: 2}"]


# ------------------------------------------------------------------------------ reasoning-gym

@pytest.fixture
def gym(real_required):
    return lambda *given, seed=0: tasks.make_task(load_config([*GYM, *given]).task, seed)


def test_questions_are_seeded_disjoint_and_scored_by_their_family(gym):
    task, again, other = gym(), gym(), gym(seed=1)
    assert task.digest == again.digest != other.digest
    assert (len(task.train), len(task.held_out)) == (36, 4)
    asked = [p.question for p in task.train + task.held_out]
    assert len(set(asked)) == 40
    first = task.train[0]
    assert task.reward(first, first.answer) == task.reward(first, f" {first.answer}\n") == 1
    assert task.reward(first, "so it is x") < 1


@pytest.mark.parametrize("match, right", [("strict", False), ("last_number", True)])
def test_a_familys_scorer_gets_what_the_match_takes(match, right, gym):
    task = gym(f"task.match={match}")
    first = task.train[0]
    assert (task.reward(first, f"of 7 and 8 it is {first.answer}.") == 1) == right


def test_white_space_around_an_answer_is_no_mistake(gym):
    """The scorer of basic_arithmetic pays half for " 12" and the end of the line behind it."""
    task = gym("task.name=basic_arithmetic")
    assert task.reward(task.train[0], f" {task.train[0].answer}\n") == 1


def test_a_prompt_may_have_any_part_of_a_question(gym):
    task = gym()
    first = task.train[0]
    text = tasks.prompt_of(task, first, "1 + 1 = 2\n{expression} = {x}")
    assert text == f"1 + 1 = 2\n{task.metadata[first.question]['expression']} = {{x}}"
    assert tasks.prompt_of(task, first, "{question}") == first.question
    with pytest.raises(UserError, match=r"task.prompt='a' must have one of \{question\}, "):
        tasks.prompt_of(task, first, "a")


@pytest.mark.parametrize("given, said", [
    (["task.name=chain_sun"], "task.name cannot be 'chain_sun'; did you mean 'chain_sum'"),
    (["task.options={min_term: 2}"],
     "task.options.min_term is not an option of chain_sum; did you mean 'min_terms'"),
    (["task.options={min_terms: -2}"], "do not suit chain_sum: min_terms must be positive"),
    (["task.eval_size=40"], "task.eval_size=40 leaves none of the 40 questions of chain_sum")])
def test_what_reasoning_gym_does_not_know_is_one_sentence(given, said, gym):
    with pytest.raises(UserError) as found:
        gym(*given)
    assert said in str(found.value)


def test_a_small_family_says_how_many_questions_it_has(gym):
    task = gym("task.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
               "task.questions=999")
    assert len(task.train) + len(task.held_out) < 999
    assert "different questions with these options" in task.remarks[0]


@pytest.mark.parametrize("given", [["task.kind=reasoning_gym"], ["task.name=chain_sum"]])
def test_a_name_belongs_to_reasoning_gym_alone(given):
    with pytest.raises(UserError, match="^task.name must be a family of reasoning_gym's"):
        load_config(given)


def test_without_the_library_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="needs reasoning-gym: pip install reasoning-gym"):
        tasks.make_task(load_config(GYM).task, 0)


# ------------------------------------------------------------------------------------ what is right

@pytest.mark.parametrize("response, number", [
    ("17 + 25 = 42.", "42"), ("It is 1,234.50 km", "1,234.50"), ("-3", "-3"),
    ("a 7, then 8,", "8"), ("none", ""), ("½", ""), (".5", ".5"), ("42 apples and 3", "3")])
def test_the_last_number_of_a_response(response, number):
    assert last_number(response) == number


def own_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "17+25", "answer": "42"}\n'
                                         '{"question": "1+1", "answer": "2"}\n')
    return ["task.kind=jsonl", f"task.path={tmp_path / 'rows.jsonl'}", "policy.path=x"]


@pytest.mark.parametrize("match, right", [("strict", 0), ("last_number", 1)])
def test_two_conventions_of_what_an_answer_is(match, right, tmp_path):
    config = load_config([*own_rows(tmp_path), f"task.match={match}"])
    task = tasks.make_task(config.task, 0)
    problem = task.train[0]
    assert task.reward(problem, f"17 + 25 = {problem.answer}.") == right
    assert task.reward(problem, problem.answer) == 1 and task.reward(problem, "so 7") == 0


# -------------------------------------------------------------------------- a reward of one's own

def reward_of(text: str, name: str = "score") -> str:
    Path("reward.py").write_text(text)
    return f"reward.py:{name}"


def test_a_reward_of_ones_own_scores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = reward_of("def score(question, answer, response):\n    return len(response) / 4\n")
    config = load_config([*own_rows(tmp_path), f"task.reward={named}"])
    task = tasks.make_task(config.task, 0)
    assert task.reward(task.train[0], "abc") == 0.75
    assert try_out(named, task.score, task.train[0], 10, math.inf) == [
        f"task.reward=reward.py:score gives {len(task.train[0].answer) / 4:g} for the first "
        "question's answer and 0 for an empty response"]
    with pytest.raises(UserError, match="a response, and a step has 10: that is more than rollout"):
        try_out(named, task.score, task.train[0], 10, 0.0)


def test_a_reward_that_tells_nothing_apart_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = reward_of("score = lambda question, answer, response: 1\n")
    task = tasks.make_task(load_config([*own_rows(tmp_path), f"task.reward={named}"]).task, 0)
    assert try_out(named, task.score, task.train[0], 1, math.inf)[0].endswith(
        "it cannot tell them apart")


@pytest.mark.parametrize("text, name, said", [
    ("def score(*x): return 1 / 0", "score", "raises ZeroDivisionError: division by zero (the"),
    ("def score(*x): return float('nan')", "score", "returns nan for the question 'q'"),
    ("def score(*x): return 'x'", "score", "raises ValueError: could not convert string"),
    ("def score(x): return 1", "score", "raises TypeError: score() takes 1 positional argument"),
    ("def score(*x): return 1", "scor", "has no function scor; did you mean 'score'"),
    ("import nothing_of_this_name", "score", "reward.py raises ModuleNotFoundError: No module")])
def test_a_reward_that_fails_is_one_sentence(text, name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as found:
        own_reward(reward_of(text, name))("q", "1", "1")
    assert said in str(found.value) and str(found.value).startswith(f"task.reward=reward.py:{name}")


@pytest.mark.parametrize("named, said", [
    ("reward.py", "must be FILE.py:FUNCTION"), ("reward:score", "must be FILE.py:FUNCTION"),
    ("nowhere.py:score", "nowhere.py is not a file"), (":score", "must be FILE.py:FUNCTION")])
def test_a_reward_that_is_not_there_is_one_sentence(named, said):
    with pytest.raises(UserError, match=said):
        own_reward(named)


# -------------------------------------------------------------------------------- in the trainer

def test_a_run_shows_its_prompt_and_its_response_once(run, capsys):
    assert run("train.steps=2")[0] == 0
    said = capsys.readouterr().err
    assert said.count("the first prompt: '") == said.count("the first response: '") == 1


def test_a_text_that_ends_a_response_is_one_token(run, capsys):
    assert run("rollout.stop=7", "rollout.max_tokens=9")[0] == 0
    assert run("rollout.stop=17", name="y")[0] == 2
    assert "rollout.stop='17' must be one token, and policy.path=" in capsys.readouterr().err


def test_a_response_ends_with_the_text_that_stops_it(run):
    """The answers are digits, and each response that has a 1 ends there."""
    lines = run("rollout.stop=1", "train.steps=1", "rollout.max_tokens=9")[1]
    free = run("train.steps=1", "rollout.max_tokens=9", name="y")[1]
    assert lines[0]["response/length_mean"] < free[0]["response/length_mean"]


def test_a_template_that_is_asked_for_must_be_there(run, capsys):
    assert run("task.chat_template=true")[0] == 2
    assert "task.chat_template=true, and policy.path=" in capsys.readouterr().err


def test_gsm8ks_instruction_is_named_when_a_user_has_not_written_it(tmp_path):
    given = own_rows(tmp_path)
    [said] = [x for x in remarks(load_config(given)) if "instruction" in x]
    assert said.startswith("task.instruction is that of configs/gsm8k.yaml, and ends every ques")
    assert not any("instruction" in x
                   for x in remarks(load_config([*given, "task.instruction=Think."])))


def test_rewards_of_0_with_right_last_numbers_are_named(monkeypatch, tmp_path):
    """A model that writes "17 + 25 = 42." had reward 0, and nothing said why."""
    from three_policies.training import record
    run, said = object.__new__(record.Record), []
    run.config, run.spoken_of = load_config(own_rows(tmp_path)), set()
    monkeypatch.setattr(record, "say", said.append)
    problems = [tasks.Problem("17+25", "42", "row 1")] * 4
    run.judge_match(problems, ["no", "no", "no", "= 42."], [0.0] * 4)
    assert said == []
    for _ in range(2):
        run.judge_match(problems, ["no", "no", "= 42.", "= 42."], [0.0] * 4)
    assert said == ["* of 4 responses 0 have reward 1, and 2 have the right last number: "
                    "task.match=last_number takes it"]
