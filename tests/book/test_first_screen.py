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

from three_policies.tests.support.book_pages import OUT, ROOT
from three_policies.training.tasks import balanced

RECORDED = json.loads((ROOT / "book/assets/response.json").read_text())["widths"]
REGIMES = {"float32": "int4_slow", "6": "int6", "5": "int5", "4": "int4_slow"}
NAMED = {"matched": "equal weights", "decoupled_seq_is": "sequence weights",
         "naive": "no correction", "bypass_ppo_clip": "bypass"}
H, T, B = 230, 26, 34                  # of a picture: its height, and what its axis leaves free


def rows(width):
    """Return {arm: its rows of the table} at a width: where weights are equal, that arm alone."""
    with (ROOT / "studies/sixty-four/results.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["regime"] == REGIMES[width]]
    arms = ["matched"] if width == "float32" else [arm for arm in NAMED if arm != "matched"]
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


def check(page, width, bypass):
    """Compare names, numbers, each seed's curve and each mean with the table."""
    arms = {arm: of for arm, of in rows(width).items() if bypass or arm != "bypass_ppo_clip"}
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
    for width in REGIMES:
        page.locator(f"[name=bits][value='{width}']").check(force=True)
        for bypass in (False, True):
            page.locator("[name=bypass]").set_checked(bypass)
            shown[width, bypass] = check(page, width, bypass)
            note = page.get_by_text("Bypass was not run at this width")
            assert note.count() == (bypass and width != "4")
    assert [shown[width, False]["no correction"] for width in "654"] == ["0.76", "0.70", "0.63"]
    assert shown["4", True]["bypass"] == "0.28" and not page.complaints
    page.locator("[name=bits][value='5']").focus()
    page.keyboard.press("ArrowRight")
    assert "bits=4" in page.url and "bypass=true" in page.url
    check(open_page("index.html#bits=5&bypass=true"), "5", True)


def test_all_widths_have_one_learning_rate_and_their_bits():
    study = yaml.safe_load((ROOT / "studies/sixty-four/declared.yaml").read_text())
    regimes = [study["regimes"][regime] for regime in REGIMES.values()]
    assert len({regime["train.lr"] for regime in regimes}) == 1
    assert all(regime["rollout.quantize_bits"] == int(width)
               for width, regime in zip(REGIMES, regimes, strict=True) if width != "float32")


def test_the_tiles_are_the_recorded_response(book, open_page):
    page = open_page("index.html")
    for width, of in RECORDED.items():
        page.locator(f"[name=bits][value='{width}']").check(force=True)
        tiles = page.locator(".tiles .tile").evaluate_all(
            "(all) => all.map((x) => [...x.children].map((part) => part.textContent))")
        assert len(tiles) == len(of["tokens"]) == 65
        for (token, *shown), *known in zip(tiles, of["tokens"], of["rollout"], of["old"],
                                           strict=True):
            assert token == known[0].replace("<eos>", "end")
            assert [float(x.replace("−", "-")) for x in shown] == pytest.approx(
                known[1:], abs=0.00501)
        weight = page.locator("[data-widget=sampler] p.value b").text_content()
        assert float(weight) == pytest.approx(
            math.exp(sum(of["old"]) - sum(of["rollout"])), abs=6e-4)


@pytest.mark.parametrize("width", RECORDED)
def test_what_was_recorded_is_a_response(width):
    """Its reward is the task's; in float32 both sides agree, and fewer bits are further apart."""
    of = RECORDED[width]
    word = of["prompt"].removesuffix(">") + "".join(of["tokens"][:-1])
    assert of["tokens"][-1] == "<eos>" and of["reward"] == balanced(word, 3)
    assert all(x <= 0 for x in of["rollout"] + of["old"])
    apart = {bits: sum((a - b) ** 2 for a, b in zip(one["old"], one["rollout"], strict=True))
             for bits, one in RECORDED.items()}
    assert apart["float32"] < 1e-6 < apart["6"] < apart["5"] < apart["4"]


def test_without_javascript_the_picture_and_the_doors_are_there(book, open_page):
    page = open_page("index.html", java_script_enabled=False)
    assert check(page, "4", False) and page.locator(".tiles .tile").count() == 65
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
