"""Plant one-line errors in the core, the doctor's laws aside, and count what its tests notice.

    python tools/mutate.py [N] [SEED]       # N mutants drawn at random (300), of all there are

It is run by hand: the 300 take about an hour of one core. An error is one change of one expression:
an operator, a comparison, a sign, a constant, a condition, a dropped detach, where or clamp, max
for min, sum for mean. Messages and annotations are left alone. The tests run on a copy that
Python finds first, because they start beside it.
"""

import ast
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
OWN_TESTS = {
    "ratios.py": ("estimators", "expected_gradients"), "kl.py": ("kl",),
    "estimators.py": ("estimators", "sampling"),
    "surrogates.py": ("surrogates", "any_criterion_and_loss", "expected_gradients"),
    "rejection.py": ("rejection", "any_criterion_and_loss", "correction"),
    "correction.py": ("correction", "expected_gradients"),
    "presets.py": ("presets_and_peers", "correction"),
    "metrics.py": ("metrics", "any_criterion_and_loss"), "centering.py": ("centering",),
    "losses.py": ("losses", "surrogates", "kl", "expected_gradients"),
    "doctor/health.py": ("health",), "doctor/report.py": ("verdict",)}
TESTS = [*dict.fromkeys(name for names in OWN_TESTS.values() for name in names),
         "dialects", "museum"]
LEFT = shutil.ignore_patterns(".git", ".pyright", "node_modules", "runs", "build", "book")
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.BitAnd: "|",
             ast.BitOr: "&", ast.And: "or", ast.Or: "and"}
COMPARISONS = {ast.Lt: ("<=", ">"), ast.Gt: (">=", "<"), ast.LtE: ("<", ">"), ast.GtE: (">", "<"),
               ast.Eq: ("!=",), ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",),
               ast.In: ("not in",), ast.NotIn: ("in",)}
NAMES = {"maximum": "minimum", "minimum": "maximum", "amax": "amin", "amin": "amax", "max": "min",
         "min": "max", "sum": "mean", "mean": "sum", "any": "all", "all": "any", "exp": "expm1",
         "expm1": "exp"}
DROPPED = {"detach", "clamp", "square", "abs", "exp", "sqrt", "double", "expm1"}


def rewrites(node: Any, code: Callable[[Any], str]) -> Iterator[tuple[Any, str]]:
    """Yield (part of the node, its new code) for every error that fits this node."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield node, f"(({code(node.left)}) {OPERATORS[type(op)]} ({code(node.right)}))"
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield node, f"{code(node.target)} {OPERATORS[type(op)]}= {code(node.value)}"
        case ast.BoolOp():
            yield node, f" {OPERATORS[type(node.op)]} ".join(f"({code(v)})" for v in node.values)
        case ast.Compare(ops=[op]):
            for new in COMPARISONS[type(op)]:
                yield node, f"(({code(node.left)}) {new} ({code(node.comparators[0])}))"
        case ast.UnaryOp():
            yield node, f"({code(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1)
            if value:
                yield node, repr(value * 0.9 if isinstance(value, float) else value - 1)
        case ast.IfExp():
            yield node, f"(({code(node.orelse)}) if ({code(node.test)}) else ({code(node.body)}))"
        case ast.If() | ast.While():
            yield node.test, f"(not ({code(node.test)}))"
        case ast.Call():
            yield from rewrites_of_a_call(node, code)


def rewrites_of_a_call(node: ast.Call, code: Callable[[Any], str]) -> Iterator[tuple[Any, str]]:
    if code(node.func) == "torch.where" and len(node.args) == 3:
        condition, yes, no = map(code, node.args)
        yield node, f"({yes})"
        yield node, f"torch.where({condition}, {no}, {yes})"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
        yield node, f"({code(node.func.value)})"
    name = node.func.attr if isinstance(node.func, ast.Attribute) else code(node.func)
    if name in NAMES:
        yield node.func, code(node.func).removesuffix(name) + NAMES[name]
    for keyword in node.keywords:
        if name == "clamp" and keyword.arg in ("min", "max"):
            yield keyword, f"{NAMES[keyword.arg]}={code(keyword.value)}"


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are mathematics: no wording of a message, no annotation."""
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        return
    yield node
    for name, child in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for part in child if isinstance(child, list) else [child]:
                if isinstance(part, ast.AST):
                    yield from walk(part)


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Return (line, what was changed, the mutated source) for every mutant of a source."""
    text, starts, found = source.encode(), [0], []
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node):
        return (starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset)

    def code(node):
        return text[slice(*span(node))].decode()

    for node in walk(ast.parse(source)):
        for part, new in rewrites(node, code):
            start, end = span(part)
            found.append((part.lineno, f"{' '.join(code(part).split())} → {' '.join(new.split())}",
                          (text[:start] + new.encode() + text[end:]).decode()))
    return found


def path_of(test: str) -> str:
    room = {"health": "doctor", "verdict": "doctor", "dialects": "interop"}.get(test, "method")
    return f"three_policies/tests/{room}/test_{test}.py"


def caught(copy: Path, files: list[str], seconds: int) -> bool:
    """True if a test fails on the copy; tests that never end count as failed.

    `seconds` are the processor's own, so that other work beside it changes no count.
    """
    command = [sys.executable, "-B", "-m", "pytest", "-xq", "-p", "no:cacheprovider", *files]
    return subprocess.run(
        command, cwd=copy.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    ).returncode != 0


def main(n: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(ROOT, Path(place, "three_policies"), ignore=LEFT))
        if caught(copy, [*map(path_of, TESTS)], 600):
            sys.exit("the tests fail without any mutant")
        sources = {name: (ROOT / name).read_text() for name in OWN_TESTS}
        every = [(name, *m) for name, source in sources.items() for m in mutants(source)]
        drawn = random.Random(seed).sample(every, min(n, len(every)))
        survivors = 0
        for name, line, what, mutated in tqdm(drawn, mininterval=5):
            first = OWN_TESTS[name]
            (copy / name).write_text(mutated)
            for names in (first, [other for other in TESTS if other not in first]):
                if found := caught(copy, [*map(path_of, names)], 300):
                    break
            (copy / name).write_text(sources[name])
            if not found:
                survivors += 1
                print(f"{name}:{line}: {what}", flush=True)
        print(f"{len(drawn) - survivors} of {len(drawn)} caught (of {len(every)}, seed {seed})")


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], *["300", "0"][len(sys.argv) - 1:]]))
