"""The page as a page: captions, folded code, contents, cards, order of headings, search, print.

Each page is looked at in Chromium, from disk, as tests/book/test_pages.py does.
"""

import io
import json
import re
import struct
import zlib
from itertools import pairwise

import pytest
from matplotlib.image import imread

from three_policies.tests.support.book_pages import OUT, ROOT, WIDTHS

CHAPTERS = [path.stem for path in sorted((ROOT / "math").glob("[0-9]*.md"))]
DOCUMENTS = [*CHAPTERS, *(path.stem for path in sorted((ROOT / "math").glob("appendix-*.md")))]
IMAGE = re.compile(r"^!\[(.*)\]\(figures/(.*)\)\n+\*(?!\*)", re.MULTILINE)


def pages():
    """Return the pages that say something, and not only where a chapter has moved."""
    return sorted(path.name for path in OUT.glob("*.html")
                  if "http-equiv" not in path.read_text())


def others():
    """Return the pages, but of those that show a file, which are all made alike, only two."""
    sources = [name for name in pages() if re.search(r"\.\w+\.html$", name)]
    return [*(name for name in pages() if name not in sources), sources[0], sources[-1]]


def index():
    pages = json.loads((OUT / "search.js").read_text().removeprefix("const INDEX = ").rstrip(";\n"))
    return [(f"{page}#{place}", f"{name} · {title}", text)
            for page, name, parts in pages for place, title, text in parts]


# --------------------------------------------------------------------------------------- pictures

def size_of(file):
    """Return the width and height of a PNG or an SVG in pixels."""
    if file.suffix == ".png":
        return struct.unpack(">2I", file.read_bytes()[16:24])
    return tuple(map(int, re.search(r'width="(\d+)" height="(\d+)"', file.read_text()).groups()))


def test_a_picture_and_its_caption_are_a_figure_of_the_page_s_width(book, open_page):
    """An SVG stands in the page itself, line by line that of math/figures/."""
    seen, page = 0, open_page("index.html")
    for name in DOCUMENTS:
        images = IMAGE.findall((ROOT / f"math/{name}.md").read_text())
        if not images:
            continue
        page.goto((OUT / f"{name}.html").as_uri())
        for alt, file in images:
            if file in book.IN_PLACE:
                own = page.locator(f"[data-widget={book.IN_PLACE[file]}] > .caption")
                assert own.inner_text().endswith("."), f"{file} lost its caption"
                continue
            said = json.dumps(alt, ensure_ascii=False)
            image = page.locator(
                f".wide > figure > :is(img[alt={said}], svg[role=img][aria-label={said}])")
            assert image.count() == 1, f"{file} of {name} is no figure of the page's width"
            assert len(image.locator("+ figcaption").inner_text()) > 40, file
            path = ROOT / "math/figures" / file
            size = size_of(path)
            assert image.get_attribute("title") is None
            assert [image.get_attribute(x) for x in ("width", "height")] == [*map(str, size)]
            if file.endswith(".svg"):
                assert path.read_text().split("\n", 1)[1].strip() in (
                    OUT / f"{name}.html").read_text(), file
            # At its own width, which is more than the text's, where the page has room for it.
            assert image.bounding_box()["width"] == min(size[0], 1330), file
            seen += 1
        assert not page.locator(
            "p > img, p > svg, p > figure, figure em:only-child").count(), name
    assert seen > 15


@pytest.mark.parametrize("how", ["system", "switch"])
def test_in_the_dark_a_picture_is_dark_and_keeps_its_colours(book, open_page, how):
    """Chapter 1's picture, an SVG: white becomes the page's colour, black light, blue stays blue.

    Chapter 8's, a PNG, is turned by the page.
    """
    page = open_page("1-three-policies.html", color_scheme="dark" if how == "system" else "light")
    if how == "switch":
        page.click("#dark")
    image = page.locator("figure > .drawn").first
    image.scroll_into_view_if_needed()
    drawn = (imread(io.BytesIO(image.screenshot(animations="disabled")))[..., :3] * 255).round()
    page_colour = [float(x) for x in re.findall(
        r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))]
    near = abs(drawn - page_colour).max(-1) <= 3
    assert near.mean() > 0.7, "the picture's ground is not the page's"
    assert (drawn.min(-1) > 190).sum() > 2000, "the text is not light"
    assert (drawn[..., 2] > drawn[..., 0] + 80).sum() > 2000, "blue is no longer blue"
    page.goto((OUT / "8-what-is-wrong.html").as_uri())
    shown = page.locator("figure > img").first
    turned = shown.evaluate("(image) => getComputedStyle(image).filter")
    assert "invert(1)" in turned


# ------------------------------------------------------------------------------------------- code

def test_code_is_open_where_it_cites_the_equation(book):
    """Each part beside an equation opens at its first line and at every line with the label."""
    folded = 0
    for label, page in book.equations().items():
        for part in [*book.citing(label, book.FILES), *book.citing(label, book.proving_files())]:
            html, source = book.listing(part, label), (ROOT / part.file).read_text().splitlines()
            lines = [int(n) for n in re.findall(r'data-n="(\d+)"', html)]
            assert lines == [*range(part.first, part.last + 1)], "a line is missing, or twice there"
            opened = {int(n) for n in re.findall(
                r'data-n="(\d+)"', re.sub("<details.*?</details>", "", html, flags=re.DOTALL))}
            cites = {n for n in lines if label in book.LABEL.findall(source[n - 1])}
            assert {part.first, *cites} <= opened, (part.name, label)
            assert len(opened) <= 21 + len(cites) * 11 or len(opened) == len(lines), part.name
            body = range(part.docstring.stop or part.line, part.last + 1)
            assert not body or opened & {*body}, f"nothing that {part.name} does is to be seen"
            folded += len(lines) - len(opened)
        assert f'data-eq="{label}"' in (OUT / page).read_text()
    assert folded > 1000


# ------------------------------------------------------------------------------ ways through a page

def test_the_contents_are_at_the_side_where_there_is_room_and_else_above_the_text(book, open_page):
    page = open_page("6-correction.html", 1700)
    titles = re.findall(r"^## (.*)$", (ROOT / "math/6-correction.md").read_text(), re.MULTILINE)
    links, toc = page.locator(".toc a"), page.locator(".toc")
    assert [re.sub(r"\W", "", text) for text in links.all_inner_texts()] == [
        re.sub(r"\W", "", title) for title in titles]
    text = page.locator(".row .before").first.bounding_box()
    assert toc.bounding_box()["x"] + toc.bounding_box()["width"] < text["x"]
    links.nth(2).click()
    page.wait_for_function("scrollY > 1000")
    page.wait_for_function("document.querySelector('.toc [aria-current=true]')")
    assert 0 < toc.bounding_box()["y"] < 200, "it is scrolled away"
    assert page.locator(".toc [aria-current=true]").all_inner_texts() == [
        links.nth(2).inner_text()]
    for width in WIDTHS:
        page = open_page("6-correction.html", width)
        box, text = (page.locator(x).first.bounding_box() for x in (".toc", ".row .before"))
        assert box["y"] + box["height"] <= text["y"] and box["height"] < 120


def test_headings_are_in_order_and_every_page_has_its_landmarks(book):
    for name in pages():
        html = re.sub("<pre.*?</pre>", "", (OUT / name).read_text(), flags=re.DOTALL)
        levels = [int(n) for n in re.findall(r"<h([1-6])\b", html)]
        assert levels and levels[0] == 1 and levels.count(1) == 1, (name, levels)
        skips = [(a, b) for a, b in pairwise(levels) if b > a + 1]
        assert not skips, f"{name}: a heading of level {skips[0][1]} below one of {skips[0][0]}"
        unnamed = re.findall(r"<nav(?![^>]*aria-label)", html)
        assert html.count("<main") == html.count("<footer") == 1 and not unnamed, name


def test_the_first_tab_skips_to_the_text(book, open_page):
    page = open_page("6-correction.html")
    skip = page.locator(".skip")
    assert skip.bounding_box()["y"] < 0
    page.keyboard.press("Tab")
    assert skip.evaluate("(link) => link === document.activeElement")
    page.wait_for_function("document.querySelector('.skip').getBoundingClientRect().top > 0")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('main') !== null")


def test_a_reference_says_on_a_card_what_it_is(book, open_page):
    """The card opens by pointer, keyboard or first tap, and is a title without JavaScript."""
    entry = next(e for e in book.references() if e["id"] == "2510.18855")
    where = f".before > p a[href='references.html#{entry['id']}']"

    def is_shown(page):
        card = page.locator("#card")
        card.wait_for(state="visible")
        box = card.bounding_box()
        assert entry["title"] in card.inner_text() and str(entry["year"]) in card.inner_text()
        assert entry["authors"].split(", ")[0] in card.inner_text()
        assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
        assert 0 <= box["y"] and box["y"] + box["height"] <= 900

    page = open_page("6-correction.html")
    page.locator(where).first.hover()
    is_shown(page)
    page.locator("h1").hover()
    assert not page.locator("#card").is_visible()
    page.locator(where).first.focus()
    is_shown(page)
    assert entry["title"] in page.locator(where).first.evaluate("(link) => link.ariaDescription")
    page.keyboard.press("Escape")
    assert not page.locator("#card").is_visible()
    phone = open_page("6-correction.html", 400, has_touch=True, is_mobile=True)
    phone.locator(where).first.tap()
    is_shown(phone)
    phone.locator(where).first.tap()
    phone.wait_for_url("**/references.html#*")
    plain = open_page("6-correction.html", java_script_enabled=False)
    assert entry["title"] in plain.locator(where).first.get_attribute("title")


# -------------------------------------------------------------------------------- figures that move

def test_sliders_say_their_value(book, open_page):
    sliders, page = 0, open_page("index.html")
    for name in others():
        if "data-widget" not in (OUT / name).read_text():
            continue
        page.goto((OUT / name).as_uri())
        for slider in page.locator("main [type=range]").all():
            said = slider.get_attribute("aria-valuetext")
            assert said == slider.evaluate("(s) => s.nextElementSibling.value"), name
            slider.focus()
            page.keyboard.press("ArrowRight" if slider.input_value() == "0" else "ArrowLeft")
            assert slider.get_attribute("aria-valuetext") not in (said, ""), name
            sliders += 1
    assert sliders >= 6


@pytest.mark.parametrize("width", [400, 1400])
def test_a_linked_state_scrolls_to_its_own_figure(book, open_page, width):
    batch, trap = "step=3&preset=decoupled_k3_rs", "ratio=1.1&n=8"
    for name, state, figure in (
            ("14-methods-and-prices", "C=2.9&T=7.5", "cap"), ("4-ppo", "r=2", "curves"),
            ("6-correction", f"{batch}&{trap}", "trap"),
            ("6-correction", f"{trap}&{batch}", "batch")):
        page = open_page(f"{name}.html#{state}", width)
        page.wait_for_load_state("load")
        page.wait_for_timeout(200)
        top = page.locator(f"[data-widget={figure}]").bounding_box()["y"]
        assert 0 <= top < 200, f"{state} shows {figure} at {top}"
        page.context.close()


def test_an_address_that_is_no_state_of_a_figure_does_no_harm(book, open_page):
    names = [name for name in others() if "data-widget" in (OUT / name).read_text()]
    assert len(names) > 6
    for name in names:
        for first, then in (("100%", "toString"), ("toString", "100%")):
            page = open_page(f"{name}#{first}")
            page.evaluate(f"location.hash = '{then}'")
            page.wait_for_timeout(50)
            assert page.url.endswith(f"#{then}") and not page.complaints, (name, page.complaints)
            page.context.close()


def test_an_address_within_a_fold_opens_it(book, open_page):
    page = open_page("which.html#honest-stale-yes")
    assert page.locator("#honest-stale-yes > .take").is_visible()
    page.evaluate("location.hash = 'bug'")
    page.wait_for_function("document.querySelector('#bug').open")
    assert not page.locator("#honest-stale-yes").is_visible()
    page.go_back()
    page.wait_for_function("document.querySelector('#honest').open")
    assert page.locator("#honest-stale-yes > .take").is_visible() and not page.complaints


# ----------------------------------------------------------------------------------------- search

def test_the_search_has_text_before_code_before_tests(book, open_page):
    def kind(href):
        return 2 if href.startswith("tests-") else 1 if ".py.html" in href else 0

    page = open_page("index.html")
    for words in ("weights", "mask", "ratio", "rejection"):
        page.fill("#search", words)
        kinds = [kind(link.get_attribute("href")) for link in page.locator("#found a").all()]
        assert kinds == sorted(kinds) and {0, 1, 2} == set(kinds), (words, kinds)
    page.fill("#search", "importance_weights")
    found = page.locator("#found a").evaluate_all("(all) => all.map((a) => a.textContent)")
    assert any(text.startswith("importance_weights (correction.py)") for text in found)


def test_what_is_searched_is_plain(book):
    """No command of LaTeX, no mark of Markdown, no tag; a formula is read as it is drawn."""
    texts = {href: title + " " + text for href, title, text in index()}
    for href, text in texts.items():
        marks = re.findall(r"\\[a-z]+|\$[a-z\\]|`|\]\(|[\x02-\x05]|</\w+>|<\w+ \w+=|&\w+;", text)
        marks += [] if ".py." in href else re.findall(r"\*\*[a-z]", text)
        assert not marks, (href, marks)
    assert "π_θ" in texts["1-three-policies.html#three-policies"]
    assert "eq:tis" in texts["6-correction.html#truncation"]


def test_arrows_move_through_the_results(book, open_page):
    page = open_page("6-correction.html")
    page.keyboard.press("/")
    page.keyboard.type("truncation")
    links = page.locator("#found a")

    def at():
        return links.evaluate_all("(all) => all.indexOf(document.activeElement)")

    assert at() == -1 and links.count() > 3
    steps = []
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
        steps.append(at())
    assert steps == [0, 1, 0, -1, -1, 0]
    assert not page.evaluate("scrollY"), "the arrows scroll the page"
    href = links.nth(0).get_attribute("href")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/{href}")
    page.keyboard.press("/")
    page.keyboard.type("mask")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    assert not page.locator("#found").is_visible() and page.input_value("#search") == ""


def test_a_snippet_begins_and_ends_with_a_word(book, open_page):
    page = open_page("index.html")
    page.fill("#search", "truncated")
    words = {word for _, title, text in index() for word in (title + " " + text).split()}
    for text in page.locator("#found a").evaluate_all(
            "(all) => all.map((a) => a.lastChild.textContent)"):
        assert {*text.split()} <= words | {"…"}, text


# -------------------------------------------------------------------------------- paper, and weight

def printed(pdf):
    """Return of each page of a PDF how often it writes, and how many pictures it has."""
    objects = {m[1]: m[2] for m in re.finditer(rb"\n(\d+) 0 obj\n(.*?)\nendobj", pdf, re.DOTALL)}
    sheets = [objects[re.search(rb"/Contents (\d+) 0 R", one)[1]] for one in objects.values()
              if re.search(rb"/Type /Page\b", one)]
    drawn = [zlib.decompress(one.split(b"stream\n", 1)[1].rsplit(b"\nendstream", 1)[0])
             for one in sheets]
    return [(one.count(b"Tj") + one.count(b"TJ"), one.count(b" Do")) for one in drawn]


@pytest.mark.long
def test_no_printed_page_is_empty(book, open_page):
    page = open_page("index.html")
    for name in others():
        page.goto((OUT / name).as_uri())
        sheets = printed(page.pdf(format="A4"))
        assert sheets and all(words > 0 or pictures for words, pictures in sheets), (name, sheets)
        assert all(words > 60 or pictures for words, pictures in sheets[1:-1]) or (
            name == "references.html"), f"a page of {name} is almost empty: {sheets}"


def test_paper_has_the_answers_and_asks_for_no_guess(book, open_page):
    for name, answer in (("museum", ".card details p"), ("which", ".take dl"),
                         ("8-what-is-wrong", "[data-widget=quiz] details p")):
        page = open_page(f"{name}.html")
        answers = page.locator(answer).all()
        assert answers and not any(one.is_visible() for one in answers), name
        page.emulate_media(media="print")
        assert all(one.is_visible() and one.inner_text() for one in answers), name
        assert not page.locator(":is(.guess, button):visible").count(), name


def test_paper_has_the_ends_in_the_square(book, open_page):
    page = open_page("15-gradient-field.html")
    ends = page.locator("[data-widget=square] td")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert all(re.match(r"\d\.\d\d, \d\.\d\d: level ", text) for text in ends.all_inner_texts())
    assert page.locator("[data-widget=square] svg.square").count() == 2
    page.emulate_media(media="print")
    assert not page.locator(":is(.ask, button):visible").count()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert {*ends.all_inner_texts()} == {"?"}, "printing gives the ends away"


def test_a_page_is_below_a_megabyte_and_the_figures_numbers_too(book):
    sizes = {path.name: path.stat().st_size for path in OUT.iterdir() if path.is_file()}
    assert max(sizes[name] for name in pages()) < 1_000_000
    assert sizes["data.js"] < 1_000_000 and sizes["search.js"] < 500_000


@pytest.mark.parametrize("column, cell", [
    ("area, difference, 95 %", "−0.154 ± 0.011"), ("k3", "1.1e-03"), ("k3", "5.5e-10")])
def test_a_column_of_an_appendix_sorts_by_its_first_number_and_back(book, open_page, column, cell):
    page = open_page("appendix-studies.html")
    table = page.locator("table", has=page.get_by_text(cell, exact=True))
    at = table.locator("th").all_inner_texts().index(column)

    def numbers():
        return [float(re.search(r"-?\d+\.\d+(e-\d+)?", text.replace("−", "-"))[0])
                for text in table.locator(f"tbody td:nth-child({at + 1})").all_inner_texts()]

    as_written = numbers()
    table.locator("th").nth(at).click()
    assert numbers() == sorted(as_written, reverse=True) != as_written
    table.locator("th").nth(at).click()
    assert numbers() == sorted(as_written)


def test_a_guess_in_the_museum_opens_its_own_answer(book, open_page):
    page = open_page("museum.html")
    card, other = page.locator(".card").nth(2), page.locator(".card").nth(3)
    wrong = card.locator("button[data-right='0']").first
    wrong.click()
    assert card.locator("details").get_attribute("open") is not None
    assert wrong.get_attribute("class") == "taken" and card.locator("button:enabled").count() == 0
    assert card.locator(".hit").evaluate_all("(all) => all.map((x) => x.dataset.right)") == ["1"]
    assert other.locator("details[open], .hit").count() == 0 and not page.complaints


def test_search_finds_truncation_in_chapter_6(book, open_page):
    page = open_page("index.html")
    page.fill("#search", "truncation")
    assert page.locator("#found a").first.get_attribute("href") == "6-correction.html#truncation"
    page.press("#search", "Enter")
    page.wait_for_url("**/6-correction.html#truncation")
    page.fill("#search", "no such word anywhere")
    assert not page.locator("#found a").count()


@pytest.mark.parametrize("metric", ["chi2_seq", "rollout_is_raw_mean"])
def test_search_finds_a_metric_by_the_name_that_is_logged(book, open_page, metric):
    page = open_page("index.html")
    page.fill("#search", f"rollout_corr/{metric}")
    formulas = "#found a[href='appendix-metrics.html#all-metrics-of-a-correction']"
    assert any(metric in text for text in page.locator(formulas).all_inner_texts())
