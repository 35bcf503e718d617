"""Write a figure of matplotlib as an SVG that follows light and dark.

The file has both colours of whatever it draws, by CSS's `light-dark`: a browser takes the one that
fits the page around the picture. Whatever does not know `light-dark` shows the light picture.

A figure drawn again gives the same file: numbers are rounded to a hundredth of a point, and ids are
counted, since matplotlib makes them of all digits. Text stays text.
"""

import io
import re
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib

# A colour on a light page → the same on a dark one. The first two are the page and its text.
DARK = {"#ffffff": "#15171a", "#000000": "#d9dce1",
        "#0072b2": "#4fa3e8", "#56b4e9": "#a6dbf7", "#e69f00": "#e6b03c", "#009e73": "#3cc79c",
        "#d55e00": "#f0843c", "#cc79a7": "#e39ac3", "#a0527f": "#e39ac3", "#b0558a": "#e39ac3",
        "#555555": "#aab0ba", "#666666": "#9aa1ad", "#777777": "#9aa1ad", "#999999": "#8d94a0",
        "#bbbbbb": "#4b515a", "#cccccc": "#565c66", "#dddddd": "#2e3238", "#eeeeee": "#24282e",
        "#fbeeec": "#33211f", "#eef6fb": "#18242d", "#d9ebf7": "#1d3342",
        "#1b78ab": "#a6dbf7", "#946300": "#e6b03c", "#007e5c": "#3cc79c",
        "#b84f00": "#f0843c", "#a64d82": "#e39ac3", "#6b6b6b": "#9aa1ad"}
# A colour too faint for a text on a light page → a darker one.
TEXT = {"#56b4e9": "#1b78ab", "#e69f00": "#946300", "#009e73": "#007e5c", "#d55e00": "#b84f00",
        "#cc79a7": "#a64d82", "#777777": "#6b6b6b", "#999999": "#6b6b6b"}

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"


def as_svg(figure: Any, name: str, dpi: int) -> str:
    """Return a figure as the text of an SVG file, as large on a page as dpi says."""
    memory = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(memory, format="svg", metadata={"Date": None})
    text = memory.getvalue()
    used = dict.fromkeys(re.findall(r"#(\w{8,})", text))           # ids that something refers to
    for n, found in enumerate(used):
        text = text.replace(found, f"{name}-{n}")
    root = ET.fromstring(text)
    root[:] = [child for child in root if child.find(f".//{SVG}style") is None
               and child.tag.startswith(SVG)]
    shorten(root, name)
    width, height = (round(dpi * inches) for inches in figure.get_size_inches())
    inside = "".join(map(written, root))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" width="{width}" '
            f'height="{height}" viewBox="{root.get("viewBox")}" stroke-linejoin="round" '
            f'font-family="DejaVu Sans, Verdana, sans-serif">\n'
            f"<style>\n{both_colours(inside)}</style>\n{inside}</svg>\n")


def shorten(node: ET.Element, name: str) -> None:
    """Round the numbers of whatever is in an element; leave out what says nothing."""
    kept = []
    for child in node:
        shorten(child, name)
        said = {key.replace(HREF, "href"): value for key, value in child.attrib.items()
                if key != "id" or value.startswith(f"{name}-")}
        if "style" in said:
            said["style"] = shortened_style(said["style"], child.tag)
        child.attrib = {key: " ".join(re.sub(r"-?\d+\.\d{3,}", rounded, value).split())
                        for key, value in said.items()}
        kept += list(child) if child.tag == f"{SVG}g" and not child.attrib else [child]
    node[:] = kept


def rounded(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 2) + 0:g}"                       # 0 and not -0


def shortened_style(style: str, tag: str) -> str:
    """Return a style without its font, which is the file's, and with colours fit for a text."""
    kept = [one for one in style.split("; ")
            if not one.startswith(("font-family", "stroke-linejoin"))]
    if tag in (f"{SVG}text", f"{SVG}tspan"):
        kept = [re.sub("(?<=fill: )#.*", lambda m: TEXT.get(m[0], m[0]), one) for one in kept]
    return "; ".join(kept)


def both_colours(inside: str) -> str:
    """Return a rule for each colour that the elements have; each has a twin in DARK."""
    rules = ["svg:root { color-scheme: light dark } .drawn text { white-space: pre }",
             f".drawn {{ fill: light-dark(#000000, {DARK['#000000']}) }}"]
    for kind, colour in sorted(set(re.findall(r"(fill|stroke): (#\w+)", inside))):
        if colour not in DARK:
            raise SystemExit(f"{colour} has no twin for dark pages: add it to DARK of drawn.py")
        rules.append(f'[style*="{kind}: {colour}"] '
                     f"{{ {kind}: light-dark({colour}, {DARK[colour]}) !important }}")
    return "\n".join(rules) + "\n"


def written(node: ET.Element) -> str:
    """Return an element as text."""
    text = ET.tostring(node, encoding="unicode").replace(f' xmlns:ns0="{SVG[1:-1]}"', "")
    return re.sub(r"\n\s*", "\n", text.replace("ns0:", "").strip()) + "\n"
