"""Questions come from files: what is held out, and which rows cannot be used."""

import gzip
import hashlib
import json
import os
import random
import sys
import typing
import unicodedata
from dataclasses import replace
from decimal import Decimal

import pytest
import transformers

from three_policies.checks import UserError
from three_policies.tests.support.launching import shell
from three_policies.tests.support.small import OWN
from three_policies.training import tasks
from three_policies.training.faults import process_group
from three_policies.training.loading import encode, token_ids
from three_policies.training.settings import TEXT_KINDS, TaskConfig, load_config

ROWS = [{"question": f"{a}+{b}=", "answer": f"{a} and {b} are {a + b}.\n#### {a + b}"}
        for a in range(4) for b in range(6)]


@pytest.fixture
def file(tmp_path):
    """file(NAME, rows) writes rows, or lines as they are, and returns the path."""
    def write(name, rows):
        (tmp_path / name).write_text("\n".join(
            row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(tmp_path / name)
    return write


def task_of(path, eval_path=None, **settings):
    return tasks.make_task(
        TaskConfig(kind="jsonl", path=path, eval_path=eval_path, **settings), seed=0)


def asked(problems):
    return [p.question for p in problems]


MADE = [kind for kind in typing.get_args(typing.get_type_hints(TaskConfig)["kind"])
        if kind not in TEXT_KINDS]
DIGESTS = {"arithmetic": "ef8c47f36c6ad7083de303e58a96460e6e0994b0d83d53f13ae30b4bf992f33d",
           "sort": "91d2c1fad817591446d3e05362feea88e9a7666d5a7c95f1604f2922e9d44bb1",
           "dyck": "1bfbb146938164b4d9d50816c8583c652a115ff1e1bcafb85cc46c87a36aca34"}


@pytest.mark.parametrize("kind", MADE)
def test_the_demos_problems_are_those_of_the_recorded_runs(kind):
    """The demo's problems are the same as when the README's and the studies' numbers were made.

    A demo model is named after them.
    """
    config = load_config([f"task.kind={kind}", "rollout.max_tokens=65"])
    assert hashlib.sha256(repr(tasks.make_task(config.task, 0)).encode()
                          ).hexdigest() == DIGESTS[kind]


# ------------------------------------------------------------------------------- which are held out

@pytest.mark.parametrize("rows, given, held_out", [
    (2, None, 1), (9, None, 1), (24, None, 2), (24, 5, 5), (24, 23, 23), (20_000, None, 1024)])
def test_an_eval_size_that_was_not_given_leaves_a_small_file_enough_to_train_on(
        rows, given, held_out, file):
    path = file("rows", ({"question": f"{i}?", "answer": i} for i in range(rows)))
    task = task_of(path, eval_size=given)
    assert ((len(task.train), len(task.held_out)) == (rows - held_out, held_out)
            and task.remarks == [])
    assert sorted(asked(task.train + task.held_out)) == sorted(f"{i}?" for i in range(rows))
    assert not set(asked(task.train)) & set(asked(task.held_out))


def test_an_eval_size_that_is_too_large_is_one_sentence(file):
    path = file("rows", ROWS)
    with pytest.raises(UserError, match="^to hold out 24 of the 24 different questions of .*rows "
                                        "leaves none to train on: set task.eval_path, or a smaller "
                                        "task.eval_size$"):
        task_of(path, eval_size=24)
    # These 3 are all that the second file has.
    assert len(task_of(path, path_of_others(file), eval_size=24).held_out) == 3


def test_half_of_the_problems_is_held_out_at_most_and_it_is_said():
    for given, said in ((50, []), (51, ["task.eval_size=51 becomes 50, half of this task's "
                                        "problems"]), (None, [])):
        task = tasks.make_task(TaskConfig(size=1, eval_size=given), seed=0)
        assert (len(task.train), len(task.held_out), task.remarks) == (50, 50, said)


def test_what_a_file_holds_out_is_drawn_from_the_seed(file):
    given = TaskConfig(kind="jsonl", path=file("rows", ROWS), eval_size=5)
    one, again, other = (asked(tasks.make_task(given, seed).held_out) for seed in (0, 0, 1))
    assert one == again and one != other


def test_of_a_second_file_as_many_are_held_out_as_where_none_is_given(file, monkeypatch):
    monkeypatch.setattr(tasks, "EVAL_SIZE", 2)
    assert len(task_of(file("rows", ROWS), path_of_others(file)).held_out) == 2


def test_where_one_question_is_too_many_no_smaller_number_is_advised(file):
    with pytest.raises(UserError, match="leaves none to train on: set task.eval_path$"):
        task_of(file("rows", ROWS[:1]))


def path_of_others(file):
    return file("others", [{"question": f"{i}-1=", "answer": i - 1} for i in range(3)])


def test_a_question_is_dealt_once_however_often_the_file_has_it(file):
    """A repeated question has one row, so no held-out question is trained on.

    White space makes no other question, and the first row counts.
    """
    again = [{**row, "question": f"\t{row['question']} \n"} for row in ROWS[:8]]
    other = [{"question": row["question"], "answer": "so\n#### 99"} for row in ROWS[:3]]
    same = [{"question": row["question"], "answer": row["answer"].split("####")[1]}
            for row in ROWS[3:5]]
    once, path = (task_of(file("once", ROWS), eval_size=5),
                  file("rows", [*ROWS, *again, *other, *same]))
    task = task_of(path, eval_size=5)
    assert task.remarks == [
        f"13 of 37 rows of {path} repeat the question of an earlier row and are left out "
        "(3 with another answer than that row)"]
    assert ([p[:2] for p in task.train + task.held_out]
            == [p[:2] for p in once.train + once.held_out])
    assert task.digest == once.digest
    with pytest.raises(UserError, match="^to hold out 20 of the 1 different questions"):
        task_of(file("same", [ROWS[0]] * 200), eval_size=20)


def test_what_a_second_file_asks_is_not_trained_on(file):
    path, held_out = file("rows", ROWS), file(
        "held", [{"question": f" {row['question']}", "answer": "1"} for row in ROWS[5:8]])
    task = task_of(path, held_out, eval_size=1)
    assert (asked(task.train) == asked(map(as_problem, ROWS[:5] + ROWS[8:]))
            and asked(task.held_out) == [" 0+5="])
    assert task.remarks == [
        f"3 of 24 questions of {path} are in {held_out} too and are not trained on"]
    for same in (path, file("copy", reversed(ROWS)),
                 file("more", [*ROWS, {"question": "5+5=", "answer": 10}])):
        with pytest.raises(UserError) as found:
            task_of(path, same)
        assert str(found.value) == (
            f"every question of task.path={path} is in task.eval_path={same} too, and held out: "
            "nothing is left to train on")


def test_a_question_that_is_written_with_other_code_points_is_the_same(file):
    """é is one character, or an e and an accent."""
    rows = [{"question": f"café {i}?", "answer": i} for i in range(9)]
    other = [{**row, "question": unicodedata.normalize("NFD", row["question"])} for row in rows[:4]]
    task = task_of(file("rows", rows), file("held", other))
    assert other[0]["question"] != rows[0]["question"]
    assert asked(task.train) == asked(map(as_problem, rows[4:]))


def as_problem(row):
    return tasks.Problem(row["question"], row["answer"], "")


def test_the_digest_is_of_all_questions_and_answers_in_their_order(file, forks, tmp_path):
    path = file("rows", ROWS)
    task, text = task_of(path), f"TaskConfig(kind='jsonl', path={path!r})"
    (tmp_path / "digest.py").write_text("from three_policies.training.tasks import *\n"
                                        f"print(make_task({text}, 0).digest, hash('a string'))")
    result = shell([sys.executable, *forks, "digest.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    digest, other = result.stdout.split()              # of a process that hashes strings otherwise
    assert digest == task.digest
    assert int(other) != hash("a string") or "PYTHONHASHSEED" in os.environ
    assert len(task.digest) == 64 and int(task.digest, 16)
    first, *rest = task.train
    others = [
        replace(task, train=[*rest, first]), replace(task, train=rest), replace(task, held_out=[]),
        replace(task, train=[first._replace(answer=first.answer + " "), *rest]),
        replace(task, train=[
            first._replace(question=first.question + first.answer, answer=""), *rest]),
        replace(task, train=task.train[:-1], held_out=[task.train[-1], *task.held_out])]
    assert len({task.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert replace(task, remarks=["x"]).digest == task.digest
    assert replace(task, train=[
        p._replace(where="elsewhere") for p in task.train]).digest == task.digest


# ------------------------------------------------------------------------ which rows cannot be used

BAD = [("nope", "is not JSON: 'nope'"), ('{"question": "1+1=", ', "is not JSON"),
       ("[" * 9999, "is not JSON"), ('["1+1=", "2"]', "has no `question`"),
       ('{"question": "1+1="}', "has no `answer`"),
       ('{"question": ["1+1="], "answer": "2"}', "has ['1+1='] for its `question`"),
       ('{"question": "a", "answer": true}', "has True for its `answer`, which is neither"),
       ('{"question": " ", "answer": "2"}', "has no `question`"),
       ('{"question": "a", "answer": null}', "has no `answer`"),
       ('{"question": "1+1=", "answer": "so\\n#### "}',
        "has an `answer` that ends in nothing: 'so\\n#### '"),
       ('{"question": "a", "answer": NaN}', "has nan for its `answer`, which is no number"),
       ('{"question": "a", "answer": Infinity}', "has inf for its `answer`"),
       ('{"question": "a", "answer": -1e999}', "has -inf for its `answer`"),
       ('{"question": NaN, "answer": 1}', "has nan for its `question`"),
       ('{"question": "\\ud800", "answer": "1"}', "has half of a surrogate pair in its `question`"),
       ('{"question": "a", "answer": "\\udfff"}', "has half of a surrogate pair in its `answer`")]


@pytest.mark.parametrize("line, said", BAD)
def test_a_bad_row_is_named_or_left_out(line, said, file):
    path = file("rows", [*ROWS[:2], line, *ROWS[2:]])
    with pytest.raises(UserError) as found:
        task_of(path)
    assert str(found.value).startswith(f"1 of 25 rows cannot be used: {path}, line 3 {said}")
    assert str(found.value).endswith(" (task.on_bad_row=skip leaves them out)")
    task = task_of(path, on_bad_row="skip")
    assert task.digest == task_of(file("good", ROWS)).digest
    [remark] = task.remarks
    assert remark.startswith(
        f"1 of 25 rows cannot be used and are left out, the first: {path}, line 3 {said}")


def test_of_ten_bad_rows_none_is_left_unnamed():
    with pytest.raises(UserError, match=r"^10 of 12 rows cannot be used: (x; ){9}x \(task"):
        tasks.leave_out(["x"] * 10, 2, "raise")


def test_all_bad_rows_of_both_files_are_counted_and_ten_named(file):
    lines = [line for line, _ in BAD]
    path, held_out = file("rows", [*ROWS, *lines]), file("held", [*lines[:4], *ROWS[:1]])
    with pytest.raises(UserError) as found:
        task_of(path, held_out)
    said = str(found.value)
    assert (said.startswith("20 of 45 rows cannot be used: ")
            and "; and 10 more (task.on_bad_row=skip" in said)
    assert ([said.count(f"{path}, line {i} ") for i in range(25, 41)] == [1] * 10 + [0] * 6
            and held_out not in said)
    assert task_of(path, held_out, on_bad_row="skip").remarks[0].startswith(
        "20 of 45 rows cannot be used and are left out")


@pytest.mark.parametrize("lines, said", [
    ([], "rows has no rows"),
    (["nope"] * 3, "no row of .*rows can be used, the first: .*rows, line 1 is not JSON: 'nope'$")])
def test_a_file_without_a_row_that_can_be_used_is_one_sentence(lines, said, file):
    with pytest.raises(UserError, match=said):
        task_of(file("rows", lines), on_bad_row="skip")


def test_numbers_stay_as_they_are_written(file):
    """The number 0.00001 stays 0.00001; repr would make it 1e-05, which no response gives."""
    rows = [{"question": f"{i}", "answer": x}
            for i, x in enumerate((7, 2.50, 0.00001, -1e22, "7 kg"))]
    task = task_of(file("rows", rows), eval_size=1)
    assert {p.question: p.answer for p in task.train + task.held_out} == dict(zip(
        "01234", ("7", "2.5", "0.00001", "-10000000000000000000000", "7 kg")))


@pytest.fixture
def encoding(tiny_model):
    """encoding(**settings of the task) returns what `encode` takes besides a task."""
    def made(**settings):
        config = load_config([*OWN, "rollout.max_tokens=5"])
        config.task = replace(config.task, instruction="", **settings)
        model = transformers.AutoConfig.from_pretrained(tiny_model)
        return (config, transformers.AutoTokenizer.from_pretrained(tiny_model),
                model.max_position_embeddings)
    with process_group():
        yield made


def test_prompts_that_do_not_fit_are_named_or_left_out_with_their_problems(file, encoding):
    long = [{"question": "1+" * 300 + str(i), "answer": 1} for i in range(13)]
    path = file("rows", [*ROWS[:3], *long, *ROWS[3:]])
    task = task_of(path, eval_size=10)
    config, tokenizer, context = encoding()
    with pytest.raises(UserError) as found:
        encode(config, task, tokenizer, context)
    assert (str(found.value).startswith("13 of 37 rows cannot be used: ")
            and str(found.value).count(" is a prompt of 60") == 10)
    assert str(found.value).endswith(
        "; and 3 more: a prompt may have 1 to 507, which rollout.max_tokens=5 leaves of the "
        "model's context of 512 (task.on_bad_row=skip leaves them out)")
    config, *_ = encoding(on_bad_row="skip")
    own, prompts, held_out = encode(config, task, tokenizer, context)
    assert 0 < len(own.held_out) < 10 and len(own.train) + len(own.held_out) == 24
    for problems, ids in ((own.train, prompts), (own.held_out, held_out)):
        assert ids == [tokenizer(p.question).input_ids for p in problems]
    left = set(own.train + own.held_out)
    assert (own.train, own.held_out) == tuple(
        [p for p in part if p in left] for part in (task.train, task.held_out))
    assert (own.digest == replace(task, train=own.train, held_out=own.held_out).digest
            != task.digest)
    assert sorted(own.order(0, 0, len(prompts))) == list(range(len(prompts)))
    [remark] = own.remarks
    assert ("13 of 37 rows cannot be used and are left out, the first: " in remark
            and " is a prompt of 60" in remark)


def test_a_context_without_room_and_a_part_without_a_prompt_are_one_sentence(file, encoding):
    long = [{"question": "1+" * 300 + str(i), "answer": 1} for i in range(2)]
    config, tokenizer, context = encoding(on_bad_row="skip")
    for path, others, left in ((file("a", long), file("b", ROWS), "train on"),
                               (file("c", ROWS), file("d", long), "hold out")):
        task = task_of(path, others)
        with pytest.raises(
                UserError, match=f"^nothing is left to {left}: 2 of 26 rows cannot be used"):
            encode(config, task, tokenizer, context)
    config.rollout.max_tokens = 512
    with pytest.raises(UserError, match="^rollout.max_tokens=512 leaves no room for a prompt: "
                                        "the model's context has 512"):
        encode(config, task, tokenizer, context)


def test_a_question_is_given_as_it_is(file, encoding):
    """White space at its end stays, with and without an instruction."""
    rows = [{"question": f"{i}+1=  ", "answer": i + 1} for i in range(4)]
    task, (config, tokenizer, context) = task_of(file("rows", rows)), encoding()
    for instruction, after in (("", "  "), ("7", "   7")):
        config.task.instruction = instruction
        own, prompts, _ = encode(config, task, tokenizer, context)
        question = own.train[0].question
        assert question.endswith("=  ")
        assert prompts[0] == tokenizer(question.rstrip() + after).input_ids


CHAT = ("{% for m in messages %}({{ m['content'] }}){% endfor %}"
        "{% if add_generation_prompt %}={% endif %}")


@pytest.mark.parametrize("chat", [None, CHAT])
def test_a_thousand_texts_at_a_time_have_the_ids_of_each(chat, encoding):
    config, tokenizer, _ = encoding()
    tokenizer.chat_template = chat
    texts = ["1+2=", "7", "(a b)", "12345"] * 600
    assert token_ids(config, tokenizer, texts) == [
        tokenizer(f"({text})=" if chat else text).input_ids for text in texts]


def test_many_rows_are_tokenised_under_a_bar_on_the_first_rank(encoding, monkeypatch, capfd):
    config, tokenizer, _ = encoding()
    for rank, rows, bar in ((0, 10_001, True), (0, 10_000, False), (1, 10_001, False)):
        monkeypatch.setattr("three_policies.training.loading.dist.get_rank", lambda: rank)
        token_ids(config, tokenizer, ["1"] * rows)
        assert ("tokens: 100%" in capfd.readouterr().err) == bar


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_question_files_train(kind, run, tmp_path, capsys):
    if kind == "jsonl":
        (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ROWS, ROWS[0]]), tmp_path / "rows")
    code, lines = run(f"task.kind={kind}", "task.path=rows")
    assert code == 0 and len(lines) == 2
    assert "* 1 of 25 rows of rows repeat the question of an earlier row" in capsys.readouterr().err


def test_an_answer_may_be_a_decimal():
    """Parquet has columns of them."""
    assert tasks.problem_of({"question": "a", "answer": Decimal("42.50")}, "x").answer == "42.50"
    with pytest.raises(UserError, match="has NaN for its `answer`, which is no number"):
        tasks.problem_of({"question": "a", "answer": Decimal("nan")}, "x")


@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
def test_a_run_ends_with_its_bad_rows_or_goes_on_without(on_bad_row, run, tmp_path, capsys):
    rows = [json.dumps(row) for row in ROWS]
    (tmp_path / "rows").write_text("\n".join([*rows[:2], '{"question": "1+1="}', *rows[2:]]))
    code, lines = run("task.kind=jsonl", "task.path=rows", f"task.on_bad_row={on_bad_row}")
    assert (code, len(lines)) == ((2, 0) if on_bad_row == "raise" else (0, 2))
    assert "1 of 25 rows cannot be used" in capsys.readouterr().err


def test_a_bad_row_of_a_parquet_file_has_its_number(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows")
    problems, [bad] = tasks.read_problems("parquet", str(tmp_path / "rows"))
    assert asked(problems) == ["1+1="] and bad.endswith("rows, row 2 has no `answer`")


def test_what_a_file_is_instead_is_said(tmp_path):
    (tmp_path / "rows.gz").write_bytes(gzip.compress(b'{"question": "1", "answer": "1"}'))
    with pytest.raises(UserError, match="no text in UTF-8; a compressed file must be unpacked"):
        task_of(tmp_path / "rows.gz")
    (tmp_path / "rows").write_text('{"question": "1", "solution": "1", "level": 3}')
    with pytest.raises(UserError, match=r"line 1 has no `answer` \(it has question, solution, lev"):
        task_of(tmp_path / "rows")


@pytest.mark.parametrize("kind", MADE)
def test_tasks_hold_out_problems_and_deal_the_rest_once_per_pass(kind):
    task = tasks.make_task(TaskConfig(kind=kind, size=2, eval_size=20), seed=1)
    assert not {p.question for p in task.train} & {p.question for p in task.held_out}
    assert len(task.held_out) == 20
    size = len(task.train)
    quarter = size // 4
    dealt = [i for first in range(0, 2 * size, quarter) for i in task.order(1, first, quarter)]
    dealt = dealt[:2 * size]
    assert sorted(dealt[:size]) == list(range(size)) and dealt[:size] != dealt[size:2 * size]
    right = random.Random(0).choice(task.held_out)
    assert task.reward(right, right.answer) == 1 and task.reward(right, right.answer + "0") == 0
