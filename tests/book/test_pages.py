"""The reading edition as a reader has it: built, and looked at in Chromium, from disk, offline.

Needs requirements/book.txt, node with KaTeX (`npm install --prefix book/assets`) and Chromium
(Debian's package of that name); without them the tests say so and skip, and with
THREE_POLICIES_REQUIRE_BOOK=1, as in CI, they fail. The references' own tests need none of it.
"""

import re
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import yaml

from three_policies.tests.support.book_pages import OUT, WIDTHS

ROOT = Path(__file__).resolve().parents[2]


# --------------------------------------------------------------------------------------- references

def entries():
    return yaml.safe_load((ROOT / "math" / "references.yaml").read_text())


def documents():
    """Return every text of the repository that may cite something, this file aside."""
    places = [path for glob in ("*.py", "*/*.py", "tests/*/*.py", "*.md", "*/*.md", "book/*.yaml",
                                     "studies/*/*.yaml", "math/*.yaml")
              for path in ROOT.glob(glob)]
    return {path: path.read_text() for path in places
            if path.name not in ("test_pages.py", "references.yaml")}


def test_every_paper_and_pull_request_that_is_cited_is_a_reference():
    known = {entry["id"] for entry in entries()}
    names = {mention for entry in entries() for mention in entry.get("cited", [])}
    links = {entry["link"] for entry in entries()}
    missing = set()
    for path, text in documents().items():
        missing |= {(path.name, x) for x in re.findall(r"(?<![\d.])\d{4}\.\d{5}(?![\d.])", text)
                    if x not in known}
        addresses = re.findall(r"https://github\.com/[\w.-]+/[\w.-]+/(?:pull|issues)/\d+", text)
        missing |= {(path.name, x) for x in addresses if x not in links}
        number = (r"\b(?:verl-omni|slime|SkyRL|OpenRLHF|PR|(?:\S+ )?(?:issue|pull request)s?) "
                  r"\d{2,6}\b(?!\.\d)")
        spoken = re.findall(number + r"|\b[\w/-]+#\d{2,6}\b", text)
        missing |= {(path.name, x) for x in spoken
                    if x not in known and not any(name.endswith(x) for name in names)}
        dated = re.findall(r"\b(?!What|March|Aug|Sep)[A-Z][a-z]+(?: et al\.)? "
                           r"\(?(?:19|20)\d\d\b(?!\.\d)", text)
        missing |= {(path.name, x) for x in dated if not any(x in name for name in names)}
    assert not missing


def test_every_reference_is_cited_and_has_an_address():
    text = "\n".join(documents().values())
    for entry in entries():
        assert ((must := {"id", "title", "authors", "year", "link"})
                <= set(entry) <= must | {"cited", "system"}), entry
        names = [entry["id"], entry["link"], entry.get("system", entry["id"]),
                 *entry.get("cited", [])]
        assert entry["link"].startswith("http") and any(name in text for name in names), entry["id"]
        spoken = re.findall(r"\b(issue|pull request|PR) \d+", " ".join(entry.get("cited", [])))
        assert all(f"/{'issues' if kind == 'issue' else 'pull'}/" in entry["link"]
                   for kind in spoken), entry["id"]
    assert len({entry["id"] for entry in entries()}) == len(entries())


# ----------------------------------------------------------------------------------------- the book

def pages():
    """Return the pages that say something, and not only where a chapter has moved."""
    return sorted(path.name for path in OUT.glob("*.html")
                  if "http-equiv" not in path.read_text())


LOOK = """() => {
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    const name = (all) => all.map((one) => one.className || one.textContent.slice(0, 40));
    return {
        red: document.querySelectorAll(".katex-error, .katex [style*='#cc0000']").length,
        widest: document.documentElement.scrollWidth,
        boxes: name([...document.querySelectorAll("main *")].filter((box) =>
            box.scrollHeight > box.clientHeight + 2
            && /auto|scroll/.test(getComputedStyle(box).overflowY))),
        small: name([...document.querySelectorAll("pre, code")].filter((code) =>
            parseFloat(getComputedStyle(code).fontSize) < 0.85 * 16 - 0.01))};
}"""


@pytest.fixture(scope="module")
def looked_at(book, browser):
    """Look at every page at every width, with all folds open, in one tab; return what is seen."""
    tab, found = browser.new_context(offline=True).new_page(), {}
    asked, complaints = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("requestfailed", lambda request: complaints.append(f"{request.url} failed"))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message:
           complaints.append(message.text) if message.type == "error" else None)
    for name in pages():
        asked.clear()
        complaints.clear()
        tab.goto((OUT / name).as_uri())
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            found[name, width] = tab.evaluate(LOOK)
        found[name, "asked"], found[name, "complaints"] = asked[:], complaints[:]
    tab.context.close()
    return found


@pytest.mark.long
def test_every_page_opens_from_disk_at_three_widths(looked_at):
    """No formula failed, nothing was asked of the network, nothing is wider than the window."""
    assert len(pages()) > 20
    for name in pages():
        asked, complaints = looked_at[name, "asked"], looked_at[name, "complaints"]
        assert not complaints, (name, complaints)
        assert asked and all(url.startswith(("file:", "data:")) for url in asked), (name, asked)
        for width in WIDTHS:
            seen = looked_at[name, width]
            assert not seen["red"], f"KaTeX does not know a command of {name}"      # it says so red
            assert seen["widest"] <= width, (
                f"{name} is {seen['widest']} pixels wide in a window of {width}")


@pytest.mark.long
def test_no_box_scrolls_up_and_down_within_the_page_and_code_is_large_enough(looked_at):
    for name in pages():
        for width in WIDTHS:
            boxes = looked_at[name, width]["boxes"]
            assert not boxes, (name, width, boxes)
        small = looked_at[name, min(WIDTHS)]["small"]
        assert not small, f"too small on a phone: {small[:5]} of {name}"


def test_no_page_holds_an_address_to_load(book):
    for path in [*OUT.glob("*.html"), *OUT.glob("*.css"), *OUT.glob("*.js")]:
        loading = r"""(?:src=|url\(|@import|fetch\(|<link[^>]*href=)["']?(?:https?:)?//[^"')\s]+"""
        loads = re.findall(loading, path.read_text())
        assert not loads, (path.name, loads)


def test_no_dead_link_and_no_dead_label(book):
    text = {name: (OUT / name).read_text() for name in pages()}
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', html)) for name, html in text.items()}
    dead = set()
    for name, html in text.items():
        links = html.split("<a ")[1:]
        assert all("</a>" in link for link in links), f"{name} has a link within a link"
        for href in re.findall(r'(?:href|src)="([^"]+)"', html):
            if re.match("https?:|data:", href):
                continue
            file, anchor = urldefrag(unquote(href))
            target = file or name
            if (not (OUT / target).is_file()
                    or (anchor and target in anchors and anchor not in anchors[target])):
                dead.add((name, href))
    assert not dead
    cited = {label for html in text.values()
             for label in re.findall(r'href="[^"]*#(eq:[a-z0-9-]+)"', html)}
    assert cited == set(book.equations())
    for path in book.CHAPTERS:
        prose = re.sub("```.*?```", "", path.read_text(), flags=re.DOTALL)
        spoken = {x.replace("'", "&#x27;")
                  for x in re.findall(r"[\w-]+'s (?:pull request|issue) \d+", prose)}
        unlinked = {x for x in spoken if f">{x}</a>" not in text[f"{path.stem}.html"]}
        assert not unlinked, (path.name, unlinked)


def test_an_old_address_of_a_chapter_leads_to_the_new_one_and_keeps_the_place(book, open_page):
    assert not {book.MOVED[n] for n in book.MOVED} - {path.stem for path in book.CHAPTERS}
    page = open_page("12-diagnostics.html#effective-sample-size")
    page.wait_for_url("**/7-diagnostics.html#effective-sample-size")


def test_every_equation_reaches_its_function_and_its_tests_and_they_reach_it(book, open_page):
    for label, name in book.equations().items():
        html = (OUT / name).read_text()
        panel = html.split(f'<aside class="panel" data-eq="{label}">')[1].split("</aside>")[0]
        shown, tests = panel.split('<details class="tests"')
        assert f'id="{label}"' in html and 'class="l code"' in shown, (
            f"{label} has no code beside it")
        assert re.search(r'href="tests-\w+-test_\w+\.py\.html#L\d+"', tests), (
            f"{label} has no test beside it")
        for href in re.findall(r'class="where" href="([^"]+)"', panel):
            source, line = href.split("#")
            row = re.search(rf'id="{line}" data-n="\d+">(.*?)\n<span class="l"',
                            (OUT / source).read_text(), re.DOTALL)[1]
            below = (OUT / source).read_text().split(f'id="{line}"')[1][:20000]
            assert f'href="{name}#{label}"' in row + below, f"{href} does not lead back to {label}"


def test_what_stands_beside_an_equation_is_the_code_itself(book, open_page):
    """Line numbers and text of the open listing are those of the file."""
    page = open_page("6-correction.html")
    rows = page.locator('[data-eq="eq:tis"] .part[open]').first.locator(".l").evaluate_all(
        "(rows) => rows.map((row) => [Number(row.dataset.n), row.textContent])")
    lines = (ROOT / "correction.py").read_text().splitlines()
    assert len(rows) > 5 and all(lines[n - 1] == text for n, text in rows)

    def places():
        row = page.locator('section:has(> [data-eq="eq:tis"])')
        return [row.locator(part).bounding_box() for part in ("> .panel", "> .before")]

    wide, text = places()
    assert wide["x"] > text["x"] + text["width"] and abs(wide["y"] - text["y"]) < 60, (
        "not side by side at 1400")
    page.set_viewport_size({"width": 800, "height": 900})
    below, text = places()
    assert below["y"] >= text["y"] + text["height"], "not one below the other at 800"


def test_pointing_at_an_equation_lights_its_code(book, open_page):
    page = open_page("4-ppo.html")
    page.locator("[id='eq:ppo-clip']").hover()
    assert page.locator('.panel.lit').get_attribute("data-eq") == "eq:ppo-clip"
    page.locator("h1").hover()
    assert not page.locator(".lit").count()


def test_an_exhibit_that_a_chapter_names_leads_to_it(book):
    page, named = (OUT / "museum.html").read_text(), set()
    for path in book.CHAPTERS:
        spoken = set(re.findall(r"`(\w+)`", path.read_text()))
        for name in spoken & {exhibit.name for exhibit in book.museum.exhibits()}:
            link = f'<a href="museum.html#{name}"><code>{name}</code></a>'
            assert link in (OUT / f"{path.stem}.html").read_text(), (path.name, name)
            assert f'<article class="card" id="{name}">' in page
            named.add(name)
    assert len(named) > 40


def test_dark_by_the_system_and_by_the_switch(book, open_page):
    def is_dark(page):
        return (page.evaluate("getComputedStyle(document.body).backgroundColor")
                != "rgb(255, 255, 255)")

    light, dark = (open_page("index.html", color_scheme="light"),
                   open_page("index.html", color_scheme="dark"))
    assert not is_dark(light) and is_dark(dark)
    for page, then in ((light, True), (dark, False)):
        page.click("#dark")
        assert is_dark(page) == then
        page.reload()
        assert is_dark(page) == then, "the choice is forgotten"


def test_print_leaves_out_what_only_a_screen_has(book, open_page):
    page = open_page("6-correction.html", color_scheme="dark")
    page.emulate_media(media="print")
    assert not page.locator("nav:visible").count()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("[id='eq:tis']").is_visible() and page.pdf(format="A4")[:4] == b"%PDF"
    # Paper has no scroll bar.
    page.set_viewport_size({"width": 700, "height": 900})
    for kind in ("proof", "setup", "answer"):
        assert page.locator(f"details.{kind} pre").first.is_visible(), (
            f"a folded {kind} is not to be opened on paper")
    cut = page.locator(".listing:visible").evaluate_all(
        "(boxes) => boxes.filter((b) => b.scrollHeight > b.clientHeight + 1 "
        "|| b.scrollWidth > b.clientWidth + 1).length")
    assert not cut, f"{cut} blocks of code are cut off"


def test_blocks_are_folded_and_say_what_they_are_for(book, open_page):
    page = open_page("index.html")
    for path in book.CHAPTERS:
        # Answers' blocks are open.
        text = re.sub("<details.*?</details>", "", path.read_text(), flags=re.DOTALL)
        page.goto((OUT / f"{path.stem}.html").as_uri())
        two = re.findall(r"```python\n(>>> #.*)\n>>> #", text)
        assert not two, f"of a title, the second line is lost: {two}"
        blocks = text.count("```python\n>>>")
        folds = page.locator("main details.proof")
        assert page.locator("main details.setup").count() == (blocks > 0)
        assert (folds.count() >= blocks - 1
                and not page.locator("main details.proof[open]").count())
        lines, whole = (folds.locator("> summary > span").all_text_contents(),
                        folds.locator("> summary").all_text_contents())
        assert [line.strip() for line in lines] == [
            line.strip() for line in whole], "more on the line than the comment"
        assert all(re.search(r"[a-z]{3}.* ", line) for line in lines), "a line that is no sentence"


def test_answers_are_folded_and_their_blocks_are_not(book, tmp_path):
    chapter = tmp_path / "11-exercise.md"
    chapter.write_text(
        "# 11. Exercise\n\n```python\n>>> import torch\n>>> 1 + 1\n2\n\n```\n\n"
        "1. What is $2 + 2$?\n\n<details><summary>Answer</summary>\n\nFour:\n\n"
        "```python\n>>> 2 + 2\n4\n\n```\n\n</details>\n")
    html = book.Chapter(chapter).html()
    answer = html.split('<details class="answer">')[1].split("</details>")[0]
    assert "Answer</summary>" in answer and "<pre" in answer and "<details" not in answer
    assert 'class="setup"' in html and 'class="proof"' in html
