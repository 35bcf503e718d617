"""The commands `three-policies train`, `fetch`, `doctor` …, each with a `--help`."""

import sys
from collections.abc import Sequence
from importlib import import_module

# name: what it does, and the module whose `main` does it
COMMANDS = {
    "train": ("train, as python trainer.py does", "trainer"),
    "fetch": ("load a small real model", "training.fetch"),
    "doctor": ("find why two log-probs differ", "doctor.command"),
    "translate": ("write a correction in our keys, or in another system's", "interop.translate"),
    "report": ("say how a run goes, and draw its curves", "training.report")}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments to the command that the first one names; return its exit status."""
    name, *given = [*(sys.argv[1:] if argv is None else argv)] or [""]
    if name not in COMMANDS:
        asked = name in ("-h", "--help")
        print("\n".join(["three-policies COMMAND …, one of", *(
            f"    {name:12}{meaning}" for name, (meaning, _) in COMMANDS.items())]),
            file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2

    if name == "train":
        from three_policies.training import signals
        signals.catch()                # before the other imports, which take seconds
    return import_module(f"three_policies.{COMMANDS[name][1]}").main(given)


if __name__ == "__main__":
    sys.exit(main())
