"""The commands: `three-policies train` and `three-policies doctor`, each with its own `--help`."""

import sys
from collections.abc import Sequence

COMMANDS = """three-policies train [FILE.yaml] [key=value …]     train, as python trainer.py does
three-policies doctor DUMP                          find why two log-probs differ"""


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments to the command that the first one names; return its exit status."""
    name, *given = [*(sys.argv[1:] if argv is None else argv)] or [""]
    if name == "train":
        from three_policies.training import signals
        signals.catch()                # before the other imports, which take seconds
        from three_policies.trainer import main as command
    elif name == "doctor":
        from three_policies.doctor.command import main as command
    else:
        print(COMMANDS, file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    return command(given)


if __name__ == "__main__":
    sys.exit(main())
