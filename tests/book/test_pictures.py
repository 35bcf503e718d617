"""The pictures of math/figures/ have both colours, legible, and drawn again they are the same.

The README's picture shows the numbers of its study's table.
"""

import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest

from three_policies.book.drawn import DARK, SVG, TEXT, as_svg

ROOT = Path(__file__).resolve().parents[2]

FILES = sorted((ROOT / "math/figures").glob("*.svg"))
COLOUR = re.compile(r"(fill|stroke): (#\w+)")


def contrast(one, other):
    """Return the ratio of two colours' luminances, by WCAG 2: 1 to 21."""
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (x / 12.92 if x <= 0.04 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def texts(file):
    return list(ElementTree.fromstring(file.read_text()).iter(f"{SVG}text"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_picture_has_both_colours_of_all_it_draws_and_loads_nothing(file):
    text = file.read_text()
    style, inside = text.split("</style>")
    for kind, colour in set(COLOUR.findall(inside)):
        assert (f'[style*="{kind}: {colour}"] {{ {kind}: light-dark({colour}, {DARK[colour]}) '
                "!important }") in style, (kind, colour)
    assert set(COLOUR.findall(inside)) >= {("fill", "#ffffff"), ("stroke", "#000000")}
    ids = re.findall(r' id="(.*?)"', text)
    assert set(ids) == set(re.findall(r"(?<=#)[a-z][\w-]+-\d+", inside)), "an id that nothing uses"
    assert len(set(ids)) == len(ids) and all(x.startswith(f"{file.stem}-") for x in ids)
    assert not re.search(r"<image|<script|url\((?!#)|href=.(?!#)|\d\.\d{3}[^<]*\"", inside)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_pictures_words_are_legible_on_both_pages(file):
    """4.5 is what WCAG 2 asks of small text."""
    assert len(texts(file)) > 5
    for node in texts(file):
        colour = dict(COLOUR.findall(node.get("style", ""))).get("fill", "#000000")
        assert contrast(colour, "#ffffff") >= 4.5, ("".join(node.itertext()), colour)
        assert contrast(DARK[colour], DARK["#ffffff"]) >= 4.5, ("".join(node.itertext()), colour)


def test_colours_stay_apart_in_the_dark():
    """What carries data is legible there: the palette, not the grid, the shades and the page."""
    data = ["#0072b2", "#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#000000"]
    assert len({DARK[colour] for colour in data}) == len(data)
    assert all(contrast(DARK[colour], DARK["#ffffff"]) >= 4.5 for colour in data)
    assert all(TEXT.get(colour, colour) in DARK for colour in [*DARK, *TEXT])


@pytest.fixture(scope="module")
def figures():
    from three_policies.book import figures
    yield figures
    figures.plt.close("all")


def test_a_figure_drawn_again_is_the_same_file(figures):
    one, other = (as_svg(figures.study_64_areas(), "study-64-areas", 110) for _ in range(2))
    assert one == other and "2.2" in one


def test_a_colour_that_has_no_dark_one_is_refused(figures):
    figure, axis = figures.plt.subplots()
    axis.plot([0, 1], color="#123456")
    with pytest.raises(SystemExit, match="#123456 has no twin"):
        as_svg(figure, "new", 110)


def test_the_picture_of_areas_shows_its_studys_table(figures):
    """Each regime and arm has a dot for each seed at its area, then a diamond at their mean."""
    text = (ROOT / "math/figures/study-64-areas.svg").read_text()
    marks = [(float(x), float(y)) for x, y, style in re.findall(
        r'<use href="#.*?" x="(.*?)" y="(.*?)" style="(.*?)"', text) if "stroke-width" not in style]
    found = figures.runs("sixty-four")
    for regime in ("int4_fast", "int4_slow", "staleness_4"):
        known, shown = [], []
        for arm in ("naive", "bypass_ppo_clip", "decoupled_token_is", "decoupled_seq_is",
                    "matched"):
            areas = [float(row["area"]) for row in found[regime][arm].values()]
            known += [*areas, statistics.mean(areas)]
            of_arm, marks = marks[:len(areas) + 1], marks[len(areas) + 1:]
            assert len({y for _, y in of_arm}) == 1, (regime, arm)
            shown += [x for x, _ in of_arm]
        scale, start = statistics.linear_regression(known, shown)
        assert scale > 0 and shown == pytest.approx([start + scale * x for x in known], abs=0.02)
    assert not marks
