"""The page "Which correction do I need?": what it says is in the tables, and its lines are right.

The page itself is looked at in Chromium, from disk, as tests/book/test_pages.py does.
"""

import ast
import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from three_policies.doctor.causes import CAUSES
from three_policies.interop.dialects import from_dialect
from three_policies.presets import PRESETS
from three_policies.tests.support.book_pages import OUT, WIDTHS
from three_policies.tests.support.trl_stub import MODES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def path():
    """The first question, the outcomes, and every answer in the page's order."""
    from three_policies.book import which
    question, outcomes = which.read()
    return question, outcomes, which.answers(question)


def evidence(path):
    return [one for answer in path[2] for one in answer.evidence]


# ---------------------------------------------------------------------------------------- the path

def test_at_most_six_questions_and_every_answer_leads_somewhere(path):
    from three_policies.book import which
    question, outcomes, answers = path
    given = yaml.safe_load((ROOT / "book/which.yaml").read_text())
    asked = [question.name, *(one.then.name for one in answers if one.then)]
    assert which.longest(question) <= 6 and set(asked) == set(given["questions"])
    assert len(given["questions"]) <= 6
    assert {one.take for one in answers if one.take} == set(outcomes), "an outcome nobody reaches"
    assert len({one.place for one in answers}) == len(answers)


def test_an_answer_with_two_ends_or_none_is_refused(tmp_path):
    from three_policies.book import which
    text = (ROOT / "book/which.yaml").read_text()
    for before, after in (("      take: repair\n", ""),
                          ("      take: repair\n", "      take: repair\n      then: {}\n")):
        assert text.count(before) == 1
        (broken := tmp_path / "which.yaml").write_text(text.replace(before, after))
        with pytest.raises(ValueError, match="bug must have either"):
            which.read(broken)


def test_every_cause_of_the_doctor_has_its_answer(path):
    """Those that lead on are the ones for which the doctor itself names a correction."""
    bug, honest = (one.causes for one in path[0].answers)
    assert sorted([*bug, *honest]) == sorted(CAUSES)
    named = {name for name, (_, remedy) in CAUSES.items()
             if re.search("(token|sequence) weights", remedy)}
    assert set(honest) == named - {"flips"} | {"numerics"}, "flips: replay the routing first"
    assert path[0].answers[0].take == "repair" and path[0].answers[1].then


def test_the_doctors_record_is_its_table(path):
    from three_policies.book import which
    table = (ROOT / "doctor/rates.txt").read_text()
    for one in path[0].answers:
        rows = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| \d+ \|", table, re.MULTILINE)
        rows = {name: (int(n), int(first)) for name, n, first in rows if name in one.causes}
        assert rows and set(one.causes) - set(rows) <= {
            "numerics", "below-grid", "dropout", "depth"}, (
            "healthy dumps, what the model alone shows, and what is named second")
        dumps, first = map(sum, zip(*rows.values()))
        said = which.doctor_rates([*one.causes])
        assert f"first in {first} of {dumps} dumps" in said
        largest, false = max((int(n), alarms) for n, alarms in re.findall(
            r"^\| (\d+) \|(?:[^|]+\|){2} ([^|]+) \|", table, re.MULTILINE))
        assert f"dumps of {largest} responses" in said
        assert said.endswith(f"false alarms on healthy dumps: {false}")


# ------------------------------------------------------------------------------------ the evidence

def test_what_the_text_says_of_an_evidence_is_the_studys_verdict(path):
    """Separable as chapter 11's generated tables have it, read from the text of the book."""
    text = "\n".join(p.read_text() for p in sorted((ROOT / "math").glob("*.md")))
    shown = {}
    for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")
                  if re.search(r"\| (not )?separable \|$", line)):
        found = re.fullmatch(r"`(\w+)` − `(\w+)`", cells[1])
        if found:
            shown[(cells[0].strip("`"), *found.groups())] = cells[-1], cells[3]
    compared = 0
    for one in evidence(path):
        assert one.found == one.key["finds"], one.key
        if one.key["study"] != "sixty-four":
            continue
        verdict, difference = shown[one.key["regime"], one.key["arm"], one.key["against"]]
        gap, said = (float(x.split("±")[0].replace("−", "-"))
                     for x in (difference, one.difference))
        assert verdict == ("not separable" if one.found == "open" else "separable"), one.key
        assert abs(gap - said) <= 0.0055 and (one.found != "worse" or gap < 0), one.key
        compared += 1
    assert compared > 15


def test_the_first_studys_verdict_is_its_interval(path):
    from three_policies.book import tables
    for one in evidence(path):
        if one.key["study"] == "nine" and "runs" not in one.key:
            rows = [tables.runs()[one.key["regime"]][one.key[x]] for x in ("arm", "against")]
            assert (one.found == "open") == ("not separable" in tables.difference(*rows)), one.key
        order = {"nine": "first", "sixty-four": "second"}[one.key["study"]]
        assert one.source.startswith(f"Chapter 11, {order} study, `"), one.key
    chosen = [one for one in evidence(path) if "runs" in one.key]
    assert [len(one.seeds[0]) for one in chosen] == [15]
    assert all(one.where.endswith(f"15 runs each ({one.key['runs']})") for one in chosen)


def test_means_are_those_of_the_rows(path):
    """Recomputed from the CSV files, without tables.py."""
    import csv
    rows = {name: list(csv.DictReader((ROOT / f"studies/{name}/results.csv").open()))
            for name in ("nine", "sixty-four")}
    for one in evidence(path):
        if "runs" in one.key:
            continue
        column = "area" if one.key["study"] == "sixty-four" else "final_accuracy"
        for of, values, below, mean in zip(("arm", "against"), one.seeds, one.below, one.means):
            mine = {row["seed"]: row for row in rows[one.key["study"]]
                    if (row["regime"], row["method"]) == (one.key["regime"], one.key[of])}
            assert sorted(values) == sorted(float(row[column]) for row in mine.values()), one.key
            assert below == sum(float(row[column]) < float(row["first_accuracy"])
                                for row in mine.values())
            assert mean == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def test_the_regime_in_words_is_what_was_declared(path):
    words = {(one.key["study"], one.key["regime"], one.key["arm"]): one.where
             for one in evidence(path)}
    assert words["sixty-four", "int4_fast_length_128", "decoupled_seq_is"] == (
        "128 tokens, 4-bit weights, on time, learning rate 0.00015, 10 runs each")
    assert words["nine", "staleness_8", "small_steps"] == (
        "9 tokens, 6-bit weights, 8 steps stale, learning rate 0.00015 against 0.0005, "
        "10 runs each")


def test_no_number_of_a_result_is_typed():
    """which.yaml has settings of other systems, names and regimes, and no result."""
    given = yaml.safe_load((ROOT / "book/which.yaml").read_text())

    def prose(node):
        if isinstance(node, dict):
            for key, value in node.items():
                if key not in ("verl", "skyrl", "trl", "evidence"):
                    yield from prose(value)
        elif isinstance(node, list):
            for value in node:
                yield from prose(value)
        else:
            yield str(node)

    typed = [x for text in prose(given)
             for x in re.findall(r"\d\.\d+|\d+ ?%", text.replace("verl 0.9.1", ""))]
    assert not typed


# ----------------------------------------------------------------------------------- the outcomes

def nested(lines):
    """Return dotted overrides as the mapping that Hydra makes of them."""
    found = {}
    for line in lines:
        key, value = line.strip("'").split("=", 1)
        *sections, last = key.lstrip("+").split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = yaml.safe_load(value)
    return found


def test_the_lines_for_verl_and_skyrl_are_the_preset(path):
    for name, outcome in path[1].items():
        expected = PRESETS[outcome["preset"]]()
        block = [line for line in outcome["verl"] if ".policy_loss." not in line]
        assert from_dialect(nested(block)) == expected, name
        assert ("skyrl" in outcome) == (not expected.bypass_mode), name
        if "skyrl" in outcome:
            assert from_dialect(nested(outcome["skyrl"])) == expected, name
        else:
            assert "otherwise" in outcome, name


def test_verl_gets_its_loss_for_bypass_mode(path):
    """verl trains reinforce by PPO's clip without it: the museum's reinforce_in_name_alone."""
    from three_policies.tests.interop.test_verl import BLOCK, LOSS
    lines = path[1]["bypass_pg"]["verl"]
    assert f"{LOSS}.loss_mode=bypass_mode" in lines
    assert f"'+{LOSS}.rollout_correction=${{{BLOCK}}}'" in lines


def test_the_lines_for_trl_are_the_preset(path):
    """MODES is what tests/interop/test_trl.py measures in TRL itself."""
    for name, outcome in path[1].items():
        config = PRESETS[outcome["preset"]]()
        if "trl" not in outcome:
            assert config.bypass_mode, name
            continue
        call: Any = ast.parse(f"f({', '.join(outcome['trl'])})", mode="eval").body
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        prefix = "vllm_importance_sampling_"
        if config.rollout_is is None:
            assert given == {f"{prefix}correction": False}
        else:
            level, cap = MODES[given[f"{prefix}mode"]]
            assert (level, cap) == (config.rollout_is, config.rollout_is_threshold)
            assert given == {f"{prefix}mode": f"{level}_truncate", f"{prefix}clip_max": cap}


# ---------------------------------------------------------------------------------------- the page

def test_each_path_opens_by_clicks_and_shows_its_numbers(book, path, open_page):
    """One path is open at a time, and the address says which."""
    page = open_page("which.html", width=800)
    leaves = [one for one in path[2] if one.take]
    by_place = {one.place: one for one in path[2]}
    for leaf in leaves:
        steps = leaf.place.split("-")
        for n in range(1, len(steps) + 1):
            fold = page.locator(f"[id='{'-'.join(steps[:n])}']")
            if fold.get_attribute("open") is None:
                fold.locator("> summary").click()
        opened = ["-".join(steps[:n]) for n in range(1, len(steps) + 1)]
        page.wait_for_function(
            "([end, all]) => location.hash === '#' + end && all === "
            "[...document.querySelectorAll('.choice[open]')].map((x) => x.id).join()",
            arg=[leaf.place, ",".join(opened)], timeout=5000)
        assert page.locator(".take:visible").count() == 1
        text = page.locator(".take:visible").inner_text()
        outcome = path[1][leaf.take]
        assert f"correction: {{preset: {outcome['preset']}}}" in text
        assert all(line in text for key in ("verl", "skyrl", "trl")
                   for line in outcome.get(key, ()))
        assert text.count("no such setting") == sum(x not in outcome for x in ("skyrl", "trl"))
        for place in opened:
            shown = page.locator(f"[id='{place}'] > .evidence").all_inner_texts()
            assert len(shown) == len(by_place[place].evidence)
            for words, one in zip(shown, by_place[place].evidence):
                parts = (*one.means, one.difference, one.where, one.endpoint)
                assert all(part in words for part in parts), (place, words)
            dots = page.locator(f"[id='{place}'] > .evidence circle").count()
            assert dots == sum(len(x) for e in by_place[place].evidence for x in e.seeds)
    assert not page.complaints


def test_a_link_opens_its_path_and_nothing_is_too_wide(book, path, open_page):
    for width in WIDTHS:
        page = open_page("which.html#honest-rounded-medium-no", width=width)
        assert page.locator(".take:visible").get_attribute("data-take") == "bypass_pg"
        assert page.locator("details.choice[open]").count() == 4
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.locator(".take .listing:visible").evaluate_all(
            "(all) => all.filter((x) => x.scrollWidth > x.clientWidth + 1).length")
        assert not boxes and not page.complaints
        assert page.url.endswith("#honest-rounded-medium-no")


def test_it_works_without_javascript(book, open_page):
    page = open_page("which.html", java_script_enabled=False)
    page.locator("#honest > summary").click()
    page.locator("#honest-fine > summary").click()
    assert page.locator(".take:visible").get_attribute("data-take") == "token"
    page.locator("#honest-stale > summary").click()
    assert not page.locator("#honest-fine > .take").is_visible(), "two paths are open"


def test_headings_are_in_order_and_the_chapters_are_linked(book):
    html = (OUT / "which.html").read_text()
    levels = [int(x) for x in re.findall(r"<h([1-6])", html)]
    assert levels[0] == 1 and all(b <= a + 1 for a, b in pairwise(levels))
    for chapter in ("6-correction", "10-clip-around-mu", "11-evidence", "8-what-is-wrong"):
        assert f'href="{chapter}.html' in html, chapter
    for chapter in ("14-methods-and-prices", "11-evidence"):                      # and link it
        assert 'href="which.html">' in (OUT / f"{chapter}.html").read_text(), chapter
