"""Writes the reading edition into book/: the chapters, the book's files and the tests,
as pages that work from disk.

Equation, function and test find one another by the labels (eq:…) which the chapters define and
the code cites. The figures' numbers are computed here, by the oracle and by losses.py. Nothing
that a page shows is typed here.

    python math/book.py        # needs requirements/book.txt and `npm install --prefix math/book`

What a chapter's markup means to this edition, beside Markdown: what cites the **(eq:…)** below a
formula stands beside it. A block of `>>>` is folded; its line is the block's first comment, when it
begins with one, otherwise the last sentence before it. What a chapter's first block does before it
prints is the set-up. <details><summary>Answer</summary> … </details> is an answer, folded
everywhere; the blocks in it are not.
"""

import ast
import doctest
import html
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import NamedTuple

import yaml
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonConsoleLexer, get_lexer_by_name, get_lexer_for_filename

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "math")]

import torch
from tables import POLICIES, RolloutCorrectionConfig, bias_and_std, priced

from correction import PRESETS, correct, rejection_mask
from estimators import aggregate_log_ratio
from losses import (cispo_loss, exp_ratio, gspo_loss, policy_loss, ppo_clip_loss, reinforce_loss,
                    sapo_loss)

HERE, OUT = ROOT / "math" / "book", ROOT / "book"
FILES = [f"{name}.py" for name in (
    "estimators", "surrogates", "rejection", "metrics", "correction", "centering", "losses",
    "causes", "doctor", "policy", "rollout", "trainer", "kernels/log_probs")]
CHAPTERS = sorted((ROOT / "math").glob("[0-9]*.md"), key=lambda path: int(path.name.split("-")[0]))
LABEL = re.compile(r"eq:[a-z0-9]+(?:-[a-z0-9]+)*")
DEFINITION = re.compile(rf"\*\*\(({LABEL.pattern})\)\*\*")

# Where a figure that moves stands: in the place of a picture, or at the end of a section.
IN_PLACE = {"bias-variance.png": "cap", "length-trap.png": "trap"}
AT_END = {"4-ppo.md": ("sapo-a-gate-instead-of-a-clip", "curves"),
          "6-correction.md": ("correction-truncate-mask-reject-normalise", "batch")}


# ------------------------------------------------------------------------------ code, by its labels

class Part(NamedTuple):
    """A function, class or test, and how near to its first line it cites each label."""

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
    """The parts that cite a label; first the one that is about it."""
    found = [part for file in files for part in parts(file) if label in part.labels]
    often = Counter(part.file for part in found)

    def distance(p):
        named = label.removeprefix("eq:") in p.name
        return (p.is_class, p.labels[label], not named, -often[p.file], len(p.labels))

    return sorted(found, key=distance)


@cache
def proving_files():
    """The tests that cite an equation, but for those about the labels
    themselves, and the oracle."""
    tests = [path for path in sorted((ROOT / "tests").glob("test_*.py"))
             if LABEL.search(path.read_text())]
    return ["tests/oracle.py", *(f"tests/{path.name}" for path in tests
                                 if path.stem not in ("test_math", "test_book"))]


@cache
def names():
    """Public name → page and line, of the book's files; of the oracle, whose names
    are short, only long ones."""
    return {part.name: f"{page_of(part.file)}#L{part.first}"
            for file in ["tests/oracle.py", *reversed(FILES)]
            for part in parts(file) if file in FILES or "_" in part.name}


def page_of(file):
    return file.replace("/", "-") + ".html"


@cache
def equations():
    """Label → its chapter's page."""
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
    """The lines of a file as HTML."""
    text = in_colours((ROOT / file).read_text(), get_lexer_for_filename(file, stripnl=False))
    return [link_references(link_labels(line)) for line in text.rstrip("\n").split("\n")]


def listing(part):
    lines = enumerate(highlighted(part.file)[part.first - 1:part.last], part.first)
    kinds = {True: "doc", False: "code"}
    return boxed("\n".join(
        f'<span class="l {kinds[n in part.docstring]}" data-n="{n}">{line}</span>'
        for n, line in lines))


def panel(label):
    """What stands beside an equation: the function that computes it open, the
    others and the tests folded."""
    def folded(part, opened=False):
        where = f'{page_of(part.file)}#L{part.first}'
        head = (f'<code>{part.name}</code> '
                f'<a class="where" href="{where}">{part.file}:{part.first}</a> '
                f'<span class="sum">{html.escape(part.summary)}</span>')
        shown = f'<p><a href="{where}">on its page</a></p>'
        if part.last - part.first < 110:
            shown = listing(part)
        return f'<details class="part"{" open" * opened}><summary>{head}</summary>{shown}</details>'

    tests = sorted(citing(label, proving_files()), key=lambda part: (part.file, part.first))
    return (f'<aside class="panel" data-eq="{label}"><div class="stick"><h4>computed by</h4>'
            + "".join(folded(part, not i) for i, part in enumerate(citing(label, FILES)))
            + '<details class="tests" open><summary><h4>'
            + f'proved by {len(tests)} test{"s"[len(tests) < 2:]}</h4></summary>'
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
    """A displayed formula; where \\qquad parts it, it may break on a narrow page."""
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
    """What a text or a comment may call a reference → its id."""
    return {name: e["id"] for e in references()
            for name in [e["id"], e["link"], *e.get("cited", [])]}


def link_references(text):
    known = "|".join(map(re.escape, sorted(mentions(), key=len,
                                           reverse=True))).replace("'", "(?:'|&#(?:39|x27);)")
    def link(found):
        place = mentions()[html.unescape(found[0])]
        return f'<a href="references.html#{place}">{found[0]}</a>'

    return re.sub(rf"(?<![\w/.])(?:{known})(?![\w.]*\d)", link, text)


def link_text(text):
    """Labels, chapters and references in running text become links."""
    pages = {path.name.split("-")[0]: f"{path.stem}.html" for path in CHAPTERS}
    return link_references(re.sub(
        r"\b[Cc]hapter (\d+)\b",
        lambda m: f'<a href="{pages[m[1]]}">{m[0]}</a>' if m[1] in pages else m[0],
        link_labels(html.escape(text))))


def slug(title):
    return re.sub(r"[^\w\- ]", "", re.sub(r"^\d+\. ", "", title).lower()).replace(" ", "-")


def target(href, folder):
    """Where a link of a document leads in the book."""
    if re.match(r"https?:|mailto:|#", href):
        return href
    path, _, anchor = href.partition("#")
    file = (ROOT / folder / path).resolve().relative_to(ROOT)
    if file.suffix == ".md" and file.parent.name == "math":
        return f"{file.stem}.html" + (f"#{anchor}" if anchor else "")
    if file.suffix == ".png":
        (OUT / "figures").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, OUT / "figures" / file.name)
        return f"figures/{file.name}"
    LINKED[str(file)] = None
    return page_of(str(file))


LINKED = {}  # other files of the repository that the chapters name: {path: None}, in order


def markdown(folder):
    md = MarkdownIt("commonmark", {"html": True}).enable("table").use(
        dollarmath_plugin, renderer=lambda tex, options: formula(tex, options["display_mode"]))

    def code(renderer, tokens, i, options, env):
        text = html.escape(tokens[i].content)
        where = names().get(tokens[i].content) or (page_of(text)
                                                   if text in [*FILES, *proving_files()] else None)
        return f'<a href="{where}"><code>{text}</code></a>' if where else f"<code>{text}</code>"

    def opened(renderer, tokens, i, options, env):
        tokens[i].attrs["href"] = target(tokens[i].attrs["href"], folder)
        return renderer.renderToken(tokens, i, options, env)

    def image(renderer, tokens, i, options, env):
        name = tokens[i].attrs["src"].split("/")[-1]
        if name in IN_PLACE:
            return widget(IN_PLACE[name])
        alt = html.escape(tokens[i].content)
        return f'<img src="{target(tokens[i].attrs["src"], folder)}" alt="{alt}" title="{alt}">'

    for name, rule in (("text", lambda _, tokens, i, *more: link_text(tokens[i].content)),
                       ("code_inline", code), ("link_open", opened), ("image", image),
                       ("table_open", lambda *_: '<div class="scroll"><table>'),
                       ("table_close", lambda *_: "</table></div>")):
        md.add_render_rule(name, rule)
    return md


def widget(name):
    return f'<figure class="widget" data-widget="{name}">\x04{name}\x05</figure>'


def fold(kind, title, source):
    """A block on one line, which says what it is for. What it printed says nothing
    without the code above it."""
    return (f'<details class="{kind}"><summary><span>{title}</span></summary>'
            f'{boxed(in_colours(source, PythonConsoleLexer()))}</details>')


class Row:
    """A stretch of text with at most one labelled equation; `wide` is the class of one
    of the page's whole width."""

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
    """One document: its rows, its headings and the plain text of each, for the search."""

    def __init__(self, path):
        self.path, self.page, self.md = path, f"{path.stem}.html", markdown("math")
        self.rows, self.sections, self.figures = [Row()], [], []
        self.said, self.has_setup, self.answers = "", False, 0
        depth, blocks = 0, [[]]
        for token in self.md.parse(path.read_text()):
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
        if token.type == "heading_open":
            self.heading(token, text)
        elif token.type == "fence":
            self.fence(token, " ".join(t.content for t in following if t.type == "inline"))
        elif token.type == "html_block":
            self.answers += token.content.count("<details") - token.content.count("</details")
            if not token.content.startswith("<!--"):
                self.put(token.content.replace("<details", '<details class="answer"'))
        elif not DEFINITION.fullmatch(text):
            rendered = self.md.renderer.render(block, self.md.options, {})
            columns = rendered.count("</th>")
            broad = "data-widget" in rendered or (columns > 2 and not self.rows[-1].label)
            self.put(rendered, "wide many" if columns > 5 else "wide" * broad)
            self.said = text
        if self.sections and token.type != "fence":
            self.sections[-1]["text"] += " " + text

    def heading(self, token, text):
        if token.tag != "h3":
            self.end_section()
            self.rows.append(Row())
        self.sections.append({"title": text, "id": slug(text), "level": token.tag, "text": ""})
        link = f'<a href="#{slug(text)}">{self.md.renderInline(text)}</a>'
        self.put(f'<{token.tag} id="{slug(text)}">{link}</{token.tag}>')
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
        setup = ""
        if not self.has_setup and "import" in source:
            self.has_setup, lines = True, source.splitlines(keepends=True)
            prints = [x.lineno for x in doctest.DocTestParser().get_examples(source) if x.want]
            at = prints[0] if prints else len(lines)
            setup = fold("setup", "Set-up of this chapter", "".join(lines[:at]))
            source = "".join(lines[at:])
        if self.answers:
            return setup + boxed(in_colours(source, PythonConsoleLexer()))
        comment = re.match(r">>> # *(.*)\n", source)
        last = re.split(r"(?<=[.?!])\s+(?=[^a-z0-9])", self.said)[-1].rstrip(":")
        sentence = comment[1] if comment else last
        return setup + (fold("proof", self.md.renderInline(sentence), source) if source.strip()
                        else "")

    def html(self):
        return "\n".join(row.html() for row in self.rows)


# ------------------------------------------------------------- the numbers of the figures that move

def cap_data():
    """Bias, its standard error, the standard deviation, and all three as
    chapter 6's table writes them."""
    caps, noises, limits = [1, 1.25, 1.5, 2, 3, 5, 10], [0.05, 0.2, 0.5], [1, 2, 4, 8]
    methods = {"token, at most C": lambda c: RolloutCorrectionConfig("token", float(c)),
               "sequence, at most C": lambda c: RolloutCorrectionConfig("sequence", float(c)),
               "sequence, 0 outside [1/C, C]": lambda c: RolloutCorrectionConfig(
                   "sequence", (1 / c, float(c))),
               "no weight": lambda c: RolloutCorrectionConfig()}

    def point(config, T, noise):
        found = bias_and_std(config, T, noise)
        return [*(round(x, 4) for x in found[:3]), priced(found).replace("*", "")]

    values = {name: [[[point(of(c), T, noise) for c in (caps if name != "no weight" else caps[:1])]
                      for T in limits] for noise in noises] for name, of in methods.items()}
    return {"C": caps, "noise": noises, "T": limits, "policies": POLICIES, "values": values}


def trap_data():
    """One ratio on every token: the product, the geometric mean, and whether two presets'
    bounds keep the response."""
    ratios = [0.9, 0.99, 0.999, 1.0, 1.001, 1.01, 1.1]
    lengths = sorted({round(2 ** (i / 3)) for i in range(37)})
    bounds = [PRESETS[name]().rollout_rs for name in ("decoupled_seq_is_rs", "decoupled_geo_rs")]

    def point(ratio, L):
        log_ratio, mask = torch.full((1, L), ratio, dtype=torch.float64).log(), torch.ones(1, L)
        levels = [aggregate_log_ratio(log_ratio, mask, level)[0, 0].exp().item()
                  for level in ("sequence", "geometric")]
        return [*levels, *(bool(rejection_mask(log_ratio, mask, bound).all()) for bound in bounds)]

    return {"ratio": ratios, "lengths": lengths,
            "bounds": [next(iter(bound.items())) for bound in bounds],
            "values": [[point(ratio, L) for L in lengths] for ratio in ratios]}


def curves_data():
    """∂L/∂log π_θ of one token, by autograd through losses.py, at every
    r and for both signs of A."""
    ratios = torch.arange(1, 401) / 100

    def of_four(new, old, A):
        """GSPO with its own interval, where one of four tokens has the
        ratio r and the others have 1."""
        others = torch.zeros(len(new), 3)
        new, old = (torch.cat([x, others], -1) for x in (new, old))
        return gspo_loss(new, old, A.expand(-1, 4), torch.ones(len(new), 4))[:, :1]

    losses = {"REINFORCE": (lambda new, old, A: reinforce_loss(new, A), "eq:reinforce"),
              "PPO": (ppo_clip_loss, "eq:ppo-clip"),
              "PPO, dual clip 3": (lambda *x: ppo_clip_loss(*x, dual_clip=3.0), "eq:dual-clip"),
              "GSPO, one token of four": (of_four, "eq:gspo"),
              "CISPO": (cispo_loss, "eq:cispo"), "SAPO": (sapo_loss, "eq:sapo")}

    def slopes(loss, A):
        old = torch.full((len(ratios), 1), -5.0)
        new = (old + ratios[:, None].log()).requires_grad_()
        total = loss(new, old, torch.full_like(old, A)).sum()
        (gradient,) = torch.autograd.grad(total, new)
        return [round(x, 3) + 0.0 for x in gradient[:, 0].tolist()]

    return {"r": [round(r, 2) for r in ratios.tolist()], "values": [
        {"name": name, "label": label, "page": equations()[label], "plus": slopes(loss, 1.0),
         "minus": slopes(loss, -1)}
        for name, (loss, label) in losses.items()]}


def batch_data():
    """Six recorded responses through `correct` and `policy_loss`, a preset at a time."""
    recorded = json.loads((HERE / "batch.json").read_text())
    mask = torch.tensor([[token is not None for token in row] for row in recorded["tokens"]])
    mu, old, theta = (torch.tensor(recorded[name]).double()
                      for name in ("rollout", "old", "current"))
    A = torch.tensor(recorded["advantages"]).double()[:, None].expand_as(mu)
    presets = ["disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_k3_rs",
               "decoupled_k3_rs_seq_tis"]

    def rows(x):
        return [[round(v, 3) + 0.0 if m else None for v, m in zip(*pair)]
                for pair in zip(x.tolist(), mask.tolist())]

    def of(preset):
        correction = correct(old, mu, mask, PRESETS[preset](), A)
        lp = theta.clone().requires_grad_()
        loss, _ = policy_loss(lp, old, mu, A, mask, PRESETS[preset](), correction=correction)
        (gradient,) = torch.autograd.grad(loss, lp)
        weights = torch.ones_like(mu) if correction.weights is None else correction.weights
        return {"weights": rows(weights), "kept": rows(correction.mask.double()),
                "gradient": rows(-mask.sum() * gradient), "loss": round(loss.item(), 4)}

    return {**{name: recorded[name] for name in ("prompts", "tokens", "advantages", "how")},
            "rollout": rows(mu), "old": rows(old), "rho": rows(exp_ratio(old - mu)),
            "r": rows(exp_ratio(theta - old)),
            "presets": {preset: of(preset) for preset in presets}}


# ---------------------------------------------------------------------------------------- the pages

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


def index_page(chapters):
    title, intro, picture = (ROOT / "README.md").read_text().split("\n\n")[:3]
    listed = "".join(f'<li><a href="{c.page}">{link_text(c.title)}</a><span class="sum">'
                     + " · ".join(f'<a href="{c.page}#{s["id"]}">{link_text(s["title"])}</a>'
                                  for s in c.sections if s["level"] == "h2") + "</span></li>"
                     for c in chapters)
    figures = "".join(f'<li><a href="{c.page}#fig-{name}">\x04{name}.title\x05</a></li>'
                      for c in chapters for name in c.figures)
    files = "".join(f'<li><a href="{page_of(f)}"><code>{f}</code></a></li>'
                    for f in [*FILES, *proving_files()])
    return (f'<section class="row"><div class="before">'
            f'{markdown(".").render(title + 2 * chr(10) + intro)}'
            f'<h2>Chapters</h2><ol class="contents">{listed}</ol></div>'
            f'<div class="beside">{markdown(".").render(picture)}'
            f'<h2>Figures that move</h2><ul>{figures}</ul>'
            f'<h2>Code and tests</h2><ul class="files">{files}</ul>'
            f'<p><a href="references.html">References</a></p></div></section>'
            f'<div class="wide"><h2 id="equations">Every equation</h2></div>{equation_table()}')


def write(page, title, body, *around):
    links = [f'<a class="{arrow}" href="{other[0]}">{link_text(other[1])}</a>' if other
             else f'<i class="{arrow}"></i>'
             for other, arrow in zip(around, ("before", "after"))]
    template = Template((HERE / "page.html").read_text())
    (OUT / page).write_text(template.substitute(title=html.escape(title), body=body,
                                                before=links[0], after=links[1]))


def rendered_by_node(data):
    """KaTeX's HTML of every formula, and each figure as it stands without JavaScript."""
    found = subprocess.run(["node", HERE / "render.js"], capture_output=True, text=True,
                           input=json.dumps(
        {"formulas": [{"tex": tex, "display": display} for tex, display in FORMULAS],
         "data": data}))
    if found.returncode:
        sys.exit(f"math/book/render.js failed: {found.stderr.strip()}")
    return json.loads(found.stdout)


def search_entries(chapters):
    """[address, title, text] of every section, function and test."""
    parts_of = [part for file in [*FILES, *proving_files()] for part in parts(file)]
    return [[f'{c.page}#{s["id"]}', " · ".join({c.title: 0, s["title"]: 0}),
             re.sub(r"[$`*\\{}]", "", s["text"])]
            for c in chapters for s in c.sections] + [
        [f"{page_of(part.file)}#L{part.first}", f"{part.name} ({part.file})", part.summary]
        for part in parts_of]


def main():
    if not shutil.which("node") or not (HERE / "node_modules" / "katex").is_dir():
        sys.exit("math/book.py needs node and, by `npm install --prefix math/book`, KaTeX")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    chapters = [Chapter(path) for path in CHAPTERS]
    bodies = {c.page: c.html() for c in chapters}
    bodies["index.html"], bodies["references.html"] = index_page(chapters), reference_page()
    sources = [*FILES, *proving_files(), *LINKED]
    bodies |= {page_of(file): source_page(file) for file in sources}
    data = {"cap": cap_data(), "trap": trap_data(), "curves": curves_data(), "batch": batch_data()}
    made = rendered_by_node(data)

    def finished(body):
        body = re.sub("\x04(.*?)\x05", lambda m: made["figures"][m[1]], body)
        return re.sub("\x02(.*?)\x03", lambda m: made["formulas"][int(m[1])], body)

    order = [("index.html", "Three Policies"), *((c.page, c.title) for c in chapters)]
    around = {page: (before, after)
              for before, (page, _), after in zip([None, *order], order, [*order[1:], None])}
    names_of = dict(order) | {page_of(file): file for file in sources}
    names_of["references.html"] = "References"
    for page, body in bodies.items():
        write(page, names_of[page], finished(body), *around.get(page, (None, None)))
    entries = search_entries(chapters)
    (OUT / "search.js").write_text(f"const INDEX = {json.dumps(entries, ensure_ascii=False)};\n")
    (OUT / "data.js").write_text(f"const DATA = {json.dumps(data, ensure_ascii=False)};\n")
    katex = HERE / "node_modules" / "katex" / "dist"
    shutil.copytree(katex / "fonts", OUT / "fonts",
                    ignore=shutil.ignore_patterns("*.ttf", "*.woff"))
    style = re.sub(r",url\([^)]*\.(?:woff|ttf)\) format\([^)]*\)", "",
                   (katex / "katex.min.css").read_text())
    (OUT / "style.css").write_text(style + (HERE / "style.css").read_text())
    shutil.copy(HERE / "book.js", OUT)
    shutil.copy(HERE / "figures.js", OUT)
    print(f"book/index.html: {len(bodies)} pages, {len(FORMULAS)} formulas, "
          f"{len(equations())} labelled equations")


if __name__ == "__main__":
    main()
