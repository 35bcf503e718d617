"""Write the reading edition into book/: chapters, files and tests as pages that work from disk.

Equation, function and test find one another by the labels (eq:…) which the chapters define and
the code cites. The figures' numbers are computed here, by the oracle and by losses.py. Nothing
that a page shows is typed here.

    python book/pages.py        # needs requirements/book.txt and `npm install --prefix book/assets`
    python book/pages.py pages  # book/ is then ready for a static host, and book.zip has all of it

This edition reads more in a chapter's markup than Markdown does. What cites the **(eq:…)** below a
formula stands beside it. A block of `>>>` is folded. Its title is the block's first comment, when
it begins with one, otherwise the last sentence before it. What a chapter's first block does before
it prints is the set-up. <details><summary>Answer</summary> … </details> is an answer, folded
everywhere; the blocks in it are not.
"""

import ast
import doctest
import html
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from string import Template
from typing import NamedTuple
from xml.etree import ElementTree

import yaml
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonConsoleLexer, get_lexer_by_name, get_lexer_for_filename

from three_policies.book import moving, museum, paths, tables, which

ROOT = Path(__file__).resolve().parent.parent

HERE, OUT = ROOT / "book" / "assets", ROOT / "site"
CHAPTERS = sorted((ROOT / "math").glob("[0-9]*.md"), key=lambda path: int(path.name.split("-")[0]))
# In reading order; oracle/turns.py is what 17-turns-and-tools.md enumerates.
FILES = [f"{name}.py" for name in (
    "ratios", "kl", "estimators", "surrogates", "rejection", "metrics", "presets", "correction",
    "centering", "losses",
    "doctor/tokens", "doctor/laws", "doctor/places", "doctor/causes", "doctor/health",
    "doctor/report", "doctor/growth", "policy", "rollout", "trainer", "training/heads",
    *(f"oracle/{word}" for chapter in CHAPTERS for word in chapter.stem.split("-")
      if (ROOT / "oracle" / f"{word}.py").exists()))]
APPENDICES = sorted((ROOT / "math").glob("appendix-*.md"), key=lambda path: path.read_text())
LABEL = re.compile(r"eq:[a-z0-9]+(?:-[a-z0-9]+)*")
DEFINITION = re.compile(rf"\*\*\(({LABEL.pattern})\)\*\*")

SAMPLER = "Your sampler is not your policy"
SITE = os.environ.get("BOOK_SITE", "")     # https://…/ where the book is hosted: og:image needs it

# A figure that moves stands in the place of a picture, or at the end of a section.
IN_PLACE = {"bias-variance.svg": "cap", "length-trap.svg": "trap"}
AT_END = {"3-importance-weights.md": ("three-levels", "tree"),
          "4-ppo.md": ("sapo-a-gate-instead-of-a-clip", "curves"),
          "6-correction.md": ("correction-truncate-mask-reject", "batch"),
          "15-gradient-field.md": ("one-picture", "square"),
          "10-clip-around-mu.md": ("one-place", "push"),
          "8-what-is-wrong.md": ("what-cannot-be-told-apart", "quiz")}


# Chapters that once had another number: {the old one: the stem of the file}.
MOVED = {8: "13-kl", 7: "14-methods-and-prices", 9: "16-versions", 10: "17-turns-and-tools",
         11: "18-routes", 12: "7-diagnostics", 13: "15-gradient-field", 14: "10-clip-around-mu",
         15: "11-evidence", 16: "8-what-is-wrong", 17: "9-fix-it-first"}


# ------------------------------------------------------------------------------ code, by its labels

class Part(NamedTuple):
    """A Part is a function, class or test, with the place where it first cites each label."""

    file: str
    name: str
    first: int
    line: int                   # of its name: below the decorators
    last: int
    docstring: range
    summary: str
    is_class: bool
    labels: dict[str, int]


@cache
def parts(file):
    found, lines = [], (ROOT / file).read_text().splitlines()

    def visit(node, prefix=""):
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                first = min(node.lineno for node in [child, *child.decorator_list])
                last, ends = child.end_lineno or first, child.body[0].end_lineno or first
                is_class, text = isinstance(child, ast.ClassDef), child.body[0]
                doc = ast.get_docstring(child) or ""
                title = doc.split("\n")[0]
                places = [title, doc, "" if is_class else "\n".join(lines[first - 1:last])]
                labels = {label: rank for rank in (2, 1, 0)
                          for label in LABEL.findall(places[rank])}
                found.append(Part(
                    file, prefix + child.name, first, child.lineno, last,
                    range(text.lineno, ends + 1) if doc else range(0),
                    re.sub(rf"\(?{LABEL.pattern}[,:)]* ?", "", title).strip(), is_class, labels))
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse("\n".join(lines)))
    return found


def citing(label, files):
    """Return the parts that cite a label; the part that is about the label comes first."""
    found = [part for file in files for part in parts(file) if label in part.labels]
    often = Counter(part.file for part in found)

    def distance(p):
        named = label.removeprefix("eq:") in p.name
        return (p.is_class, p.labels[label], not named, -often[p.file], len(p.labels))

    return sorted(found, key=distance)


@cache
def proving_files():
    """Return the oracle and the tests that cite an equation, but not those about the labels."""
    tests = [path for path in sorted((ROOT / "tests").rglob("test_*.py"))
             if LABEL.search(path.read_text())]
    of_labels = ("test_labels_and_tables", "test_pages", "test_page_elements")
    return ["oracle/__init__.py",
            *(str(path.relative_to(ROOT)) for path in tests if path.stem not in of_labels)]


@cache
def names():
    """Return public name → page and line, for the book's files.

    The names of what enumerates are short: only the long ones count.
    """
    return {part.name: f"{page_of(part.file)}#L{part.first}"
            for file in ["oracle/__init__.py", *reversed(FILES)] for part in parts(file)
            if "_" in part.name or not file.startswith(("tests/", "math/"))} | {
                exhibit.name: f"museum.html#{exhibit.name}" for exhibit in museum.exhibits()}


def page_of(file):
    return file.replace("/", "-") + ".html"


@cache
def equations():
    """Return label → its chapter's page."""
    return {label: f"{path.stem}.html" for path in CHAPTERS
            for label in DEFINITION.findall(path.read_text())}


def link_labels(text):
    pages = equations()
    return LABEL.sub(lambda m: f'<a class="eq" href="{pages[m[0]]}#{m[0]}">{m[0]}</a>'
                     if m[0] in pages else m[0], text)


def in_colours(source, lexer):
    return highlight(source, lexer, HtmlFormatter(nowrap=True))


def boxed(rows, kind=""):
    return f'<pre class="listing {kind}"><code>{rows}</code></pre>'


@cache
def highlighted(file):
    """Return the lines of a file as HTML."""
    text = in_colours((ROOT / file).read_text(), get_lexer_for_filename(file, stripnl=False))
    return [link_references(link_labels(line)) for line in text.rstrip("\n").split("\n")]


def listing(part, label):
    """Return a part's lines, open near what cites the label; the rest is folded.

    Where only its head cites the label, the first steps are open.
    """
    source, kinds, pieces = highlighted(part.file), {True: "doc", False: "code"}, []
    lines = range(part.first, part.last + 1)
    body = range(part.docstring.stop or part.line + 1, part.last + 1)
    cites = [n for n in lines if label in LABEL.findall(source[n - 1])]
    near = [m for n in cites if n in body for m in range(n - 4, n + 5)] or body[:14]
    opened = {*range(part.first, (part.docstring.start or part.line) + 1), *cites, *near}
    for is_open, run in groupby(lines, opened.__contains__):
        run = [*run]
        rows = boxed("\n".join(f'<span class="l {kinds[n in part.docstring]}" data-n="{n}">'
                               f'{source[n - 1]}</span>' for n in run))
        pieces.append(rows if is_open or len(run) < 4 else
                      f'<details class="rest"><summary>lines {run[0]} to {run[-1]}</summary>'
                      f'{rows}</details>')
    return f'<div class="window">{"".join(pieces)}</div>'


def panel(label):
    """Return what stands beside an equation: the function that computes it, others and tests.

    The function is open. The others and the tests are folded.
    """
    def folded(part, opened=False):
        where = f'{page_of(part.file)}#L{part.first}'
        head = (f'<code>{part.name}</code> '
                f'<a class="where" href="{where}">{part.file}:{part.first}</a> '
                f'<span class="sum">{html.escape(part.summary)}</span>')
        return (f'<details class="part"{" open" * opened}><summary>{head}</summary>'
                f'{listing(part, label)}</details>')

    tests = sorted(citing(label, proving_files()), key=lambda part: (part.file, part.first))
    return (f'<aside class="panel" data-eq="{label}"><div class="stick">'
            '<p class="kind">computed by</p>'
            + "".join(folded(part, not i) for i, part in enumerate(citing(label, FILES)))
            + f'<details class="tests"{" open" * (len(tests) < 4)}><summary class="kind">'
            + f'proved by {len(tests)} test{"s"[len(tests) < 2:]}</summary>'
            + "".join(map(folded, tests)) + "</details></div></aside>")


def source_page(file):
    tags = {part.line: part.labels for part in parts(file)} if file.endswith(".py") else {}
    rows = []
    for n, line in enumerate(highlighted(file), 1):
        cites = link_labels(" ".join(tags.get(n, ())))
        cites = cites and f'<span class="cites">{cites}</span>'
        rows.append(f'<span class="l" id="L{n}" data-n="{n}">{line}{cites}</span>')
    return f'<h1 class="file">{file}</h1>{boxed(chr(10).join(rows), "whole")}'


# ----------------------------------------------------------------------------------------- chapters

# (TeX, displayed) in order; a mark stands in the page until KaTeX has rendered them all
FORMULAS = []


def formula(tex, display):
    FORMULAS.append((tex.strip(), display))
    return f"\x02{len(FORMULAS) - 1}\x03"


def displayed(tex):
    """Return a displayed formula, which may break at \\qquad on a narrow page."""
    pieces = [""]
    for piece in re.split(r"\\qquad\b", tex.strip()):
        depth = len(re.findall(r"{|\\begin\b", pieces[-1]))
        depth -= len(re.findall(r"}|\\end\b", pieces[-1]))
        pieces[-1:] = [pieces[-1] + r"\qquad" + piece] if depth else [*pieces[-1:], piece]
    shown = " ".join(formula(piece, True) for piece in pieces if piece.strip())
    return f'<div class="display">{shown}</div>'


@cache
def references():
    return yaml.safe_load((ROOT / "math" / "references.yaml").read_text())


@cache
def mentions():
    """Return whatever a text or a comment may call a reference → the reference."""
    return {name: e for e in references()
            for name in [e["id"], e["link"], *e.get("cited", [])]}


@cache
def mention():
    """Return the pattern of whatever may be called a reference: of two that fit, the longer."""
    known = "|".join(map(re.escape, sorted(mentions(), key=len, reverse=True)))
    known = known.replace("'", "(?:'|&#(?:39|x27);)")
    return re.compile(rf"(?<![\w/.])(?:{known})(?![\w.]*\d)")


def link_references(text):
    def link(found):
        entry = mentions()[html.unescape(found[0])]
        first, *others = entry["authors"].split(", ")
        who = ", ".join([first, *others]) if len(others) < 3 else f"{first} et al."
        shown = html.escape(f'{entry["title"]}. {who}, {entry["year"]}')
        return f'<a href="references.html#{entry["id"]}" title="{shown}">{found[0]}</a>'

    return mention().sub(link, text)


def link_text(text):
    """Turn labels, chapters and references in running text into links."""
    pages = {path.name.split("-")[0]: f"{path.stem}.html" for path in CHAPTERS}
    return link_references(re.sub(
        r"\b[Cc]hapter (\d+)\b",
        lambda m: f'<a href="{pages[m[1]]}">{m[0]}</a>' if m[1] in pages else m[0],
        link_labels(html.escape(text))))


def slug(title):
    return re.sub(r"[^\w\- ]", "", re.sub(r"^\d+\. ", "", title).lower()).replace(" ", "-")


def target(href, folder):
    """Return where a link of a document leads in the book."""
    if re.match(r"https?:|mailto:|#", href):
        return href
    path, _, anchor = href.partition("#")
    file = (ROOT / folder / path).resolve().relative_to(ROOT)
    if file.suffix == ".md" and file.parent.name == "math":
        return f"{file.stem}.html" + (f"#{anchor}" if anchor else "")
    if file.name == "which.yaml":              # the questions: a page of their own here
        return "which.html"
    LINKED[str(file)] = None
    return page_of(str(file))


LINKED = {}  # other files of the repository that the chapters name: {path: None}, in order
DRAWN = {}   # pictures that stand in a page, and follow its light or dark: {name: SVG}


def markdown(folder):
    md = MarkdownIt("commonmark", {"html": True}).enable("table").use(
        dollarmath_plugin, renderer=lambda tex, options: formula(tex, options["display_mode"]))

    def is_in_link(tokens, i):
        return sum(token.nesting for token in tokens[:i] if token.type.startswith("link_"))

    def text(renderer, tokens, i, options, env):
        return (html.escape if is_in_link(tokens, i) else link_text)(tokens[i].content)

    def code(renderer, tokens, i, options, env):
        text = html.escape(tokens[i].content)
        if is_in_link(tokens, i):
            return f"<code>{text}</code>"
        where = names().get(tokens[i].content) or (page_of(text)
                                                   if text in [*FILES, *proving_files()] else None)
        return f'<a href="{where}"><code>{text}</code></a>' if where else f"<code>{text}</code>"

    def opened(renderer, tokens, i, options, env):
        href, inside = tokens[i].attrs["href"], tokens[i + 1].content
        tokens[i].attrs["href"] = (names()[inside] if "/test_museum" in href and inside in names()
                                   else target(href, folder))
        return renderer.renderToken(tokens, i, options, env)

    def image(renderer, tokens, i, options, env):
        name = tokens[i].attrs["src"].split("/")[-1]
        if name in IN_PLACE:
            return widget(IN_PLACE[name])
        alt, file = html.escape(tokens[i].content), ROOT / folder / tokens[i].attrs["src"]
        if file.suffix == ".svg":
            DRAWN[name] = file.read_text().replace("<svg", f'<svg role="img" aria-label="{alt}"', 1)
            return f"\x04{name}\x05"
        shutil.copy(file, OUT)
        width, height = struct.unpack(">2I", file.read_bytes()[16:24])               # of a PNG
        return f'<img src="{name}" alt="{alt}" width="{width}" height="{height}">'

    for name, rule in (("text", text), ("code_inline", code), ("link_open", opened),
                       ("image", image), ("table_open", lambda *_: '<div class="scroll"><table>'),
                       ("table_close", lambda *_: "</table></div>")):
        md.add_render_rule(name, rule)
    return md


def widget(name):
    return f'<figure class="widget" data-widget="{name}">\x04{name}\x05</figure>'


def captioned(rendered):
    """Return a picture and the caption in italics below it as a figure."""
    found = re.fullmatch(r"<p>(<img[^>]*>|\x04.*?\x05|<figure.*</figure>)\s*"
                         r"(?:<em>(.*)</em>)?</p>\s*", rendered, re.DOTALL)
    if not found:
        return rendered
    picture, caption = found.groups("")
    return (f'{picture.removesuffix("</figure>")}<p class="caption">{caption}</p></figure>'
            if picture.startswith("<figure") else
            f'<figure class="drawing">{picture}<figcaption>{caption}</figcaption></figure>')


def fold(kind, title, source):
    """Return a block folded to one line, which says what it is for.

    Its output is folded, too: that says nothing without the code above it.
    """
    return (f'<details class="{kind}"><summary><span>{title}</span></summary>'
            f'{boxed(in_colours(source, PythonConsoleLexer()))}</details>')


class Row:
    """A Row is a stretch of text with at most one labelled equation.

    `wide` is the class of a row that has the whole width of the page.
    """

    def __init__(self, wide=""):
        self.before, self.after, self.wide = [], [], wide
        self.label: str | None = None

    def html(self):
        before, after = "\n".join(self.before), "\n".join(self.after)
        if not before or self.wide:
            return before and f'<div class="{self.wide}">{before}</div>'
        beside = f'{panel(self.label)}<div class="after">{after}</div>' if self.label else ""
        return f'<section class="row"><div class="before">{before}</div>{beside}</section>'


class Chapter:
    """A Chapter is one document: its rows, its headings and their plain text for the search."""

    def __init__(self, path):
        self.path, self.page, self.md = path, f"{path.stem}.html", markdown("math")
        self.rows, self.sections, self.figures = [Row()], [], []
        self.said, self.has_setup, self.answers = "", False, 0
        depth, blocks = 0, [[]]
        text = re.sub(r"^(!\[.*\))\n\n(?=\*[^*])", r"\1\n", path.read_text(), flags=re.MULTILINE)
        for token in self.md.parse(text):
            depth += token.nesting
            blocks[-1].append(token)
            blocks += [] if depth else [[]]
        for block, following in pairwise(blocks):
            self.add(block, following)
        self.end_section()
        self.title = self.sections[0]["title"]

    def put(self, text, wide=""):
        if wide and not self.answers:
            self.figures += re.findall('data-widget="(.*?)"', text)
            self.rows += [Row(wide), Row()]
            self.rows[-2].before.append(text)
        else:
            row = self.rows[-1]
            (row.after if row.label else row.before).append(text)

    def end_section(self):
        place, name = AT_END.get(self.path.name, ("", ""))
        if self.sections and self.sections[-1]["id"] == place:
            self.put(widget(name), "wide")

    def add(self, block, following):
        token, text = block[0], " ".join(t.content for t in block if t.type == "inline")
        rendered = text.strip("*")
        if token.type == "heading_open":
            self.heading(token, text)
        elif token.type == "fence":
            self.fence(token, " ".join(t.content for t in following if t.type == "inline"))
        elif token.type == "html_block":
            self.answers += token.content.count("<details") - token.content.count("</details")
            if not token.content.startswith("<!--"):
                self.put(token.content.replace("<details", '<details class="answer"'))
        elif not DEFINITION.fullmatch(text):
            rendered = captioned(self.md.renderer.render(block, self.md.options, {}))
            columns = rendered.count("</th>")
            broad = "<figure" in rendered or (columns > 2 and not self.rows[-1].label)
            self.put(rendered, "wide many" if columns > 5 else "wide" * broad)
            self.said = text
        of_tests = self.path.stem == "appendix-certified" and token.type == "table_open"
        if self.sections and token.type not in ("fence", "heading_open") and not of_tests:
            self.sections[-1]["text"] += " " + rendered

    def heading(self, token, text):
        if token.tag != "h3":
            self.end_section()
            self.rows.append(Row())
        link = f'<a href="#{slug(text)}">{re.sub("</?a.*?>", "", self.md.renderInline(text))}</a>'
        self.sections.append({"title": text, "id": slug(text), "level": token.tag, "text": "",
                              "link": link})
        self.put(f'<{token.tag} id="{slug(text)}">{link}</{token.tag}>',
                 "top" * (token.tag == "h1"))
        self.said = text

    def fence(self, token, following):
        kind = token.info.split(" ")[0]
        if kind == "math":
            shown, label = displayed(token.content), DEFINITION.fullmatch(following)
            if not label:
                return self.put(shown)
            if self.rows[-1].label:
                self.rows.append(Row())
            self.rows[-1].before.append(f'<div class="equation" id="{label[1]}">{shown}'
                                        f'<a class="eq" href="#{label[1]}">({label[1]})</a></div>')
            self.rows[-1].label, self.said = label[1], f"({label[1]})"
        elif ">>>" in token.content:
            self.put(self.proof(token.content))
        else:
            self.put(boxed(in_colours(token.content, get_lexer_by_name(kind or "text"))))

    def proof(self, source):
        if self.answers:
            return boxed(in_colours(source, PythonConsoleLexer()))
        setup = ""
        if not self.has_setup and "import" in source:
            self.has_setup, lines = True, source.splitlines(keepends=True)
            prints = [x.lineno for x in doctest.DocTestParser().get_examples(source) if x.want]
            at = prints[0] if prints else len(lines)
            setup = fold("setup", "Set-up of this chapter", "".join(lines[:at]))
            source = "".join(lines[at:])
        comment = re.match(r">>> # *(.*)\n", source)
        last = re.split(r"(?<=[.?!])\s+(?=[^a-z0-9])", self.said)[-1].rstrip(":")
        sentence = comment[1] if comment else last
        return setup + (fold("proof", self.md.renderInline(sentence), source) if source.strip()
                        else "")

    def html(self):
        """Return the rows; below the title the contents, which a wide screen has at its side."""
        contents = "".join(f"<li>{s['link']}</li>" for s in self.sections if s["level"] == "h2")
        rows = [text for row in self.rows if (text := row.html())]
        rows.insert(1, f'<nav class="toc" aria-label="In this chapter"><ol>{contents}</ol></nav>')
        return "\n".join(rows)


# ---------------------------------------------------------------------------------------- the pages

def moved_page(page):
    """Return a page at an old address, which leads to the new one and keeps the place in it."""
    return (f'<!doctype html><meta charset="utf-8"><title>Moved</title>'
            f'<meta http-equiv="refresh" content="1; url={page}">'
            f'<script>location.replace("{page}" + location.hash)</script>'
            f'<p>This chapter is now <a href="{page}">{page}</a>.</p>\n')


def reference_page():
    entries = []
    for entry in sorted(references(), key=lambda e: (e["authors"], e["id"])):
        entries.append(f'<li id="{entry["id"]}"><b>{html.escape(entry["title"])}</b><br>'
                       f'{html.escape(entry["authors"])}, '
                       f'{entry["year"]}. <a href="{entry["link"]}">{entry["id"]}</a></li>')
    return f'<h1>References</h1><ul class="references">{"".join(entries)}</ul>'


def equation_table():
    rows = []
    for label in equations():
        cells = [", ".join(f'<a href="{page_of(p.file)}#L{p.first}"><code>{p.name}</code></a>'
                           for p in of[:3])
                 + (f" and {len(of) - 3} more" if len(of) > 3 else "")
                 for of in (citing(label, FILES), citing(label, proving_files()))]
        rows.append(f'<tr><td>{link_labels(label)}</td><td>{"</td><td>".join(cells)}</td></tr>')
    return ('<div class="wide scroll"><table class="equations"><thead><tr><th>equation</th>'
            f'<th>computed by</th><th>proved by</th></tr></thead>'
            f'<tbody>{"".join(rows)}</tbody></table></div>')


def promised(path):
    """Return what a chapter says a reader will be able to do."""
    opening = re.sub(r"^# .*", "", path.read_text()).split("\n## ")[0]
    found = re.search(r"After\s+this\s+chapter\s+you\s+can\s(.*?[.?])(?=\s)", opening, re.DOTALL)
    assert found, path                     # each chapter has this sentence
    said = " ".join(found[1].split())
    return markdown("math").renderInline(said[0].upper() + said[1:])


def index_page(chapters, bodies):
    """Return the first screen: a figure and four doors; then the chapters, files and equations."""
    intro = (ROOT / "README.md").read_text().split("\n\n")[1]
    [bugs] = re.findall("<h1>(.*?)</h1>", bodies["museum.html"])
    doors = {"differ.html": ("My log-probs differ", "Find the cause, repair it, paste lines."),
             "which.html": ("Which correction do I need?", "A few questions, then a line of YAML."),
             "museum.html": (bugs, "Guess how far off each one is."),
             chapters[0].page: ("Read the book", f"{len(CHAPTERS)} chapters, each equation beside "
                                "its code.")}
    opened = "".join(f'<a class="door" href="{page}"><b>{name}</b>{says}</a>'
                     for page, (name, says) in doors.items())

    def listed(paths, says):
        return "".join(f'<li><a href="{c.page}">{link_text(c.title)}</a>{says(c.path)}</li>'
                       for c in chapters if c.path in paths)

    contents = listed(CHAPTERS, lambda path: f'<span class="sum">{promised(path)}</span>')
    figures = "".join(f'<li><a href="{c.page}#fig-{name}">\x04{name}.title\x05</a></li>'
                      for c in chapters for name in c.figures)
    files = "".join(f'<li><a href="{page_of(f)}"><code>{f}</code></a></li>'
                    for f in [*FILES, *proving_files()])
    two_sentences = " ".join(re.split(r"(?<=\.)\s+(?=[A-Z])", intro)[:2])
    return (f'<div class="first"><h1>{SAMPLER}.</h1><p>The engine that samples and the trainer '
            "that learns give the same token different probabilities. The further they are "
            "apart, the less training learns without a correction. Weights ρ = π_old/μ repair most "
            "of it. Taking the engine's log μ for log π_old saves a forward pass and can ruin the "
            f'policy.</p>{widget("sampler")}<div class="doors">{opened}</div></div>'
            f'<div class="index"><h2>Chapters</h2>{markdown(".").render(two_sentences)}'
            f'{markdown("math").render(paths.doors())}'
            f'<ol class="contents">{contents}</ol>'
            f'<h2>Appendices</h2><ul class="contents">{listed(APPENDICES, lambda _: "")}'
            '<li><a href="references.html">References</a></li></ul>'
            f'<h2>Figures that move</h2><ul class="contents">{figures}</ul>'
            f'<h2>Code and tests</h2><ul class="contents files">{files}</ul>'
            f'<h2 id="equations">Every equation</h2>{equation_table()}</div>')


def differ_page():
    """Return README's section on a mismatch as a page, with an answer of the doctor."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## My log-probs differ\n")[1].split("\n## ")[0]
    links = "\n".join(re.findall(r"^\[\d+\]: .*", readme, re.MULTILINE))
    example = json.loads((HERE / "quiz.json").read_text())[0]
    page = markdown(".").render(
        f"# My log-probs differ\n{section}\n\n"
        f"**What the doctor says**, for example, of a dump in which {example['what']}:\n\n"
        f"```text\n{textwrap.fill(example['said'], 90)}\n```\n\n"
        "[How it finds a cause](math/8-what-is-wrong.md), and [what each repair removes]"
        f"(math/9-fix-it-first.md).\n\n{links}\n")
    return re.sub("<pre><code[^>]*>", '<pre class="listing"><code>', page)


def museum_page():
    """Return an article for each exhibit: its error opens after a guess, or by a click."""
    def shown(title, source, kind=""):
        listing = boxed(in_colours(source, get_lexer_by_name("python")), kind)
        return f"<h3>{title}</h3>{listing}" if source else ""

    def article(number, found):
        said = ("not a number" if math.isnan(found.error) else "what should be 0"
                if math.isinf(found.error) else
                f"{100 * found.error:.0f} % of the largest right number")
        guesses = "".join(f'<button data-right="{int(i == found.answer)}">{size}</button>'
                          for i, (size, _) in enumerate(museum.SIZES))
        where = re.sub(r"https://\S+[^\s,;]",
                       lambda m: f'<a href="{m[0]}">{m[0].split("//")[1]}</a>',
                       html.escape(found.where))
        title = html.escape(found.name.replace("_", " ").capitalize())
        return (f'<article class="card" id="{found.name}"><h2>{number}. {title}</h2>'
                f"<p>{html.escape(found.says)}</p>{shown('given', found.shared)}"
                f"{shown('wrong' if found.right else 'both', found.wrong, 'wrong')}"
                f"{shown('right', found.right, 'right')}"
                f'<p class="sum">{where} · {link_labels(found.equation)}</p>'
                f'<div class="guess"><span>How far off is it?</span> {guesses}</div>'
                f"<details><summary>The measured error</summary><p><b>Off by {said}.</b></p>"
                "</details></article>")

    exhibits = museum.exhibits()
    return (f"<h1>{len(exhibits)} bugs that shipped</h1>"
            "<p>Each was released, merged or proposed somewhere, and a test measures each against "
            'exact enumeration (<a href="tests-method-test_museum.py.html">test_museum.py</a>). '
            "Guess before you look: how large is the error, as a share of the largest number that "
            "should have come out?</p>"
            "<p>In the code LP, MU_LP and REF_LP are the log-probs under π_θ, μ and π_ref, MASK is "
            "1 on the tokens of a response, LIVE is ρ of each token with its graph, A and R are "
            "advantages and rewards. "
            "<code>mean(x)</code> is the expected gradient of Σ x over samples of μ, "
            "<code>ours(config)</code> that of policy_loss, <code>kl_mean(kind)</code> that of "
            "kl_loss. ROWS is the mask of a small batch of numbers, VALUES.</p>"
            "<p>Routes: <code>replayed(routes)</code> is the expected gradient of policy_loss if "
            "the trainer replays these routes; ROUTES are those of the sampler. Turns: X is an "
            "agent that calls a tool; X.mask has all tokens, X.written the tool's, X.own the "
            "agent's, and RHO is ρ of these. Versions: FIRST and LAST are the log-probs under "
            "the weights that begin and that end a response, RECORD is what the engine recorded, "
            "OLD marks the tokens and LONG the responses that the update found; "
            "<code>drawn(x)</code> is the chance of each response, and "
            "<code>trained(chance, x)</code> the expected gradient of policy_loss with x as "
            "log μ.</p>"
            f'<div class="cards">{"".join(article(i, x) for i, x in enumerate(exhibits, 1))}</div>')


def described(page, title, body, formulas):
    """Return a page's first sentence in plain text, as the description of its shared address."""
    if page == "index.html":
        return (f"{SAMPLER}: what that does to RL of language models, how to correct it, and "
                f"{re.findall('>([0-9]+ bugs that shipped)<', body)[0]}.")
    said = re.search(r"<p>(.*?)</p>", body, re.DOTALL)
    if page in map(page_of, [*FILES, *proving_files(), *LINKED]):
        return f"{title}, with links from its lines to the equations of Three Policies."
    if not said:
        return f"{title} of Three Policies: RL when sampler and trainer differ."
    return re.split(r"(?<=[.?!]) ", plain(said[1], formulas))[0]


def evidence_shown(one):
    """Return both arms with a dot for each run, then the difference, the regime and its name."""
    say, rows = markdown("math").renderInline, ""
    for name, mean, runs, colour in zip(one.arms, one.means, one.seeds, ("c0", "c1")):
        dots = "".join(f'<circle class="{colour}" cx="{8 + 184 * x:.1f}" cy="8" r="3.5"/>'
                       for x in runs)
        rows += (f'<tr><th scope="row">{say(name)}</th><td>{mean}</td><td class="strip">'
                 '<svg viewBox="0 0 200 16" aria-hidden="true"><path class="grid" '
                 f'd="M8 8H192M8 3V13M100 5V11M192 3V13"/>{dots}</svg></td></tr>')
    below = " and ".join(map(str, one.below))
    return (f'<figure class="evidence"><table>{rows}</table><figcaption><b>Difference '
            f"{one.difference}, {which.VERDICT[one.found]}.</b> {one.where}; {one.endpoint}; "
            f"runs below their start: {below}. {say(one.source)}.</figcaption></figure>")


def outcome_shown(name, found, level):
    """Return what to take, and its lines for this trainer and three others."""
    say = markdown("math").renderInline
    systems = {"this trainer": [f"correction: {{preset: {found['preset']}}}"],
               **{label: found.get(key) for key, label in which.SYSTEMS.items()}}
    lines = "".join(
        f"<dt>{label}</dt><dd>" + (boxed(html.escape("\n".join(given))) if given
                                   else "no such setting") + "</dd>"
        for label, given in systems.items())
    rest = f'<p>{say(found["otherwise"])}</p>' if "otherwise" in found else ""
    return (f'<div class="take" data-take="{name}"><h{level}>{found["says"]}: '
            f'<code>{found["preset"]}</code></h{level}><p>{say(found["why"])}</p>'
            f'<dl>{lines}</dl>{rest}<p class="sum">{say(found["read"])}</p></div>')


def which_page():
    """Return the questions, each within the answer that leads to it: one answer open at a time."""
    first, outcomes = which.read()
    say = markdown("math").renderInline

    def causes(one):
        listed = "".join(f"<li><code>{x}</code>: {link_text(meaning)}. <i>{link_text(remedy)}</i>"
                         "</li>" for x, (meaning, remedy) in one.causes.items())
        return (f"<p>The doctor's record: {which.doctor_rates([*one.causes])} "
                '(<a href="8-what-is-wrong.html">chapter 8</a>).</p><details class="causes">'
                f"<summary>The {len(one.causes)} causes, and what to turn</summary>"
                f"<ul>{listed}</ul></details>") if listed else ""

    def shown(question, level):
        folds = ""
        for one in question.answers:
            told = one.evidence[0] if one.evidence else None
            number = told and say(f"{told.means[0].split()[0]} against {told.means[1].split()[0]} "
                                  f"({told.arms[1]})")
            then = (shown(one.then, level + 1) if one.then
                    else outcome_shown(one.take, outcomes[one.take], level + 1))
            before = one.place.rpartition("-")[0]
            folds += (f'<details class="choice" name="at-{before}" id="{one.place}">'
                      f'<summary>{one.says} <span class="sum">{number or ""}</span></summary>'
                      f'<p>{say(one.why)}</p>{causes(one)}'
                      f'{"".join(map(evidence_shown, one.evidence))}{then}</details>')
        return (f'<section><h{level}>{question.asks}</h{level}><p class="sum">'
                f"{say(question.help)}</p>{folds}</section>")

    return ('<div class="which"><h1>Which correction do I need?</h1>'
            f"<p>At most {which.longest(first)} questions lead from a dump of log-probs to a "
            "preset, with its line for this trainer, verl, SkyRL and TRL.</p><p>Each answer shows "
            "the runs it rests on: two arms, mean ± standard deviation, a dot for each run on an "
            "axis from 0 to 1. A difference is paired by seed, with its unadjusted 95 % interval. "
            f"{say(which.SEPARABLE)} The models are small and the engine's errors are set on "
            f"purpose: take the direction, not the size.</p>{shown(first, 2)}</div>")


def write(page, title, body, description, *around):
    links = [f'<a class="{arrow}" href="{other[0]}">{link_text(other[1])}</a>' if other
             else f'<i class="{arrow}"></i>'
             for other, arrow in zip(around, ("before", "after"))]
    template = Template((HERE / "page.html").read_text())
    (OUT / page).write_text(template.substitute(title=html.escape(title), body=body,
                                                description=html.escape(description), site=SITE,
                                                before=links[0], after=links[1]))


def rendered_by_node(data):
    """Return KaTeX's HTML of every formula, and each figure as it stands without JavaScript."""
    found = subprocess.run(["node", HERE / "render.js"], capture_output=True, text=True,
                           input=json.dumps(
        {"formulas": [{"tex": tex, "display": display} for tex, display in FORMULAS],
         "data": data}))
    if found.returncode:
        sys.exit(f"book/assets/render.js failed: {found.stderr.strip()}")
    return json.loads(found.stdout)


def spoken(node):
    """Return KaTeX's MathML as a line of text, such as π_old/μ."""
    between = {"mfrac": "/", "msub": "_", "msup": "^"}.get(node.tag.split("}")[1], "")
    return between.join(map(spoken, node)) or (node.text or "").strip("\u2061")


def plain(text, formulas):
    """Return the words of a piece of a page."""
    def read(mark):
        math_of = re.findall("<math.*</math>", formulas[int(mark[1])], re.DOTALL)[0]
        return spoken(ElementTree.fromstring(math_of)[0][0])

    text = re.sub("\x04.*?\x05|</?(?:a|code|em|strong|span|eq)\\b[^>]*>", "", text)
    text = html.unescape(re.sub("<[^>]*>", " ", text))
    return " ".join(re.sub("\x02(.*?)\x03", read, text).split())


def without_rows_of_numbers(text):
    """Return a text without the numbers that stand four or more in a row: nobody looks for them."""
    return re.sub(r"(?:(?<=\s)|^)(?:[±−+\-\d.,/%e*]+(?:\s+|$)){4,}", "", text)


def search_entries(chapters, formulas):
    """Return [address, title, text] of sections, metrics, exhibits, functions, labelled tests."""
    of_row = defaultdict(list)
    for name in tables.every_metric():
        of_row[tables.family(name)].append(name)
    measured = [["appendix-metrics.html#all-metrics-of-a-correction", row.replace("_", " "),
                 f"{tables.FORMULAS[row]}: {' '.join(names)}"] for row, names in of_row.items()]
    bugs = [[f"museum.html#{exhibit.name}", f"{exhibit.name.replace('_', ' ')} · Bugs that shipped",
             exhibit.says] for exhibit in museum.exhibits()]
    proofs = [part for file in proving_files() for part in parts(file) if part.labels]
    parts_of = [*(part for file in FILES for part in parts(file)), *proofs]
    return [[f'{c.page}#{s["id"]}',
             " · ".join({plain(link, formulas): 0 for link in (c.sections[0]["link"], s["link"])}),
             without_rows_of_numbers(plain(s["text"], formulas))]
            for c in chapters for s in c.sections] + measured + bugs + [
        [f"{page_of(part.file)}#L{part.first}", f"{part.name} ({part.file})",
         part.summary.replace("`", "")] for part in parts_of]


def by_page(entries):
    """Return [page, its name, [[place, title, text] …]] of each page: the name is said once.

    A title is the name, then " · " and the rest, or the rest and the name in brackets.
    """
    pages = defaultdict(list)
    for address, title, text in entries:
        page, place = address.split("#")
        bracket = re.search(r" \((.*)\)$", title)
        name = bracket[1] if page.endswith(".py.html") and bracket else title.split(" · ")[0]
        pages[page, name].append([place, title.replace(f" ({name})", "").replace(name, "", 1)
                                  .removeprefix(" · "), text])
    return [[page, name, parts] for (page, name), parts in pages.items()]


def main():
    if not shutil.which("node") or not (HERE / "node_modules" / "katex").is_dir():
        sys.exit("book/pages.py needs node and, by `npm install --prefix book/assets`, KaTeX")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    chapters = [Chapter(path) for path in [*CHAPTERS, *APPENDICES]]
    bodies = {c.page: c.html() for c in chapters}
    bodies["references.html"] = reference_page()
    bodies["museum.html"] = museum_page()
    bodies["which.html"] = which_page()
    bodies["differ.html"] = differ_page()
    bodies["index.html"] = index_page(chapters, bodies)
    sources = [*FILES, *proving_files(), *LINKED]
    bodies |= {page_of(file): source_page(file) for file in sources}
    data = {name: numbers() for name, numbers in moving.DATA.items()}
    for loss in data["curves"]["values"]:
        loss["page"] = equations()[loss["label"]]
    made = rendered_by_node(data)

    def finished(body):
        body = re.sub("\x04(.*?)\x05", lambda m: (DRAWN | made["figures"])[m[1]], body)
        return re.sub("\x02(.*?)\x03", lambda m: made["formulas"][int(m[1])], body)

    order = [("index.html", "Three Policies"), *((c.page, c.title) for c in chapters)]
    around = {page: (before, after)
              for before, (page, _), after in zip([None, *order], order, [*order[1:], None])}
    names_of = dict(order) | {page_of(file): file for file in sources}
    names_of |= {"references.html": "References", "museum.html": "Bugs that shipped",
                 "which.html": "Which correction do I need?", "differ.html": "My log-probs differ"}
    for page, body in bodies.items():
        title = names_of[page]
        write(page, title if page != "index.html" else f"{SAMPLER} · {title}", finished(body),
              described(page, title, body, made["formulas"]), *around.get(page, (None, None)))
    for old, stem in MOVED.items():
        (OUT / f"{old}-{stem.partition('-')[2]}.html").write_text(moved_page(f"{stem}.html"))

    entries = search_entries(chapters, made["formulas"])
    index = json.dumps(by_page(entries), ensure_ascii=False, separators=(",", ":"))
    (OUT / "search.js").write_text(f"const INDEX = {index};\n")
    (OUT / "data.js").write_text(f"const DATA = {json.dumps(data, ensure_ascii=False)};\n")
    katex = HERE / "node_modules" / "katex" / "dist"
    shutil.copytree(katex / "fonts", OUT / "fonts",
                    ignore=shutil.ignore_patterns("*.ttf", "*.woff"))
    style = re.sub(r",url\([^)]*\.(?:woff|ttf)\) format\([^)]*\)", "",
                   (katex / "katex.min.css").read_text())
    (OUT / "style.css").write_text(style + (HERE / "style.css").read_text())
    shutil.copy(HERE / "book.js", OUT)
    shutil.copy(ROOT / "math" / "figures" / "preview.png", OUT)
    shutil.copy(HERE / "exact.js", OUT)
    shutil.copy(HERE / "figures.js", OUT)
    print(f"site/index.html: {len(bodies)} pages, {len(FORMULAS)} formulas, "
          f"{len(equations())} labelled equations")


if __name__ == "__main__":
    main()
    if sys.argv[1:] == ["pages"]:
        (OUT / ".nojekyll").touch()                    # GitHub Pages serves the files as they are
        print(shutil.make_archive(str(OUT), "zip", ROOT, OUT.name))
