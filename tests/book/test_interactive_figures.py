"""The figures that explain, in Chromium: what each shows is what its chapter's table says.

Of the tree, chapter 3's; of the clip, chapter 10's; of the square, chapter 15's picture; of the
quiz, the doctor itself; of the sliders, the coefficients of their equations.
book/record_quiz.py makes book/assets/quiz.json anew, book/record_batch.py the batch.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from three_policies.tests.support.book_pages import OUT, WIDTHS

ROOT = Path(__file__).resolve().parents[2]

PAGES = {"tree": "3-importance-weights", "square": "15-gradient-field",
         "push": "10-clip-around-mu", "quiz": "8-what-is-wrong"}


def table(text, first):
    """Return the rows of the first table whose head begins so: first cell → the others."""
    lines = text[text.index(f"| {first} "):].split("\n\n")[0].split("<!--")[0].splitlines()
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(rows[0], row)) for row in rows}


def chapter(name):
    return (ROOT / "math" / f"{PAGES[name]}.md").read_text()


def at(page, name, **state):
    """Set a figure's controls by the page's address; return the text of its values."""
    said = "&".join(f"{key}={value}" for key, value in state.items())
    page.evaluate(f"location.hash = '{said}'")
    page.wait_for_timeout(30)
    return page.locator(f'[data-widget="{name}"] .value').first.inner_text()


# ------------------------------------------------------------------------------------- the tree

def test_the_trees_errors_are_the_chapters(book, open_page):
    rows, page = table(chapter("tree"), "weight"), open_page(f"{PAGES['tree']}.html")
    for level in ("none", "token", "geometric", "sequence"):
        said = re.findall(r"\d\.\d{3}", at(page, "tree", level=level, C="∞"))
        assert said == [rows[level]["bias / ‖∇J‖"], rows[level]["variance"]], level


def test_the_arrow_ends_its_error_away_from_the_gradient():
    """Along and across are two sides of a triangle whose third is the error."""
    from three_policies.book import moving_exact
    found = moving_exact.tree_data()
    for level, caps in found["levels"].items():
        for cap, one in zip(found["C"], caps, strict=True):
            along, across, error, _ = one["numbers"]
            assert math.hypot(along - 1, across) == pytest.approx(error, abs=2e-4), (level, cap)
    sequence = found["levels"]["sequence"][0]["bars"]
    assert all(strip == pytest.approx(p, abs=2e-4)
               for strips, p in zip(sequence, found["pi"], strict=True) for strip in strips)
    assert found["levels"]["none"][0]["bars"] == [[mu] * len(y) for mu, y in
                                                  zip(found["mu"], found["y"], strict=True)]
    errors = [one["numbers"][2] for one in found["levels"]["token"]]
    assert found["C"][-1] == "1" and errors[-1] > errors[0], "a cap of 1 changes nothing"


def test_the_trees_strips_are_as_long_as_the_numbers(book, open_page):
    from three_policies.book import moving_exact
    found, page = moving_exact.tree_data(), open_page(f"{PAGES['tree']}.html")
    at(page, "tree", level="token", C=2)
    drawn = page.locator('[data-widget="tree"] rect.c1').evaluate_all(
        "(bars) => bars.map((bar) => +bar.getAttribute('width'))")
    wanted = [v for strips in found["levels"]["token"][found["C"].index("2")]["bars"]
              for v in strips]
    assert sorted(drawn) == pytest.approx(sorted(480 * v for v in wanted), abs=0.06)


# ------------------------------------------------------------------------------------- the clip

def test_the_needle_is_the_table_of_one_place(book, open_page):
    page, compared = open_page(f"{PAGES['push']}.html"), 0
    text = chapter("push").split("<!-- begin: words-place -->")[1]
    rows = table(text, "m (p = 0.025)")
    for m, row in rows.items():
        for clip in page.locator("[name=clip] option").all_text_contents():
            if re.fullmatch(r"[\d.]+", m):
                assert f"= {row[clip]}," in at(page, "push", m=m, clip=clip), (m, clip)
                compared += 1
    assert compared == 30


def test_the_needle_stops_and_flips_where_the_chapter_says(book, open_page):
    page = open_page(f"{PAGES['push']}.html")
    said = {m: at(page, "push", m=m, clip="bypass_ppo_clip") for m in (0.031, 0.032, 0.187, 0.188)}
    assert "+1.00, the right bracket becomes likelier" in said[0.031]
    assert "+0.03, the right" in said[0.032] and "+0.19, the right" in said[0.187]
    assert "−0.41, the right bracket becomes rarer" in said[0.188]
    figure = page.locator('[data-widget="push"]')
    assert figure.get_by_text("dropped by the clip").count() == 2
    assert figure.locator(".needle .c1").count() == 2, "the needle does not point the other way"
    at(page, "push", m=0.188, clip="bypass_low_open")
    assert figure.get_by_text("dropped by the clip").count() == 1
    assert figure.locator(".needle .ink").count() == 2


def test_the_three_cases_are_the_three_terms():
    """eq:clip-one-place: without a clip they are 1 − m, 1 − q(1 − m) and −(1 − q)(1 − m)."""
    from three_policies.book import moving_exact
    found = moving_exact.push_data()
    assert {0.005, 0.025, 0.03, 0.05, 0.2, 0.3} <= set(found["m"])
    for i, m in enumerate(found["m"]):
        whole = [1 - m, 1 - (1 - m) / 2, -(1 - m) / 2]
        kept = [0.025 / m >= 0.8, 0.975 / (1 - m) <= 1.2, True]
        assert found["clips"]["bypass_open"][i] == pytest.approx(whole, abs=1e-4), m
        assert found["clips"]["bypass_ppo_clip"][i] == pytest.approx(
            [x * k for x, k in zip(whole, kept)], abs=1e-4), m


# ------------------------------------------------------------------------------------- the square

def test_the_squares_paths_are_exact_ascent(book):
    """Recomputed alone, each μ by itself: the picture of chapter 15 calls `ascend` so."""
    from three_policies.book.moving_exact import PRESETS, STEPS, square
    from three_policies.book.tables import ascend
    start, noise, reward = square()
    data = json.loads((OUT / "data.js").read_text().removeprefix("const DATA = ").rstrip(";\n"))
    for name, lagging in (("decoupled_token_is", False), ("decoupled_seq_is", True)):
        path = torch.stack(ascend(PRESETS[name](), [start], [noise], reward[None],
                                  torch.tensor([lagging])))
        chances = torch.sigmoid(path[..., 1] - path[..., 0])[STEPS]
        shown = data["square"]["presets"][name]["lagging" if lagging else "fixed"]["path"]
        assert len(shown) == len(STEPS) and STEPS[-1] == 400
        torch.testing.assert_close(torch.tensor(shown).double(), chances, atol=1e-3, rtol=0)
    fixed = {name: of["fixed"]["gain"] for name, of in data["square"]["presets"].items()}
    lagging = {name: of["lagging"]["gain"] for name, of in data["square"]["presets"].items()}
    arrives = [name for name in fixed if fixed[name] == lagging[name] == 1]
    assert arrives == ["sequence ρ, C = ∞"], "only it ends at the optimum under both kinds of μ"
    end = data["square"]["presets"]["bypass_ppo_clip"]
    assert all(abs(of["path"][-1][1] - 0.40) < 0.01 for of in end.values())


def test_a_click_in_the_square_is_compared_with_the_end(book, open_page):
    page = open_page(f"{PAGES['square']}.html", reduced_motion="reduce")
    figure = page.locator('[data-widget="square"]')
    cells = figure.locator("td")
    assert set(cells.all_text_contents()) == {"?"}, "an end is shown before the guess"
    figure.locator("svg.square").scroll_into_view_if_needed()
    frame = figure.locator(".frame").bounding_box()
    page.mouse.click(frame["x"] + 0.5 * frame["width"], frame["y"] + 0.25 * frame["height"])
    end = re.search(r"([\d.]+), ([\d.]+): level (\S+) \(you: 0.50, 0.75\)",
                    " ".join(cells.all_text_contents()))
    off = math.hypot(float(end[1]) - 0.5, float(end[2]) - 0.75)
    assert float(figure.locator(".ask b").inner_text()) == pytest.approx(off, abs=0.012)
    assert figure.locator("[name=step]").input_value() == str(
        int(figure.locator("[name=step]").get_attribute("max")))
    before = cells.all_text_contents()
    page.mouse.click(frame["x"] + 9, frame["y"] + 9)
    assert cells.all_text_contents() == before, "a second click changes the guess"
    figure.locator("[name=preset]").select_option("disabled")
    assert figure.locator("[name=step]").input_value() == "0"
    figure.get_by_role("button", name="Play").click()
    assert "level −0.71" in " ".join(cells.all_text_contents()) and not page.complaints


def test_play_goes_through_the_steps(book, open_page):
    page = open_page(f"{PAGES['square']}.html")
    figure, step = page.locator('[data-widget="square"]'), page.locator("[name=step]")
    figure.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('[name=step]').value > 5")
    assert set(figure.locator("td").all_text_contents()) == {"?"}, "an end before the last step"
    page.wait_for_function("document.querySelector('[name=step]').value == 100")
    assert "level" in figure.locator("tbody").inner_text() and step.input_value() == "100"
    assert "0.08, 1.00: level −0.10" in figure.locator("tbody").inner_text()


def test_play_keeps_the_keyboards_focus(book, open_page):
    page = open_page(f"{PAGES['square']}.html")
    play = page.locator('[data-widget="square"]').get_by_role("button", name="Play")
    play.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('[name=step]').value > 5")
    assert play.evaluate("(button) => button === document.activeElement")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('[name=step]').value < 5")


# ------------------------------------------------------------------------------------- the quiz

@pytest.mark.made_here
def test_the_quizs_answers_are_the_doctors():
    from three_policies.book import record_quiz
    dumps = json.loads((ROOT / "book/assets/quiz.json").read_text())
    assert sorted(dump["cause"] for dump in dumps) == sorted(record_quiz.QUIZ)
    for dump in dumps:
        named = re.search(r"; (\S+) \(", dump["said"])
        assert (named[1] if named else "healthy") == dump["cause"]
    [shift] = [dump for dump in dumps if dump["cause"] == "shift"]
    report = record_quiz.planted("shift")
    assert report.in_short().split(": ")[0].split("; ")[1] == "shift (certain)"
    cloud = record_quiz.signature(report)["clouds"][0]["dots"]
    near = sum(abs(a - b) <= 2 for row, other in zip(cloud, shift["clouds"][0]["dots"])
               for a, b in zip(row, other))
    assert near > 0.9 * 2 * len(cloud[0]), "another dump than the recorded one"


def test_a_guess_opens_the_doctors_sentence(book, open_page):
    page = open_page(f"{PAGES['quiz']}.html")
    figure, dumps = page.locator('[data-widget="quiz"]'), json.loads(
        (ROOT / "book/assets/quiz.json").read_text())
    for i, dump in enumerate(dumps, 1):
        at(page, "quiz", dump=i)
        assert figure.locator("svg .frame").count() == 5
        assert figure.locator("details[open]").count() == 0, "the answer stands before the guess"
        wrong = next(cause for cause in ("cut", "raw") if cause != dump["cause"])
        figure.get_by_role("button", name=wrong, exact=True).click()
        assert figure.locator(".hit").inner_text() == dump["cause"]
        assert figure.locator(".taken").inner_text() == wrong
        assert dump["said"] in figure.locator("details").inner_text()
        assert figure.locator("details").is_visible() and not page.complaints


# ------------------------------------------------------------------------------------- all four

def test_the_four_stand_without_javascript_and_in_every_width(book, open_page):
    for name, path in PAGES.items():
        still = open_page(f"{path}.html", java_script_enabled=False)
        figure = still.locator(f'[data-widget="{name}"]')
        assert figure.locator("svg[role=img]").count() >= 2 and figure.locator("figcaption").count()
        assert "NaN" not in figure.inner_html() and "undefined" not in figure.inner_html()
        if name == "square":
            assert "?" not in figure.locator("tbody").inner_text(), "the ends are not shown"
        page = open_page(f"{path}.html")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                ends = page.locator(f'[data-widget="{name}"] svg').evaluate_all(
                    "(all) => all.map((one) => one.getBoundingClientRect().right)")
                assert max(ends) <= width - 8 and not page.complaints, (name, width, max(ends))


# ---------------------------------------------------------------------------- the figures that move

def readout(page, figure):
    return page.locator(f'[data-widget="{figure}"] .value').all_text_contents()


def test_the_sliders_numbers_are_the_tables(book, open_page):
    """They are equal at C = 2 and at every noise and length that table and slider share.

    A column is for Δ = 0.2 and T = 4 unless it says otherwise.
    """
    text = (ROOT / "math/14-methods-and-prices.md").read_text().split(
        "<!-- begin: prices-presets -->")[1].split("<!-- end")[0]
    table = [[cell.strip().replace("*", "").strip("`") for cell in line.split("|")[1:-1]]
             for line in text.split("\n")[1:-1]]
    # Of each row, the first name.
    rows = {row[0].split("`")[0]: dict(zip(table[0], row, strict=True)) for row in table}
    shown = {"decoupled_token_is": 0, "decoupled_seq_is": 1, "disabled": 3}
    page, compared = open_page("14-methods-and-prices.html"), 0
    for column in table[0][1:]:
        if found := re.fullmatch(r"(Δ|T) = ([\d.]+)", column):
            at = {"Δ": "0.2", "T": "4", found[1]: found[2]}
            page.evaluate(f"location.hash = 'C=2&noise={at['Δ']}&T={at['T']}'")
            for name, value in (("noise", at["Δ"]), ("T", at["T"])):
                page.wait_for_function(f"document.querySelector('[name={name}]').parentElement"
                                       f".textContent.endsWith('{value}')")
            for preset, i in shown.items():
                assert readout(page, "cap")[i] == rows[preset][column], (preset, column)
                compared += 1
    assert compared == 15


def test_sliders_snap_and_the_address_says_where(book, open_page):
    page = open_page("14-methods-and-prices.html#C=2.9&T=7.5")
    assert page.locator("[name=C]").evaluate("(slider) => slider.nextElementSibling.value") == "3"
    before = readout(page, "cap")
    page.locator("[name=C]").focus()
    page.keyboard.press("ArrowRight")
    assert "C=5" in page.url and "T=8" in page.url and readout(page, "cap") != before
    again = open_page("14-methods-and-prices.html#" + page.url.split("#")[1])
    assert readout(again, "cap") == readout(page, "cap")


def test_curves_are_the_equations_coefficients(book, open_page):
    """∂L/∂log π at r = 2 is computed by hand.

    It has PPO's clip and dual clip, GSPO's narrow clip and fourth root, CISPO's cap.
    """
    shown = readout(open_page("4-ppo.html#r=2"), "curves")
    numbers = [[float(x) for x in re.findall(r"-?\d+\.\d+", text.replace("−", "-"))]
               for text in shown]
    assert numbers[:5] == [[-1.0, 1.0], [0.0, 2.0], [0.0, 2.0], [0.0, 1.19], [-1.2, 1.2]]


def test_the_length_trap_at_ten_per_cent(book, open_page):
    product, mean = readout(open_page("6-correction.html#ratio=1.1&n=8"), "trap")
    assert f"{1.1 ** 8:.2f}" in product and "rejects" in product and "1.10" in mean


def test_the_batch_is_stepped_through(book, open_page):
    page = open_page("6-correction.html#step=3&preset=decoupled_k3_rs")
    cells = page.locator('[data-widget="batch"] td b')
    recorded = json.loads((ROOT / "book/assets/batch.json").read_text())
    assert cells.count() == sum(token is not None for row in recorded["tokens"] for token in row)
    rho = float(page.locator('[data-widget="batch"] td').first.inner_text().split()[-1])
    assert rho == pytest.approx(
        math.exp(recorded["old"][0][0] - recorded["rollout"][0][0]), abs=0.005)
    page.locator("[name=step]").press("End")
    assert 0 < page.locator('[data-widget="batch"] td.out').count() < cells.count(), (
        "nothing, or all, is rejected")


def test_without_javascript_the_figures_stand(book, open_page):
    prices = open_page("14-methods-and-prices.html", java_script_enabled=False)
    assert prices.locator('[data-widget="cap"] svg').count() >= 4
    batch = open_page("6-correction.html", java_script_enabled=False)
    assert batch.locator('[data-widget="batch"] td b').count() > 10
