r"""Decide when an answer is right: other ways to write a number are equal, and nothing is computed.

This file decides which part of a response is its answer, and how it may differ from the row's. A
right answer that is missed costs a little of the signal. A wrong one that is accepted is what the
policy will learn to write. So whatever is in doubt is wrong.

* The answer is what follows the last ####, up to the end of that line. Without one it is what the
  last \boxed{…} holds, and without that the whole response.
* White space, one final full stop and these marks around all of it are removed: **42**, *42*,
  __42__, _42_, `42`, $42$, $$42$$, \(42\), \[42\], \boxed{42}, \text{42}. A list stays one: $41$ or
  $42$.
* A number loses its plus sign, leading zeros, zeros at the end of its decimals, a currency sign,
  and the separators of thousands: commas, or spaces that do not break (LaTeX's \, is one). U+2212
  is a minus, and −0 is 0. So $1,234.50 and +01234.5 are equal. However long a number is, every
  digit counts.
* A unit behind a number is ignored where the row's answer is a bare number: 42 apples, 42 km/h,
  42%, 42\text{ cm}^2, 42 square feet and $42 per week are then 42. Where the row's answer has a
  unit, the response must have it too; for $42 no other currency and no unit is accepted. A word
  that makes another number of it is no unit, nor are two words: 42 thousand, 42 or 43, 42 and a
  half are text.
* All else is text and is compared letter by letter, capitals included: 3 kings is not 3 queens.
  \frac{1}{2} is 1/2, but neither 2/4 nor 0.5, and 1e3 is not 1000.
"""

import re

LONGEST = 300              # characters at most of a number, or of a text with marks around it
SPACES = "\u00a0\u2007\u2009\u202f"            # no-break, as wide as a digit, thin, narrow no-break
MONEY = "[$＄€£¥]"                             # ＄ stands for \$, which never pairs

# A pair of marks around the whole, without another mark of its kind between the two.
MARKS = [re.compile(pattern) for pattern in (
    r"(?P<mark>\*\*\*|___|\*\*|__|\$\$|[*_`$])(?P<inner>(?:(?!(?P=mark)).)+)(?P=mark)",
    r"\\\((?P<inner>(?:(?!\\[()]).)+)\\\)", r"\\\[(?P<inner>(?:(?!\\[][]).)+)\\\]",
    r"\\boxed\{(?P<inner>(?:[^{}]|\{[^{}]*\})*)\}")]

# LaTeX forms and their replacements; the last one is not LaTeX.
WRITTEN = [(re.compile(pattern), plain) for pattern, plain in (
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1"), (r"\\\$", "＄"), (r"\\%", "%"),
    (r"\{,\}|,\\!", ","), (r"\\,", "\u2009"), (r"\\[;: ]", " "), (r"\^\{?\\circ\}?", "°"),
    (r"^([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3"), ("\u2212", "-"))]

# Units, and words that are no units, since they change the number before them.
NUMERALS = ("(?:one|two|three|thir|four|fort|fi[fv]|six|seven|eigh|nin|eleven|twel|twen|half|halv|"
            "quarter|hundred|thousand|dozen)[a-z]*|zero|ten(?:s|ths?)?|[a-z]*illi(?:on|ard)[a-z]*|"
            "score|gross|grand|lakhs?|crores?|squared|cubed|factorial|and|plus|minus|times|over|"
            "under|above|below|point|thou|mille|tausend|millones|mil|bil|mln|bln|trn|[a-z]*fold|"
            "(?:doub|trip|quadrup)le[ds]?|twice|neg|negative|mod|divided|none|nil|not|wrong|incorrect|"
            "false|less|more|fewer|inverse|root|sqrt|log|exp|doz|lacs?|myriad")
POWER = r"(?:[²³]|\^\{?[23]\}?)?"
SHORT = rf"(?:[kcm]?m|[km]?g|m?[lL]|s|h|hrs?|min|ft|in|yd|mi|mph|oz|lbs?|[ap]m){POWER}"
WORD = rf"(?!(?i:{NUMERALS})(?![A-Za-z]))[A-Za-z]{{3,}}{POWER}"
GAP = f"[ {SPACES}]"
PER = f"(?:/|{GAP}per{GAP})"
UNIT = (f"(?:{GAP}?{SHORT}|{GAP}(?:(?:square|cubic|sq){GAP})?(?:{SHORT}|{WORD}))"
        f"(?:{PER}(?:{SHORT}|{WORD}))?")
NUMBER = re.compile(rf"""
    (?P<sign> [-+]? (?P<money> {MONEY}{GAP}? )? (?(money) [-+]? ) )
    (?P<whole> [1-9]\d{{0,2}} (?P<by> [,{SPACES}] ) \d{{3}} (?: (?P=by)\d{{3}} )* | \d* )
    (?: \. (?P<decimals> \d* ) )?
    (?P<unit> (?: {PER}{WORD} )?
            | (?(money) (?!) | (?: {GAP}?(?: [%€£¥¢] | °[CF]? ) | {UNIT} ) ) )
    """, re.VERBOSE | re.ASCII)


def is_right(response: str, answer: str) -> bool:
    """True if a response states the answer of a row."""
    given, (number, unit) = number_and_unit(response), number_and_unit(answer)
    if not number or unit:
        return given == (number, unit)
    sign = currency(answer)
    return given[0] == number and (not sign or (not given[1] and currency(response) in ("", sign)))


def currency(text: str) -> str:
    """Return the currency sign before the number that a text states, or nothing."""
    found = NUMBER.fullmatch(strip_marks(extract_answer(text))[:LONGEST])
    return (found["money"] or "").strip(" " + SPACES).replace("＄", "$") if found else ""


def final_answer(text: str) -> str:
    """Return what a text states, as it is compared: 1234.5 km for "so … #### **1,234.50 km**."."""
    return " ".join(filter(None, number_and_unit(text)))


def number_and_unit(text: str) -> tuple[str, str]:
    """Return ("1234.5", "km"); a bare number has the unit "", and other text is all unit."""
    text = strip_marks(extract_answer(text))
    found = NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    signs = re.sub("[^-+]", "", found["sign"]) if found else ""
    if not found or len(signs) > 1 or not (found["whole"] or found["decimals"]):
        return "", " ".join(text.replace("＄", "$").split())
    whole = re.sub(r"\D", "", found["whole"]).lstrip("0") or "0"
    decimals = (found["decimals"] or "").rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    minus = "-" if signs == "-" and number != "0" else ""
    return minus + number, " ".join(found["unit"].split())


def extract_answer(text: str) -> str:
    r"""Return what follows the last ####, else the inside of the last \boxed{…}, else the whole."""
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    if "\\boxed{" not in text:
        return text
    text, depth = text.rsplit("\\boxed{", 1)[1], 1
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:end]
    return text


def strip_marks(text: str) -> str:
    """Remove the marks that surround all of a text, one pair after the other."""
    text, before = " ".join(re.split(rf"[^\S{SPACES}]+", text)).strip(), None
    while text != before and len(text) <= LONGEST:
        before = text
        for pattern, plain in WRITTEN:
            text = pattern.sub(plain, text)
        text = re.sub(r"(?<!\.)\.$", "", text.strip()).strip()
        for pattern in MARKS:
            if found := pattern.fullmatch(text):
                text = found["inner"].strip()
    return text
