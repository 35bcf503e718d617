"""The book in math/ has labels that lead both ways, links that exist, and computed tables.

The chapters themselves run as doctests, collected by pyproject.toml's settings.
One alone: `pytest math/13-kl.md`.
"""

import ast
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from three_policies.book import paths
from three_policies.oracle import J, Policy, estimator_moments, rewards
from three_policies.tests.support import certified, modules
from three_policies.tests.support.launching import shell
from three_policies.training.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "math").glob("[0-9]*.md"), key=lambda path: int(path.name.split("-")[0]))
# What a chapter enumerates: oracle/turns.py of 17-turns-and-tools.md.
EXACT = [path for chapter in CHAPTERS for word in chapter.stem.split("-")
         if (path := ROOT / "oracle" / f"{word}.py").exists()]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("interop/*.md"), *sorted(ROOT.glob("math/*.md"))]
CORE = [modules.modules()[name] for name in modules.EXPLAINED]
LABEL = re.compile(r"eq:[a-z0-9]+(?:-[a-z0-9]+)*")
DEFINITION = re.compile(rf"^\*\*\(({LABEL.pattern})\)\*\*$", re.MULTILINE)


def defined():
    return [label for chapter in CHAPTERS for label in DEFINITION.findall(chapter.read_text())]


def cited(path):
    return set(LABEL.findall(path.read_text()))


def public_docstrings(path):
    """Return name → docstring of every public function and class at the top of a module."""
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }


def without_fences(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_no_label_is_defined_twice_and_each_belongs_to_a_formula():
    labels = defined()
    assert sorted(labels) == sorted(set(labels))
    for chapter in CHAPTERS:
        text = chapter.read_text()
        formulas = re.findall(
            r"```math\n.*?\n```\n\*\*\((eq:[a-z0-9-]+)\)\*\*$", text, re.DOTALL | re.MULTILINE
        )
        assert formulas == DEFINITION.findall(text), (
            f"{chapter.name}: a label without a formula just above it"
        )


def test_every_label_cited_anywhere_exists():
    places = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("tests/*/*.py"),
              ROOT / "README.md", *CHAPTERS]
    unknown = {
        f"{path.name}: {label}"
        for path in places
        if path.exists() and path != Path(__file__).resolve()
        for label in cited(path) - set(defined())
    }
    assert not unknown, f"cited but not defined: {sorted(unknown)}"


def test_every_equation_is_cited_by_what_computes_it_and_by_a_test():
    in_core = set().union(
        *(LABEL.findall(text) for path in CORE + EXACT for text in public_docstrings(path).values())
    )
    in_tests = set().union(
        *(cited(path) for path in ROOT.glob("tests/*/test_*.py") if path != Path(__file__))
    )
    missing = {"in no docstring": sorted(set(defined()) - in_core),
               "in no test": sorted(set(defined()) - in_tests)}
    assert not any(missing.values()), missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_not_to_line_numbers(document):
    text = document.read_text()
    assert not re.search(r"#L\d+", text), "a link to a line number goes stale with the next commit"
    for target in re.findall(r"(?:\]\(|^\[\d+\]: )([^)\s]+)", without_fences(text), re.MULTILINE):
        if not re.match(r"https?:|mailto:|#", target):
            assert (document.parent / target.split("#")[0]).exists(), f"{target} does not exist"


def test_quoted_differences_are_between_lines_of_the_code():
    code = {line.strip() for line in (ROOT / "surrogates.py").read_text().splitlines()}
    for chapter in CHAPTERS:
        for block in re.findall(r"```diff\n(.*?)```", chapter.read_text(), re.DOTALL):
            quoted = {line[1:].strip() for line in block.splitlines()
                      if not line[1:].startswith("def ")}
            assert quoted <= code, (
                f"{chapter.name} quotes what surrogates.py no longer says: {quoted - code}"
            )


def test_chapters_are_complete_and_lead_from_one_to_the_next():
    numbers = [int(chapter.name.split("-")[0]) for chapter in CHAPTERS]
    assert numbers == list(range(1, len(CHAPTERS) + 1))
    for chapter, following in pairwise(CHAPTERS):
        assert f"]({following.name})" in chapter.read_text(), (
            f"{chapter.name} does not lead to {following.name}"
        )
    package = ROOT / "math" / "__init__.py"
    assert not package.exists(), "a package named math would shadow Python's own"


def test_readme_has_the_paths_of_the_book():
    readme = (ROOT / "README.md").read_text()
    listed = re.findall(r"\*([AI] [\w\s]+)\*:((?:\s+\[\d+\][,.])+)", readme)
    assert {" ".join(reader.split()): tuple(map(int, re.findall(r"\d+", stops)))
            for reader, stops in listed} == paths.PATHS


def test_the_settings_beside_each_paper_are_read():
    rows = yaml.safe_load((ROOT / "math/papers.yaml").read_text())
    for row in rows:
        load_config(row["settings"])
    assert len({row["paper"] for row in rows}) == len(rows) > 25


def test_one_chapter_alone_has_more_than_3000_words_of_prose():
    """Code, its output, tables and exercises are not counted. Chapter 8 has one section a law."""
    for chapter in CHAPTERS:
        text = without_fences(chapter.read_text()).split("## Exercises")[0]
        words = re.sub(r"^(?:\||<!--).*$", "", text, flags=re.MULTILINE).split()
        assert len(words) <= 3000 or chapter.name == "8-what-is-wrong.md", chapter.name


@pytest.mark.parametrize("chapter", ["16-versions", "17-turns-and-tools", "18-routes"])
def test_a_chapter_that_answers_one_question_has_at_most_2500_words(chapter):
    text = (ROOT / "math" / f"{chapter}.md").read_text().split("<!-- begin: path-")[0]
    assert len(text.split()) <= 2500


@pytest.mark.parametrize("which", ["--quick", pytest.param("all", marks=pytest.mark.long)])
def test_generated_tables_are_up_to_date(which, forks, tmp_path):
    """`python book/tables.py` would change nothing; every figure is computed again here."""
    check = [str(ROOT / "book/tables.py"), "--check", which]
    found = shell([sys.executable, *forks, *check], tmp_path)
    assert found.returncode == 0, f"run `python book/tables.py`\n{found.stdout}{found.stderr}"


@pytest.fixture(scope="module")
def tables():
    from three_policies.book import tables
    return tables


def test_every_equation_is_certified_by_a_test_that_is_as_strict_as_its_mark(tables):
    """Appendix E is what the marks say; "rational" compares no floats, chance has a confidence."""
    found = certified.statements()
    assert tables.block("certified") in (ROOT / "math" / "appendix-certified.md").read_text()
    assert {label for row in found for label in row.labels} == set(defined())
    for row in found:
        kind, _, confidence = row.arithmetic.partition(": ")
        assert kind in certified.ARITHMETICS and row.test.startswith("test_")
        assert ("chance" in confidence) == (kind == "Monte Carlo"), row
        if kind == "rational":
            body, = [node for node in ast.parse((ROOT / "tests" / row.file).read_text()).body
                     if getattr(node, "name", "") == row.test]
            names = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
            assert not names & {"close", "float", "numbers", "torch"}, row


def test_a_mark_without_a_statement_is_refused(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        'from certified import certifies\n\n\n@certifies("sympy")\ndef test_x():\n    """No."""\n')
    monkeypatch.setattr(certified, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"test_x.py::test_x is marked"):
        certified.statements()


def test_a_metric_without_a_formula_is_a_sentence_and_no_file_is_written(
        tables, tmp_path, monkeypatch):
    (tmp_path / "math").mkdir()
    for path, name in ((tmp_path / "README.md", "losses"), (tmp_path / "math/z.md", "metrics")):
        path.write_text(f"<!-- begin: {name} --><!-- end: {name} -->")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.delitem(tables.FORMULAS, "kl_z")
    with pytest.raises(SystemExit, match="has no row for kl_z$"):
        tables.main([])
    assert (tmp_path / "README.md").read_text() == "<!-- begin: losses --><!-- end: losses -->"


@pytest.mark.parametrize("name", [
    "decoupled_seq_is_rs", "decoupled_token_icepop", "bypass_ppo_clip"])
def test_tables_take_all_responses_in_one_call(tables, name):
    """Mean and variance that the tables compute in one call are the oracle's, by response."""
    pi = Policy(V=3, T=3, seed=0)
    theta, mu, config = pi.perturbed(2, 0.2), pi.perturbed(1, 0.5), tables.PRESETS[name]()
    advantages = (rewards(pi) - J(pi, rewards(pi)).detach()).expand(-1, 3)
    mean, variance, _ = tables.moments(config, theta, pi, mu, advantages)
    lp, old_lp, mu_lp = theta.log_probs(), pi.log_probs().detach(), mu.log_probs().detach()
    how = tables.LossConfig(aggregation=tables.SUM)
    slow = estimator_moments(theta, mu, lambda i: tables.policy_loss(
        lp[i], old_lp[i], mu_lp[i], advantages[i], pi.mask[i], config, how)[0])
    assert torch.allclose(mean, -slow.mean, rtol=0, atol=1e-12)
    assert abs(variance - slow.variance) < 1e-12


def test_each_policy_side_by_side_has_a_second_moment_of_its_own(tables):
    """A batch of M2PO is that of one policy: side by side and alone it keeps the same tokens."""
    start = [Policy(V=3, T=3, seed=seed) for seed in (0, 1, 2)]
    m2po = tables.RolloutCorrectionConfig(rollout_rs={"second_moment": 0.04})

    def found(policies):
        old, mu = (tables.side_by_side(x) for x in (policies, [p.perturbed(1, 0.5)
                                                               for p in policies]))
        advantages = torch.cat([rewards(p, 7) for p in policies]).expand(-1, 3)
        return tables.moments(m2po, old, old, mu, advantages, len(policies))

    mean, variance, kept = found(start)
    for i, policy in enumerate(start):
        alone = found([policy])
        assert torch.allclose(mean[i], alone[0][0], rtol=0, atol=1e-12)
        assert abs(variance[i] - alone[1][0]) < 1e-12 and abs(kept[i] - alone[2][0]) < 1e-12
    assert kept.unique().numel() == 3                             # each is cut elsewhere


def test_m2po_of_a_whole_distribution_is_that_of_its_samples(tables):
    """eq:second-moment: each response as often as μ draws it; ties go together, or nothing is left.

    `correct` itself judges the batch in which response i occurs 12·μ(i) times.
    """
    pi = Policy(V=3, T=1)
    mask, old = pi.mask, torch.tensor([[0.1], [0.3], [-0.3]], dtype=torch.float64)
    old[2] = -old[1]                                     # the same square, to the last digit
    copies = torch.tensor([6, 2, 4])
    mu = (copies / 12).double().log()[:, None]
    # Means of the squares 0.01 and 0.09, 0.09: 0.01; with one of the two 0.03 or 0.042; 0.05.
    for bound, left in ((0.005, 0), (0.045, 1), (0.06, 3)):
        m2po = tables.RolloutCorrectionConfig(rollout_rs={"second_moment": bound})
        decided = tables.without_end(m2po, mu + old, mu, mask, torch.ones(3, 1), mu.exp(), 1)
        drawn = torch.arange(3).repeat_interleave(copies)
        sampled = tables.correct((mu + old)[drawn], mu[drawn], mask[drawn], m2po)
        assert decided.mask.sum() == left and torch.equal(decided.mask[drawn], sampled.mask)


def test_gradient_field_reaches_the_optimum_with_the_exact_weight(tables):
    """Studies side by side disturb nothing; the exact weight ends at π* for any sampler."""
    start = [Policy(V=3, T=2, seed=seed) for seed in (0, 1)]
    reward, lagging = torch.stack([rewards(p) for p in start]), torch.tensor([False, True])
    noise = [(p.perturbed(5, 0.3).logits - p.logits).detach() for p in start]
    exact = tables.RolloutCorrectionConfig.bypass_pg_is(torch.inf)
    both = tables.ascend(exact, start, noise, reward, lagging)[-1]
    alone = tables.ascend(exact, start[1:], noise[1:], reward[1:], lagging[1:])[-1]
    assert torch.allclose(both[len(alone):], alone, rtol=0, atol=1e-9)
    assert (tables.gain_reached(both, start, reward) > 0.999).all()


def test_every_figure_is_shown_and_small():
    shown = {name for path in DOCUMENTS
             for name in re.findall(r"figures/([\w.-]+)\)", path.read_text())}
    figures = {path.name: path.stat().st_size for path in (ROOT / "math" / "figures").iterdir()}
    # What a link to the book shows stands in no document, but in the head of each of its pages.
    shown |= set(re.findall(r"\w+\.png", (ROOT / "book" / "assets" / "page.html").read_text()))
    assert set(figures) <= shown and max(figures.values()) < 100_000
