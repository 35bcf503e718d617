"""The trainer answers any input with a sentence, or does its work.

There is no traceback, no hang, no file outside runs/. How many inputs are tried is a parameter. The
exit code is 1 at the first input that is answered otherwise:

    python tests/training/test_fuzz.py 10000 [SEED]

Inputs are a corpus of nasty cases, and random ones whose parts are real keys, real values and the
corpus. Every input has two seconds of the processor's time, however long that takes on a loaded
machine. If an input were executed as code, it would leave a file behind.
"""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from three_policies import trainer
from three_policies.checks import UserError
from three_policies.interop import dialects
from three_policies.tests.support.waiting import HANG
from three_policies.training import checkpoints, files, tasks
from three_policies.training.settings import Config, TaskConfig, leaves, load_config


class Bomb:
    def __reduce__(self):
        return os.system, ("touch executed",)


NASTY_YAML = [
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
    "c: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c]\n"
    "e: &e [*d, *d, *d, *d, *d, *d, *d]\nf: &f [*e, *e, *e, *e, *e, *e]\nrun: [*f, *f, *f, *f]",
    "&a [*a]", "train: &t {steps: *t}", "<<: {a: 1}", "train: {<<: {steps: 3}}",
    "!!python/object/apply:os.system ['touch executed']", "run: !!python/name:os.system",
    "seed: !!binary aGVsbG8=", "x: !!python/object/new:os.system ['touch executed']",
    "run: !!timestamp 2001-01-01", "!!set {a, b}", "!!omap [a: 1]", "train: {steps: 1, steps: 2}",
    "train:\n  steps: 1\ntrain:\n  steps: 2", "? [a, b]\n: 1", "? {a: 1}\n: 2", "1: 2", "null: 1",
    "true: false", "1.5: 2", "- train", "train", "", "---\n---\n", "a: 1\n---\nb: 2",
    "\ufeffseed: 1", "\0", "seed: \0", "\t", "seed:\t1", "[" * 16000, "{" * 16000, "[]" * 8000,
    "seed: " + "[" * 900 + "]" * 900, "- " * 8000, "? " * 8000, "a: " * 4000, "'" * 9999,
    "seed: 0x" + "f" * 9000, "seed: 0x" + "f" * 2900, "seed: [0x" + "f" * 2900 + "]",
    "train: {lr: 0x" + "f" * 2900 + "}", "seed: " + "9" * 5000, "seed: 1" + ":59" * 3000,
    "train: {lr: 1e99999}", "train: {lr: .inf}", "train: {lr: -.inf}", "seed: -1", "seed: 1e3",
    "seed: 1.5", "seed: '1'", "seed: true", "train: {steps: 2147483648}",
    "train: {steps: 99999999999999999999}", "run: ../x", "run: /etc/passwd", "run: ''", "run: ..",
    "run: null", "run: " + "é" * 90, "run: " + "x" * 200, "run: {a: 1}", "run: [a]", "run: 'a\\0b'",
    'run: "a\\0b"', 'run: "\\ud800"', "run: ???", "run: 1e400",
    "task: {path: /dev/zero, kind: jsonl}", "task: {path: /, kind: parquet}",
    "task: {kind: jsonl, path: 'http://localhost/x'}", "task: ${oc.env:HOME}", "${a}: 1",
    "train: 3", "train: []", "train: null", "task: null", "correction: null", "correction: 3",
    "correction: []", "correction: {preset: null}", "correction: {preset: [a]}",
    "correction: {rollout_rs: {token_k1: [2, 1]}}",
    "correction: {rollout_rs: {token_k1: [[1], {}]}}", "correction: {rollout_rs: [1]}",
    "correction: {rollout_is_threshold: [0x" + "f" * 2900 + ", 1]}", "correction: {rollout_is: {}}",
    "correction: {1: 2}", "correction: {algorithm: {rollout_correction: {algorithm: null}}}",
    "correction: " + "{algorithm: " * 300 + "1" + "}" * 300,
    "correction: {rollout_rs: 'token_k1,token_k1', rollout_rs_threshold: '1_2,3_4_5'}",
    "correction: {rollout_rs: ',', rollout_rs_threshold: ','}",
    "correction: {tis_imp_ratio_cap: nan}", "correction: {tis_ratio_type: 3}",
    "correction: {bypass_mode: 'yes'}", "%YAML 9.9\n---\na: 1", "%", "@", "`",
]
NASTY_WORDS = ["", "=", "==", "a=", "=a", "train.steps", "train..steps=1", ".=1", "train.=1",
               "train.steps.x=1", "train[0]=1", "train[steps]=3", "train.steps=[1", "train.steps={",
               "train.steps=*a", "train.steps=&a 1", "run=..", "run=a/b", "run=", "run=null",
               "run=\ud800", "run=\0", "--help-me", "-x", "/dev/zero", "/", ".", "nowhere.yaml",
               "a.yaml=1", "\0", "seed=!!python/name:os.system", "seed=" + "9" * 6000, "a" * 5000,
               "a" * 5000 + "=1", "a." * 2000 + "a=1", "???", "task.path=\0", "run=" + "x" * 300,
               "~train.steps", "+train.steps=1", "train.lr=1e-400", "train.lr=0x" + "f" * 2900,
               "seed=0b" + "1" * 2900, "correction.preset={}", "correction=1", "correction..a=1"]
NASTY_ROWS = ["", "null", "[]", "{}", "3", '"x"', '{"question": 1, "answer": 2}',
              '{"question": null, "answer": "1"}', "[" * 5000, '{"a":' * 5000,
              '{"question": "\\ud800", "answer": "1"}', '{"question": "a", "answer": "\\udfff"}',
              '{"question": "a", "answer": NaN}', '{"question": "a", "answer": 1e999}',
              '{"question": "a", "answer": ' + "9" * 6000 + "}",
              '{"question": true, "answer": false}', '{"question": "a", "answer": "####"}',
              '{"question": "a", "answer": "' + "\\\\boxed{" * 2000 + '"}', "\ufeff{}", "\0",
              "{'a': 1}", '{"question": "a", "answer": "' + "1," * 20000 + '"}',
              '{"question": "a", "answer": "' + "9" * 20000 + '.0"}',
              '{"question": "a", "answer": "1", "question": {}}',
              '{"question": "a", "answer": " . "}', '{"question": "a", "answer": "$"}',
              '{"question": "\\u0000", "answer": "\\u0000"}', "true",
              '{"question": {"a": []}, "answer": [1]}']
VALUES = [None, True, 0, -1, 1, 2.5, 1e308, float("nan"), float("inf"), 10 ** 30, "", "a", "1",
          "0.5_2.0", "token", "sequence", "é", "\ud800", [], [1, 2], [None, 2], [2, None], {},
          {"a": 1}, {"token_k1": [0.5, 2.0]}, {"seq_mean_k3": 0.01}, "token_k1,seq_mean_k3", [[1]],
          (1, 2)]


def raw(rng, n=60):
    return bytes(rng.randrange(256) for _ in range(rng.randrange(n)))


def mangled(rng, text: str) -> str:
    """Replace, remove, repeat or move a few characters of a text."""
    for _ in range(rng.randrange(4)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in "ab")
        b = min(b, a + 40)
        text = text[:a] + rng.choice([
            "", text[a:b] * 2, rng.choice("[]{}:,&*!|>'\"%@\\#\n\t\0é =.-?"),
            chr(rng.randrange(0x3000))]) + text[b:]
    return text


def value(rng, depth=0):
    if depth < 3 and rng.random() < 0.2:
        return {rng.choice([*KEYS, "a", "preset"]): value(rng, depth + 1)
                for _ in range(rng.randrange(3))}
    return rng.choice(VALUES)


def text_of(rng, item) -> str:
    return rng.choice([json.dumps, str])(item)


def fuzz_config(rng):
    settings = [f"{rng.choice(KEYS)}={text_of(rng, value(rng))}" for _ in range(rng.randrange(3))]
    words = [mangled(rng, word) for word in settings] + rng.sample(NASTY_WORDS, rng.random() < 0.3)
    if rng.random() < 0.7:
        start = rng.choice([*NASTY_YAML, *GOOD_YAML, *GOOD_YAML, text_of(rng, value(rng))])
        Path("x.yaml").write_bytes(
            mangled(rng, start).encode("utf-8", "surrogatepass") if rng.random() < 0.95
            else raw(rng))
        words.insert(0, "x.yaml")
    load_config(words)


def fuzz_problems(rng):
    config = TaskConfig(kind=rng.choice(["jsonl", "parquet"]), eval_size=1,
                        path=rng.choice(["rows"] * 9 + ["/dev/zero", ".", "\0", "nowhere"]))
    good = '{"question": "1+1=", "answer": "so\\n#### 2"}'
    lines = [mangled(rng, rng.choice([*NASTY_ROWS, *[good] * 20]))
             for _ in range(rng.randrange(1, 4))]
    Path("rows").write_bytes(
        "\n".join(lines).encode("utf-8", "surrogatepass") if rng.random() < 0.9 else raw(rng))
    if config.kind == "parquet":
        import pyarrow
        from pyarrow import parquet
        rows = [{rng.choice(["question", "answer", "a"]): value(rng) for _ in range(3)}
                for _ in range(3)]
        with contextlib.suppress(Exception):          # not every row has a type in pyarrow
            parquet.write_table(pyarrow.Table.from_pylist(rows), "rows")
        # pyarrow removes what it cannot finish.
        content = bytearray(Path("rows").read_bytes() if Path("rows").exists() else b"")
        for _ in range(rng.randrange(3) if content else 0):
            content[rng.randrange(len(content))] = rng.randrange(256)
        Path("rows").write_bytes(content)
    tasks.make_task(config, 0)


def fuzz_dialect(rng):
    block = {rng.choice(DIALECTS): value(rng) for _ in range(rng.randrange(5))}
    dialects.from_dialect(block if rng.random() < 0.9 else rng.choice(VALUES))


def fuzz_checkpoint(rng):
    directory = Path("runs/x/checkpoints")
    place = directory / rng.choice(
        ["step-000002", "step-000002", "step-x", "step-", "step-9" + "9" * 50, "other"])
    place.mkdir(parents=True, exist_ok=True)
    good = json.dumps({"step": 2, "before": 0.5, "engine": "transformers", "settings": {"seed": 0}})
    state = rng.choice([mangled(rng, good), text_of(rng, value(rng)), pickle.dumps(Bomb()),
                        raw(rng), "[" * 9999])
    (place / "state.json").write_bytes(
        state if isinstance(state, bytes) else state.encode("utf-8", "surrogatepass"))
    Path("metrics.jsonl").write_bytes(b"\n".join(
        [mangled(rng, '{"step": 1}').encode("utf-8", "surrogatepass"), raw(rng), b""]))
    config = Config(run="x")
    try:
        checkpoints.Checkpoints(directory, config)
        files.read_metrics(Path("metrics.jsonl"))
    finally:
        shutil.rmtree("runs")


GOOD_YAML = [path.read_text()
             for path in (Path(trainer.__file__).parent / "configs").rglob("*.yaml")]
KEYS = [key for key, *_ in leaves(Config)]
DIALECTS = [*dialects.KEYS, *dialects.WRAPPERS, 1, None, "x"]
FUZZERS = [fuzz_config, fuzz_config, fuzz_problems, fuzz_dialect, fuzz_checkpoint]


def corpus():
    """Return the nasty cases as they are, each with its name."""
    for text in NASTY_YAML:
        def read(text=text):
            Path("x.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
            load_config(["x.yaml"])
        yield text[:60], read
    for word in NASTY_WORDS:
        yield word[:60], lambda word=word: load_config([word])
    for row in NASTY_ROWS:
        def rows(row=row):
            Path("rows").write_text(row, errors="surrogatepass", encoding="utf-8")
            tasks.make_task(TaskConfig(kind="jsonl", path="rows", eval_size=1), 0)
        yield row[:60], rows


def answered(name, call) -> None:
    """Check that a call returns within two seconds of the processor, or raises its sentence."""
    def late(*_):
        raise TimeoutError(f"{name}: more than two seconds of the processor, or a hang")
    for number in signal.SIGPROF, signal.SIGALRM:
        signal.signal(number, late)
    # The timer counts while this process computes, in it or for it.
    signal.setitimer(signal.ITIMER_PROF, 2)
    signal.alarm(HANG)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (UserError, ValueError, TypeError) as error:
        contract = UserError if "dialect" not in str(name) else (ValueError, TypeError)
        if not isinstance(error, contract) or isinstance(error, UnicodeError):
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        assert str(error).strip() and "\n" not in str(error), (
            f"{name}: not one sentence: {error!s:.300}")
    except (Exception, RecursionError) as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error!s:.300}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def fuzz(inputs: int, seed: int, directory: Path) -> int:
    """Feed the corpus and random inputs to each reader, and return how many there were.

    The directory is empty before, and has nothing but them afterwards.
    """
    home, found = Path.cwd(), 0
    os.chdir(directory)
    try:
        for name, call in corpus():
            answered(name, call)
            found += 1
        while found < inputs:
            kind = FUZZERS[found % len(FUZZERS)]
            answered(f"{kind.__name__} {seed} {found}",
                     lambda: kind(random.Random(f"{seed} {found}")))
            found += 1
        assert ({path.name for path in directory.iterdir()}
                <= {"x.yaml", "rows", "metrics.jsonl", "runs"})
    finally:
        os.chdir(home)
    return found


def test_whatever_it_is_fed_the_answer_is_a_sentence_or_work(tmp_path):
    assert fuzz(800, 0, tmp_path) == 800


@pytest.mark.parametrize(
    "file", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", ["pickle", "code", "empty"])
def test_a_model_directory_executes_nothing(
        file, content, tiny_model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    if file == "pytorch_model.bin":
        Path("model/model.safetensors").unlink()
    data = {"pickle": pickle.dumps(Bomb()), "empty": b"", "code": json.dumps(
        {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil",
                      "AutoTokenizer": ["evil.Evil", None]},
         "model_type": "evil"}).encode()}[content]
    Path("model/evil.py").write_text("open('executed', 'w')")
    Path("model", file).write_bytes(data)
    code = trainer.main(
        ["policy.path=model", "rollout.engine=transformers", "run=x", "task.eval_size=8"])
    said = capfd.readouterr().err
    assert (code == 2 and "trainer.py: policy.path=model cannot be loaded: " in said
            and "Traceback" not in said)
    assert not Path("executed").exists() and not Path("runs/x").exists()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        count = fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, Path(empty))
    print(f"{count} inputs tried, every one answered")
