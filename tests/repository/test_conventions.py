"""Files stand where they belong, import only what they may, and are written plainly.

The equations that are documented are those that run. Of prose a test finds no more than a docstring
that begins with a preposition, and words for which the field has a term.
"""

import ast
import getpass
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor

from three_policies.correction import correct
from three_policies.metrics import to_host
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA
from three_policies.surrogates import LOSSES
from three_policies.tests.support.examples import bound_of
from three_policies.tests.support.modules import EXPLAINED, METHOD, ROOMS, modules

ROOT = Path(__file__).resolve().parents[2]
BOOK = (*METHOD, "policy", "rollout", "trainer")
KERNELS = ("training.heads", "training.packing", "training.rounding", "training.shapes")
# What a file of the method, or of a room, may import of the project; a room knows itself.
MAY_IMPORT = {
    "checks": (), "ratios": ("checks",), "kl": ("checks", "ratios"),
    "estimators": ("checks", "ratios", "kl"), "surrogates": ("ratios",),
    "rejection": ("checks", "ratios", "kl"), "metrics": ("ratios", "estimators", "rejection"),
    "presets": ("checks", "ratios", "rejection", "surrogates"),
    "correction": ("checks", "ratios", "rejection", "presets", "metrics"),  # metrics when asked for
    "centering": ("ratios", "rejection", "presets", "correction"),
    "losses": ("checks", "ratios", "kl", "surrogates", "presets", "correction", "centering"),
    "policy": (*KERNELS, "training.models"), "rollout": ("estimators", *KERNELS),
    "training": ("checks", "surrogates", "rejection", "metrics", "presets", "correction", "losses",
                 "centering", "policy", "rollout", "engines", "doctor", "interop.dialects"),
    "engines": ("checks", "rollout"),
    "doctor": (*METHOD, "policy", "rollout", "engines.choice", *KERNELS, "training.models",
               "training.signals"),
    "interop": (*METHOD, "doctor.dumps", "doctor.normal", "doctor.watch"),
    "trainer": (*METHOD, "policy", "rollout", "training"),
    "oracle": (*METHOD, "interop.dialects", "training.tasks"),
    "studies": (*BOOK, "training", "engines", "doctor", "interop", "oracle", "book"),
    "book": ("__init__", *BOOK, *ROOMS, "tests.support")}

# These public functions cite an equation and are not entered by a run, each with the reason.
NOT_ENTERED = {
    "effective_sample_size":
        "of one batch; a run adds up N, Σw and Σw² over ranks, and `kish` is both's formula",
    "hypotheses": "of a log of many steps, which a run's first batch is not",
    "room": "of a log of many steps, too",
    "division": "of a dump with entropies whose E[ρ] is broken, which a run's first batch is not"}


def test_one_name_is_imported_and_no_path_is_handled():
    """The project is `three_policies` wherever it is imported, and nothing of it bare."""
    bare = {name for path in tracked() if path.suffix == ".py"
            for name in (path.stem, path.parent.name)}
    for path in tracked():
        if path.suffix not in (".py", ".md", ".ipynb") or path.name == "CHANGELOG.md":
            continue
        text = (ROOT / path).read_text()
        if path.name != "test_conventions.py":
            assert not re.search(r"sys\.path\b|PYTHONPATH=[/$]", text), path
        if path.suffix == ".py":
            heads = {name.split(".")[0] for name in imported(ROOT / path)}
            others = {*sys.stdlib_module_names, "vllm", "trl", "verl", "skyrl"}
            assert not heads & bare - others, path


def tracked() -> list[Path]:
    """Return the files of the repository, or skip the test where git does not know them."""
    found = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not found:
        pytest.skip("not a git checkout, so what is tracked is not known")
    return [Path(path) for path in found]


def test_what_stands_at_the_top():
    top = {path.parts[0] for path in tracked() if not path.parts[0].startswith(".")}
    assert {f"{name}.py" for name in BOOK} <= top
    assert top <= {
        "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "pyproject.toml",
        "requirements.txt", "requirements", "tools", "configs", "tests", "math", "tiny.py",
        "__init__.py", "__main__.py", *ROOMS, *(f"{name}.py" for name in BOOK)}
    assert not [path for path in tracked() if path.parts[0] == "math" and path.suffix == ".py"]


def test_the_version_is_stated_alike():
    """CITATION.cff states pyproject.toml's version, and the README its versions of Python."""
    stated = (ROOT / "pyproject.toml").read_text()
    version, oldest, beyond = (re.search(pattern, stated, re.MULTILINE) for pattern in (
        r'^version = "(.+)"$', r'^requires-python = ">=3\.(\d+),',
        r'^requires-python = ".*<3\.(\d+)"$'))
    assert version and oldest and beyond
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"Python 3.{oldest[1]} to 3.{int(beyond[1]) - 1}." in (ROOT / "README.md").read_text()


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, wherever it does, as if each name were a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def known() -> dict[str, set[str]]:
    """Return each module with those of the project's own that it imports."""
    named, found = modules(), {}
    for name, path in named.items():
        ours = {x.removeprefix("three_policies.") for x in imported(path)
                if x.startswith("three_policies.")}
        found[name] = {x if x in named else x.rpartition(".")[0] or "__init__" for x in ours}
    return found


def test_imports_go_one_way():
    for name, needs in known().items():
        room = name.split(".")[0]
        if room in MAY_IMPORT:
            wrong = {x for x in needs if not any(
                x == a or x.startswith(f"{a}.") for a in (*MAY_IMPORT[room], room))}
            assert not wrong, f"{name} must not import {wrong}"


def test_there_is_no_circle():
    """Imports within functions, for type checkers and below `__main__` count as any other."""
    left = known()
    while left:
        leaves = {name for name, needs in left.items() if not needs & left.keys() - {name}}
        assert leaves, f"a circle among {set(left)}"
        left = {name: needs for name, needs in left.items() if name not in leaves}


def test_the_method_and_the_kernels_need_torch_alone():
    for name in (*EXPLAINED, *KERNELS):
        outside = {x.split(".")[0] for x in imported(modules()[name])} - {"three_policies"}
        assert outside <= {*sys.stdlib_module_names, "torch"}, f"{name} imports {outside}"


# ------------------------------------------------------------------ what reads is what runs

def public_with_equation():
    """Return (module, function) of every public function of the core that cites a label.

    Functions of classes are left out.
    """
    found = set()
    for module in EXPLAINED:
        for node in ast.parse(modules()[module].read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                if "eq:" in (ast.get_docstring(node) or ""):
                    found.add((module, node.name))
    return found


RUNS = [
    ["correction.preset=decoupled_token_is", "loss.kl_coef=0.1", "advantage.kind=grpo"],
    ["correction.preset=decoupled_seq_is_rs", "correction.rollout_is_batch_normalize=true",
     "advantage.kind=rloo"],
    ["correction.preset=bypass_pg_geo_rs", "advantage.kind=reinforce", "loss.kl_coef=0.1",
     "loss.kl_in=reward"],
    ["correction={rollout_is: prefix, rollout_rs: {" + ", ".join(
        f"{name}: {bound_of(name, [1e-4, 1e4], 10)}" for name in CRITERIA) + "}}"],
    ["correction={score_centering: true, bypass_mode: true, loss_type: reinforce}"],
    *([f"correction.loss_type={name}"] for name, row in LOSSES.items() if row.level is not None)]


@pytest.fixture(scope="module")
def entered(tiny_model, tmp_path_factory):
    """Return every (module, function) of this repository that short runs of the trainer enter.

    The calls are in order.
    """
    from three_policies import trainer
    from three_policies.training import run
    from three_policies.training.tasks import Task
    directory, home, calls = tmp_path_factory.mktemp("entered"), os.getcwd(), []
    places = {str(modules()[name]): name for name in {*BOOK, *EXPLAINED}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "reward", lambda self, problem, response: float(len(response) % 2))
        patch.setattr(run, "plot", lambda *_: None)                     # no equation draws curves

        def tracer(frame, event, _):
            if event == "call" and (module := places.get(frame.f_code.co_filename)):
                taken = frame.f_code.co_varnames[:frame.f_code.co_argcount]
                calls.append((module, frame.f_code.co_name, "rollout_log_prob" in taken))
        os.chdir(directory)
        sys.setprofile(tracer)
        try:
            for i, settings in enumerate(RUNS):
                assert trainer.main([
                    "task.size=1", "task.eval_size=8", "rollout.prompts=4", "rollout.samples=4",
                    "rollout.max_tokens=5", "rollout.quantize=4",
                    "rollout.engine=transformers", "train.mini_batches=1", "train.steps=1",
                    f"policy.path={tiny_model}", f"run={i}", *settings]) == 0
        finally:
            sys.setprofile(None)
            os.chdir(home)
    return calls


def test_every_equation_that_reads_is_one_that_runs(entered):
    ran = {(module, name) for module, name, _ in entered}
    missing = {name for _, name in public_with_equation() - ran}
    assert missing == set(NOT_ENTERED)


def test_rollout_log_prob_walks_from_correction_to_loss_and_never_back(entered):
    """The correction reads rollout_log_prob first, then the loss with its KL, and the metrics.

    The step is a decoupled one, with one update.
    """
    first_run = entered[:next(i for i, call in enumerate(entered) if call[1] == "rloo_advantages")]
    walk = [module for module, _, takes in first_run if takes]
    rooms = [module for i, module in enumerate(walk) if i == 0 or walk[i - 1] != module]
    assert rooms == ["correction", "losses", "kl", "metrics"]


@pytest.mark.long
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")),
                    reason="torch.compile needs a C++ compiler, and there is no g++ (nor CXX)")
def test_correct_compiles_whole(monkeypatch):
    """`torch.compile(correct)` traces without a graph break, and gives the same results.

    Each processor has a cache of its own, since torch would take code that it compiled for another
    processor's instructions from a shared one. Vector instructions are left out: torch would first
    compile a program for each kind of them, which takes three times as long as all the rest.
    """
    cache = (f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_"
             f"{torch.backends.cpu.get_cpu_capability()}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    g = torch.Generator().manual_seed(0)
    rollout, noise, signs = torch.randn(3, 37, 50, dtype=torch.float64, generator=g)
    mask = torch.arange(50) < torch.randint(0, 51, (37, 1), generator=g)
    train = torch.where(mask, rollout + noise / 2, math.nan)
    config = Config("token", 1.5, True, {"token_k1": (0.5, 2.0), "seq_mean_k3": 0.13,
                                         "seq_max_k1": (1e-4, None), "opsm": 0.05})
    with inductor.patch({"cpp.vec_isa_ok": False}):
        compiled = torch.compile(correct, fullgraph=True)(train, rollout, mask, config, signs)
    plain = correct(train, rollout, mask, config, signs)
    for threshold in (1.5, 2.5, (0.5, 3.0)):                # a second one is a symbol of the trace
        torch.compile(correct, fullgraph=True, backend="eager")(
            train, rollout, mask, replace(config, rollout_is_threshold=threshold), signs)
    torch.testing.assert_close(compiled.weights, plain.weights, rtol=1e-12, atol=1e-14)
    assert torch.equal(compiled.mask, plain.mask) and 0 < plain.mask.sum() < mask.sum()
    assert to_host(compiled.metrics) == pytest.approx(to_host(plain.metrics), rel=1e-9, abs=1e-9)


CODE = sorted(path for place in ("*.py", "[a-z]*/*.py", "tests/*/*.py") for path in ROOT.glob(place)
              if path.parent.name not in ("runs", "build"))
TEXTS = sorted(path for place in (".", "interop", "math") for path in ROOT.glob(f"{place}/*.md"))
NO_VERB = ("Of", "With", "Without", "For", "In", "From", "By", "To", "At", "On", "Under", "Between")
# What it is called in the field: processed, reaches, any, stale (weights, rollouts, samples).
RIDDLES = re.compile(
    r"worked off|\b[Ww]hoever\b|\b(?:comes?|came) to (?:\*\*)?[\d+−]|\bsteps? late\b"
    r"|\blate (?:μ|weights|rollouts|samples)\b|\bthe (?:larger|smaller|full) rate\b")
# Identifiers that meant two things, or had two names (CONTRIBUTING.md, "Names"), and where each
# stays: the setting, peft's method, columns and keys that are formats, a page's own words.
RETIRED = {
    "adapter": (), "add_adapter": ("training/models.py",),
    "card": ("tests/book/",), "cards": (), "Card": (), "Shapes": (), "look_at": (), "looks_at": (),
    "looked": (), "looked_at": ("tests/book/",), "told": ("book/", "tests/"),
    "said": ("book/", "oracle/", "tests/"), "says": ("book/", "tests/"),
    "rollout_log_probs": ("doctor/", "tests/")}


def docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield getattr(node, "name", "the file"), ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_sentence(path):
    wrong = [name for name, text in docstrings(path) if text.split(" ")[0] in NO_VERB]
    assert not wrong, f"begin with a verb or a subject: {wrong}"


@pytest.mark.parametrize("path", [p for p in CODE if p != Path(__file__)] + TEXTS,
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_no_riddles(path):
    found = [(text.count("\n", 0, m.start()) + 1, m[0]) for text in [path.read_text()]
             for m in RIDDLES.finditer(text)]
    assert not found


def test_a_docstring_without_a_verb_is_found(tmp_path):
    (tmp_path / "x.py").write_text('def f():\n    """Of x over all tokens."""\n')
    with pytest.raises(AssertionError, match="begin with a verb"):
        test_docstrings_begin_with_a_sentence(tmp_path / "x.py")


def retired(path, name):
    """Return (line, identifier) of what a file, called `name` in the repository, has of RETIRED."""
    with path.open("rb") as file:
        return [(token.start[0], token.string) for token in tokenize.tokenize(file.readline)
                if token.type == tokenize.NAME and token.string in RETIRED
                and not name.startswith(RETIRED[token.string])]


@pytest.mark.parametrize("name", [str(path.relative_to(ROOT)) for path in CODE])
def test_one_thing_has_one_name(name):
    assert not retired(ROOT / name, name)


def test_a_retired_name_is_found_in_code_alone(tmp_path):
    (tmp_path / "x.py").write_text('"""An adapter."""\n\nadapter = rollout.adapter  # said\n')
    assert retired(tmp_path / "x.py", "x.py") == [(3, "adapter"), (3, "adapter")]
    (tmp_path / "y.py").write_text("peft.add_adapter")
    assert retired(tmp_path / "y.py", "training/models.py") == []
