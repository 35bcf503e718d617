"""Three readers, and the five chapters in which each finds an answer.

README.md and the book's first page list them; the foot of each chapter says what comes next.
"""

from pathlib import Path

MATH = Path(__file__).resolve().parent.parent / "math"
PATHS = {"A run diverges today": (8, 7, 9, 10, 12),
         "I want to understand": (1, 3, 5, 6, 10),
         "I build a framework": (6, 13, 14, 16, 17)}


def link(number: int) -> str:
    """Return a link from one chapter to another, by its title."""
    [path] = MATH.glob(f"{number}-*.md")
    with path.open() as file:
        heading = file.readline().removeprefix("# ").strip()
    return f"[{heading}]({path.name})"


def foot(number: int) -> str:
    """Return the foot of a chapter: for each path that it is on, the next stop."""
    lines = []
    for reader, stops in PATHS.items():
        if number in stops:
            at = stops.index(number) + 1
            then = "the last stop"
            if at < len(stops):                 # the chapter's own text names the next chapter
                then = f"on this path the next stop is {link(stops[at])}"
            lines.append(f"*{reader}* ({at} of {len(stops)}): {then}.")
    return "\\\n".join(lines)


def doors() -> str:
    """Return the paths as a list."""
    return "\n".join(f"* *{reader}*: {', '.join(link(n) for n in stops)}."
                     for reader, stops in PATHS.items())
