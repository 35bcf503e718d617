"""The modules of the project by name, and those that compute the book's equations."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
METHOD = ("checks", "ratios", "kl", "estimators", "surrogates", "rejection", "metrics", "presets",
          "correction", "centering", "losses")
ROOMS = ("training", "engines", "doctor", "interop", "oracle", "studies", "book")
EXPLAINED = (*METHOD, "doctor.tokens", "doctor.laws", "doctor.places", "doctor.causes",
             "doctor.health", "doctor.report", "doctor.growth")            # what cites equations


def modules() -> dict[str, Path]:
    """Return the project's modules, by their names without "three_policies."."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for room in (".", *ROOMS) for path in sorted((ROOT / room).glob("*.py"))}
