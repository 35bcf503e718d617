"""When an answer is right; questions of reasoning-gym, rewards of a user's own, prompts, ends.

The rule of training/answers.py is tested by its examples, by ways to write a number, and by lists.
"""

import math
import random
from pathlib import Path

import pytest
import torch

from three_policies.checks import UserError
from three_policies.training import answers, tasks
from three_policies.training.answers import final_answer, is_right
from three_policies.training.loading import judge_device
from three_policies.training.rewards import last_number, own_reward, try_out
from three_policies.training.remarks import remarks
from three_policies.training.settings import load_config


@pytest.mark.parametrize("text, answer", [
    ("40 + 2 = 42.\n#### 42", "42"), ("#### 1,234,567", "1234567"), ("#### $1,234.50", "1234.5"),
    ("#### 42.", "42"), (r"so \boxed{42}", "42"),
    (r"\boxed{1} and then \boxed{\frac{1}{2}}", "1/2"), ("42.00", "42"), ("#### 1\n#### 2", "2"),
    ("-0", "0"), ("#### 007", "7"), (r"\boxed{\$5}", "5"), ("1,2", "1,2"), ("", ""), ("####", ""),
    (r"\boxed{never closed", "never closed"), ("the answer is 42", "the answer is 42"),
    ("1e3", "1e3"), ("so … #### **1,234.50 km**.", "1234.5 km"), ("#### 42\nor 43", "42"),
    ("  a \n b ", "a b"), ("-", "-"), (".", ""), ("9" * 400, "9" * 400),
    (".5", "0.5"), ("-.50", "-0.5")])
def test_final_answers(text, answer):
    assert final_answer(text) == answer


FORTY_TWO = [
    "42", "+42", "042", "42.0", "42.", "42.00.", " 42 ", "**42**", "*42*", "__42__", "_42_", "`42`",
    "***42***", "___42___", "**42.**", "**42**.", "$42$", "$$42$$", r"\(42\)", r"\[ 42 \]",
    r"\boxed{42}", r"\text{42}",
    r"**$\boxed{42}$**.", "$42", r"\$42", r"$\$42$", "€ 42", "42 apples", "42 km/h", "42%", r"42\%",
    "42 %", "42 percent", "42kg", "42 m", "42\u202fkm", r"42\text{ cm}", r"42\,\text{cm}^2",
    "42 cm²", "42 square feet", "42 miles per hour", "42 kg/m^3", "$42 per week", "$42/week",
    "42°C", r"42^\circ", "42 €", "42 months", "42 seconds", "42 millimeters", "¥42", "$+42",
    "42 cm^{2}", "42pm", "42hrs", "42 sq ft", r"\mbox{42}", r"42\ \text{km}", "\n42",
    r"\textbf{42}", r"\mathrm{42}", r"\mathbf{42}", r"42\:km", r"42\;km", r"42^{\circ}", "£42",
    "42¢", "42 cubic feet", *(f"42{unit}" for unit in (
        "g", "mg", "mL", "l", "s", "h", "min", "ft", "in", "yd", "mi", "mph", "oz", "lb", "am"))]

NOT_FORTY_TWO = [
    "", "43", "-42", "−42", "4 2", "42 or 43", "41 or 42", "42, 43", "41, 42", "42 43", "42/43",
    "42 and a half", "42 thousand", "42 Million", "42 billion", "$42 million", "$42m", "42m people",
    "42k", "42 K", "42 hundred", "42 dozen", "42 grand", "42 halves", "42 thirds", "42 twentieths",
    "42 squared", "42²", "42^2", "42!", "42x", "42 x", "42i", "42 xy", r"42\pi", "42 pi",
    r"42\sqrt{2}", "42e0", "42:00", "42-43", "42..43", "42...", "..42", "~42", "≈42", "> 42",
    "(42)", "[42]", "{42}", "x=42", "x = 42", "42 = 43", "43 = 42", "42 men left", "42 forty",
    "42 forty-three", "forty-two", "42 or so", "42 to", "42 times", "42 plus tax", "$41$ or $42$",
    "**41** **42**", r"\(41\) \(42\)", r"\boxed{41} \boxed{42} 43", "42 km and 43", "4,2", "0,042",
    "42,000", "42\u202f000", "٤٢", "½", r"\text{42} or \text{43}", r"41\text{ or }42",
    r"\frac{42}{2}", r"41\frac{1}{42}", "- 42", "42 kings or queens", "$42 or $43", "42 % or 43",
    "42\u00a043", "42 km/h/s", "$42 apples", r"4\,2", "42 cm^4", "42 cm⁴",
    *(f"42 {word}" for word in (
        "thou", "mille", "tausend", "millones", "quadruple", "tenfold", "neg", "mod", "wrong",
        "incorrect", "false", "less", "more", "inverse", "log", "root", "doz", "lac", "myriad",
        "thirteen", "fourteen", "fifteen", "fives", "six", "seven", "eight", "nine", "eleven",
        "twelve", "twenty", "quarter", "zero", "tenths", "score", "gross", "lakh", "crore",
        "cubed", "factorial", "minus", "over", "under", "above", "below", "point", "mln",
        "tripled", "none", "nil", "fewer", "exp"))]


def test_ways_to_write_a_number_are_equal_and_no_other_is():
    assert [text for text in FORTY_TWO if not is_right(f"thus\n#### {text}", "42")] == []
    assert [text for text in NOT_FORTY_TWO if is_right(f"thus\n#### {text}", "42")] == []
    assert (is_right("#### 42", "#### **42**.") and is_right("#### 0", "-0.0")
            and is_right("#### \u22125", "-5"))
    assert not is_right("#### 5", "-5") and not is_right("42 is the answer", "42")


@pytest.mark.parametrize("response, answer, right", [
    ("42", "42 km", False), ("42 km", "42 km", True), ("42.0km", "042 km", True),
    ("42 m", "42 km", False), ("42", "42%", False), ("42%", "42%", True), ("0.42", "42%", False),
    ("42%", "0.42", False), ("3 kings", "3 queens", False), ("3 kings", "3 kings", True),
    ("3", "3 kings", False), ("Paris", "paris", False), ("**Paris**.", "Paris", True),
    ("(A)", "A", False), ("1/2", "2/4", False), ("0.5", "1/2", False),
    (r"\dfrac{1}{2}", r"\frac{1}{2}", True), (r"-\frac{1}{2}", "-1/2", True),
    (r"1\frac{1}{2}", "11/2", False), (r"\frac{1}{2}3", "1/23", False),
    (r"\boxed{\frac{1}{2}}", "1/2", True), (r"42\%", "42%", True),
    ("2\u202f345", "2345", True), (r"2\,345.60", "2345.6", True),
    ("2{,}345", "2345", True), ("2 345", "2345", False), ("0,345", "345", False),
    ("2,34", "234", False), ("12,3456", "123456", False), ("2,345\u202f678", "2345678", False),
    ("10:30", "10:45", False), ("3 to 5", "3", False), ("1,2", "12", False), ("$-5", "-5", True),
    ("-$5", "-5", True), (r"$-\$5$", "-5", True), ("-$-5", "5", False), ("-$-5", "-5", False),
    ("+-5", "-5", False), ("--5", "5", False), ("42 cents", "$42", False), ("42¢", "$42", False),
    ("42%", "$42", False), ("€42", "$42", False), ("$42", "$42", True), (r"\$42.00", "$42", True),
    ("42", "$42", True), ("$42", "$42$", True), ("€ 42", "€42", True),
    ("$42 per week", "$42", False), ("43 km", "42 km", False), ("$42", "€42", False),
    ("€\u00a042", "€42", True), ("1\u2007234", "1234", True), (r"2,\!345", "2345", True),
    (r"\tfrac{1}{2}", "1/2", True), (r"+\frac{1}{2}", "+1/2", True),
    (r"\$5 or so", "$5 or so", True), ("words", "", False)])
def test_units_texts_and_fractions(response, answer, right):
    assert is_right(f"#### {response}", f"#### {answer}") == right


def test_every_digit_counts():
    """Numbers that differ after 30 digits differ; Decimal's 28 digits took them for equal."""
    assert not is_right("1234567890123456789012345678901", "1234567890123456789012345678902")
    assert not is_right("0.1234567890123456789012345678901", "0.1234567890123456789012345678902")
    assert is_right("#### 1,234,567,890,123,456,789,012,345,678,901.50",
                    "1234567890123456789012345678901.5")


def test_numbers_and_marked_texts_have_300_characters_at_most():
    """A longer one is text as it stands, which its digits or its inside alone are not."""
    for n, right in ((300, True), (301, False)):
        assert is_right("0" + "9" * (n - 1), "9" * (n - 1)) is right
        assert is_right(f"**{'x' * (n - 4)}**", "x" * (n - 4)) is right


def test_a_number_is_right_however_it_is_written_and_any_other_is_wrong():
    rng = random.Random(0)
    for _ in range(300):
        number, other = (rng.choice([1, -1]) * rng.randrange(10 ** rng.randrange(1, 9))
                         / rng.choice([1, 100]) for _ in "ab")
        comma, narrow = (f"{number:,.2f}",
                         f"{number:,.2f}".replace(",", "\u202f").replace("-", "\u2212"))
        marked = rng.choice(
            ["**{}**", "${}$", r"\({}\)", "`{}`.", "{} apples", r"\boxed{{{}}}", "{}"])
        for written in comma, narrow, f"{number:.4f}", f"{number:012.2f}":
            text = f"#### {marked.format(written)}"
            assert is_right(text, f"{number:.2f}"), text
            assert is_right(text, f"{other:.2f}") == (number == other), (text, other)


def test_no_list_of_answers_is_right():
    """Two different answers, joined and marked in any way, are neither of the two.

    Only what is stated last counts.
    """
    joints = [" or ", ", ", " ", "/", " and ", "; ", " = ", "\u00a0", r" \lor ", "-", "**, **",
              "$ $", r"\) \(", " apples "]
    rng = random.Random(1)
    for _ in range(2000):
        numbers = rng.sample(range(60), rng.randrange(2, 4))
        marked = rng.choice(["{}", "**{}**", "${}$", r"\({}\)", r"\boxed{{{}}}", "{} apples",
                             "`{}`", "_{}_"])
        text = rng.choice([marked.format(rng.choice(joints).join(map(str, numbers))),
                           rng.choice(joints).join(marked.format(n) for n in numbers)])
        text = (text if text.startswith(r"\boxed") and rng.random() < 0.5
                and text.count("boxed") == 1 else f"#### {text}")
        assert not any(is_right(text, str(n)) for n in numbers), (text, numbers)


def test_the_examples_of_the_rule():
    """The examples of training/answers.py's docstring are equal, or not, as it says."""
    rule = " ".join(answers.__doc__.split())
    for text in ("42 apples", "42 km/h", "42%", r"42\text{ cm}^2", "42 square feet",
                 "$42 per week"):
        assert text in rule and is_right(text, "42")
    for text in ("42 thousand", "42 or 43", "42 and a half", "$41$ or $42$"):
        assert text in rule and not is_right(text, "42")
    for word in ("mil", "bln", "trn", "doubled", "twice", "negative", "divided", "not"):
        assert not is_right(f"42 {word}", "42"), word
    assert (not is_right("3 kings", "3 queens") and is_right(r"\frac{1}{2}", "1/2")
            and not is_right("1e3", "1000"))


def test_an_answer_of_any_length_and_kind_is_compared():
    """Any text can be compared without an error, and equals the answer that it states."""
    parts = ["**", "*", "_", "$", "`", r"\(", r"\)", r"\boxed{", "{", "}", "42", "1,234", "\u202f",
             " ", "km", "/", "per", "^2", r"\text{", r"\frac{", "####", ".", "-", "\ud800", "\0",
             "\n"]
    rng = random.Random(2)
    for _ in range(2000):
        text = ("".join(rng.choice(parts) for _ in range(rng.randrange(90)))
                * rng.choice([1, 1, 1, 50]))
        assert is_right(text, text)


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


def test_held_out_questions_of_a_small_family_are_like_the_others(gym):
    """Sums of one digit are drawn first, and most are among the first of 900 questions."""
    task = gym("task.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}",
               "task.questions=900", "task.eval_size=100")
    short = [sum(len(p.question) == min(len(q.question) for q in task.train) for p in part)
             for part in (task.held_out, task.train)]
    # Of n held out among N, a share p is short: a hypergeometric count, here within 5 sigmas.
    n, N = 100, 900
    p = sum(short) / N
    assert sum(short) > 30
    assert abs(short[0] - n * p) < 5 * math.sqrt(n * p * (1 - p) * (N - n) / (N - 1))


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


def test_16_bits_on_a_cpu_are_named_with_their_file(tmp_path):
    given, cpu = own_rows(tmp_path), torch.device("cpu")
    [said] = judge_device(load_config(given), cpu)
    assert said.startswith("policy.dtype=bfloat16 rounds") and "configs/gsm8k.yaml" in said
    assert judge_device(load_config(given), torch.device("cuda")) == []
    assert judge_device(load_config([*given, "policy.dtype=float32"]), cpu) == []


def test_a_configuration_of_ones_own_model_is_not_packed_unasked(tmp_path):
    """Not every model can be, and the user has not written it."""
    policy = load_config(own_rows(tmp_path)).policy
    assert not policy.packed and policy.gradient_checkpointing


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
