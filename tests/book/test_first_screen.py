"""The first screen of the reading edition: what its controls show is what the study's table says.

Needs what tests/book/test_pages.py needs.
"""

import csv
import json
import math
import re
import statistics
import struct

import pytest
import yaml

from three_policies.book.record_response import SIZES
from three_policies.tests.support.book_pages import OUT, ROOT

RECORDED = json.loads((ROOT / "book/assets/response.json").read_text())["sizes"]
REGIMES = {size: regime for size, (regime, *_) in SIZES.items()}
NAMED = {"matched": "equal weights", "decoupled_seq_is": "sequence weights",
         "naive": "no correction", "bypass_ppo_clip": "bypass"}
H, T, B = 230, 26, 34                  # of a picture: its height, and what its axis leaves free


def rows(size):
    """Return {arm: its rows of the table} at a k3: where weights are equal, that arm alone."""
    with (ROOT / "studies/sixty-four/results.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["regime"] == REGIMES[size]]
    arms = ["matched"] if size == "0" else [arm for arm in NAMED if arm != "matched"]
    return {arm: of for arm in arms if (of := [row for row in found if row["method"] == arm])}


def accuracies(path):
    """Return the accuracies that an SVG path goes through."""
    return [(H - B - float(y)) / (H - B - T) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]


def look(page):
    """Return {a line's name: the number beside it}, the thin lines, the thick ones."""
    picture = page.locator("[data-widget=sampler]")
    beside = picture.locator("svg text.value").evaluate_all(
        "(all) => all.map((x) => [x.previousElementSibling.textContent, x.textContent])")
    thin, thick = (picture.locator(f"path.line{kind}").evaluate_all(
        "(all) => all.map((x) => x.attributes.d.value)") for kind in (".thin", ":not(.thin)"))
    return dict(beside), list(map(accuracies, thin)), list(map(accuracies, thick))


def check(page, size, bypass):
    """Compare names, numbers, each seed's curve and each mean with the table."""
    arms = {arm: of for arm, of in rows(size).items() if bypass or arm != "bypass_ppo_clip"}
    numbers, thin, thick = look(page)
    assert numbers == {NAMED[arm]: f"{statistics.mean(float(row['area']) for row in of):.2f}"
                       for arm, of in arms.items()}
    curves = [[[float(x) for x in (row["first_accuracy"], *row["curve"].split())] for row in of]
              for of in arms.values()]
    assert len(thin) == 10 * len(arms) and len(thick) == len(arms)
    for found, known in ((thin, sum(curves, [])),
                         (thick, [[statistics.mean(at) for at in zip(*of)] for of in curves])):
        for curve in known:
            assert any(line == pytest.approx(curve, abs=5e-4) for line in found)
    return numbers


def test_each_control_moved_shows_the_tables_numbers(book, open_page):
    page, shown = open_page("index.html"), {}
    for size in REGIMES:
        page.locator(f"[name=k3][value='{size}']").check(force=True)
        for bypass in (False, True):
            page.locator("[name=bypass]").set_checked(bypass)
            shown[size, bypass] = check(page, size, bypass)
            note = page.get_by_text("Bypass was not run at this size")
            assert note.count() == (bypass and size != "0.013")
    assert [shown[size, False]["no correction"] for size in [*REGIMES][1:]] == [
        "0.76", "0.70", "0.63"]
    assert shown["0.013", True]["bypass"] == "0.28" and not page.complaints
    page.locator("[name=k3][value='0.005']").focus()
    page.keyboard.press("ArrowRight")
    assert "k3=0.013" in page.url and "bypass=true" in page.url
    check(open_page("index.html#k3=0.005&bypass=true"), "0.005", True)


def test_a_size_is_the_k3_of_its_runs_and_nearly_that_of_its_response():
    """Both sides have the same k3 within a quarter, and all runs one learning rate."""
    with (ROOT / "studies/sizes/results.csv").open() as file:
        measured = {row["row"]: float(row["k3_exact"]) for row in csv.DictReader(file)}
    study = yaml.safe_load((ROOT / "studies/sixty-four/declared.yaml").read_text())
    assert len({study["regimes"][regime]["train.lr"] for regime in REGIMES.values()}) == 1
    for size, (_, arm, row, _) in [*SIZES.items()][1:]:
        of_runs = statistics.mean(float(x["k3"]) for x in rows(size)[arm])
        assert float(f"{of_runs:.1g}") == float(size) or f"{of_runs:.2g}" == size
        assert measured[row] == pytest.approx(float(size), rel=0.3)


def test_the_tiles_are_the_recorded_response(book, open_page):
    page = open_page("index.html")
    for size, of in RECORDED.items():
        page.locator(f"[name=k3][value='{size}']").check(force=True)
        tiles = page.locator(".tiles .tile").evaluate_all(
            "(all) => all.map((x) => [...x.children].map((part) => part.textContent))")
        assert len(tiles) == len(of["tokens"]) == 64
        for (token, *shown), *known in zip(tiles, of["tokens"], of["rollout"], of["old"],
                                           strict=True):
            assert token == known[0]
            assert [float(x.replace("−", "-")) for x in shown] == pytest.approx(
                known[1:], abs=0.00501)
        weight = page.locator("[data-widget=sampler] p.value b").text_content()
        assert float(weight) == pytest.approx(
            math.exp(sum(of["old"]) - sum(of["rollout"])), abs=6e-4)


def test_what_was_recorded_is_further_apart_at_a_larger_k3():
    apart = [sum((a - b) ** 2 for a, b in zip(of["old"], of["rollout"], strict=True))
             for of in RECORDED.values()]
    assert apart == sorted(apart) and apart[0] < 1e-6
    assert all(x <= 0 for of in RECORDED.values() for x in of["rollout"] + of["old"])


def test_without_javascript_the_picture_and_the_doors_are_there(book, open_page):
    page = open_page("index.html", java_script_enabled=False)
    assert check(page, "0.013", False) and page.locator(".tiles .tile").count() == 64
    doors = page.locator(".door").evaluate_all("(all) => all.map((x) => x.getAttribute('href'))")
    assert doors[-2:] == ["museum.html", book.CHAPTERS[0].stem + ".html"]
    assert all((OUT / door).is_file() for door in doors)
    exhibits = (OUT / "museum.html").read_text().count('<article class="card"')
    assert page.locator(".door b").all_text_contents()[-2] == f"{exhibits} bugs that shipped"


def test_the_first_screen_is_short_and_each_chapter_says_what_it_is_for(book, open_page):
    page = open_page("index.html", width=1400)
    said = page.locator(".first > p").text_content()
    assert max(len(sentence.split()) for sentence in re.split(r"(?<=[.?!])\s", said)) <= 20
    last = page.locator(".door").last.bounding_box()
    assert last["y"] + last["height"] <= 900, "the doors are below the first screen"
    listed = page.locator(".index ol .sum")
    assert listed.count() == len(book.CHAPTERS)
    for path, sentence in zip(book.CHAPTERS, listed.all_text_contents(), strict=True):
        start, text = (re.sub(r"\W", "", x).lower()
                       for x in (" ".join(sentence.split()[:4]), path.read_text()))
        assert 6 < len(sentence.split()) < 60 and start in text, path.name


def test_whoever_shares_a_link_shares_a_title_a_sentence_and_a_picture(book):
    for path in OUT.glob("*.html"):
        head = path.read_text().split("</head>")[0]
        if "http-equiv" in head:               # where a chapter once was
            continue
        meta = dict(re.findall(r'<meta (?:name|property)="(.*?)" content="(.*?)">', head))
        assert re.search(r"<title>[^<]{3,}</title>", head) and meta["og:title"], path.name
        assert 20 < len(meta["description"]) < 260, (path.name, meta["description"])
        assert not re.search(r"[\\<>\x02-\x05]", meta["description"]), path.name
        assert meta["og:description"] == meta["description"]
        assert (OUT / meta["og:image"]).is_file()
    picture = (OUT / "preview.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (1200, 630) and len(picture) < 100_000
