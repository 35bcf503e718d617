"""The command `three-policies translate`: a correction in our keys, or in another system's.

    three-policies translate config.yaml                # what it means here, a sentence a key
    three-policies translate 'rollout_rs: token_k1' 'rollout_rs_threshold: "0.5_2.0"'
    three-policies translate --use-tis --tis-clip 2.0           # or key=value, as arguments
    three-policies translate --to verl decoupled_token_is       # lines to paste

What differs from how that system reads the block, or cannot be written, is a sentence on stderr.
"""

import argparse
import io
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from three_policies.interop.dialects import from_dialect, meanings_of, own_keys
from three_policies.interop.export import SYSTEMS, Export, to_dialect
from three_policies.presets import RolloutCorrectionConfig

USAGE = """three-policies translate [--to SYSTEM] PRESET | FILE | 'key: value' … | key=value … |
                                --key value …"""
DESCRIPTION = """Say what a correction means here, or write it in another system's keys. It is given
as the name of a preset, or as a block of this project, verl, SkyRL, TRL, prime-rl, OpenRLHF, slime
or NeMo-RL: a file, lines of YAML, or arguments of a command line."""
STATUS = """Exit code 0: the keys do all of it; sentences marked "*" on stderr say what is read or
written in another way. 1: something is left out; a sentence marked "!" names it, says what that
system has instead, and how this project does it there. 2: the block cannot be read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the correction in the keys asked for; return 0, 1 if a part is left out, or 2."""
    parser = argparse.ArgumentParser(usage=USAGE, description=DESCRIPTION, epilog=STATUS,
                                     allow_abbrev=False)
    parser.add_argument("--to", choices=("own", *SYSTEMS), default="own", metavar="SYSTEM",
                        help=f"whose keys are written: {', '.join(SYSTEMS)}, or own, the default")
    asked, given = parser.parse_known_args(argv)
    if not given:
        parser.error("name a preset, a file, or settings")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")       # a terminal of ASCII has no ρ

    try:
        code = translate(given, asked.to)
        sys.stdout.flush()
        return code
    except BrokenPipeError:                                     # Python would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, ValueError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename:
            why = f"{error.filename} cannot be read: {error.strerror}"
        elif isinstance(error, OSError):
            why = f"the output cannot be written: {error.strerror}"
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"translate: {why}", file=sys.stderr)
        return 2


def translate(given: Sequence[str], system: str) -> int:
    """Print the correction in a system's keys; return 0, or 1 if a part is left out."""
    try:
        from three_policies.interop.given import block_of
    except ImportError:
        raise ValueError("translate reads YAML, so it needs PyYAML: pip install pyyaml") from None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block, remarks = block_of(given)
        config = from_dialect(block)
    say("*", [*remarks, *(str(warning.message) for warning in caught)])
    if system == "own":
        print("\n".join([*(f"# {sentence}" for sentence in meanings_of(block)),
                         in_own_keys(config)]))
        return 0

    export = to_dialect(config, system)
    say("*", export.remarks)
    say("!", merged(export.left_out))
    if export.recipe:
        say("!", [f"{export.recipe.what}: {export.recipe.place}"])
    print("\n\n".join(paragraphs(config, export, system)))
    return 1 if export.left_out else 0


def merged(sentences: Sequence[str]) -> list[str]:
    """Merge sentences that hold for several fields into one."""
    fields: dict[str, list[str]] = {}
    for sentence in sentences:
        field, _, theirs = sentence.partition(": ")
        fields.setdefault(theirs, []).append(field)
    return [f"{', '.join(names)}: {theirs}" for theirs, names in fields.items()]


def say(mark: str, sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(f"{mark} {sentence}", file=sys.stderr)


# ----------------------------------------------------------------------------- what is printed

def in_own_keys(config: RolloutCorrectionConfig) -> str:
    lines = [f"  {key}: {written(value)}" for key, value in own_keys(config).items()]
    return "\n".join(["correction:", *lines]) if lines else (
        "correction: {}        # nothing is corrected")


def paragraphs(config: RolloutCorrectionConfig, export: Export, system: str) -> list[str]:
    """Return the keys as arguments and as YAML, and the code for what they leave out."""
    found = [f"# no key of {SYSTEMS[system].name} is written{SYSTEMS[system].default}"]
    if export.keys:
        first = of_trl(export.keys) if system == "trl" else (
            "# on the command line\n" + overrides(export.keys, system))
        found = [first, "# or in YAML\n" + in_yaml(export.block)]
        if system == "openrlhf":                                # which has no files of settings
            del found[1]
    if export.recipe and export.recipe.code:
        found.append("# or all of it, in Python\n" + export.recipe.code.format(constructor(config)))
    if system == "verl" and not config.bypass_mode:
        found.append("# to dump log-probs for the doctor: see interop/README.md")
    return found


def overrides(keys: Mapping[str, Any], system: str) -> str:
    """Return the keys as arguments for a shell, a line each."""
    make = {"verl": of_hydra, "nemo-rl": of_nemo_rl, "openrlhf": of_flags, "slime": of_flags}
    lines = [make.get(system, of_yaml)(key, value) for key, value in keys.items()]
    return " \\\n".join(filter(None, lines)) or "# no flag"


def of_trl(keys: Mapping[str, Any]) -> str:
    lines = "\n".join(f"    {key}={in_python(value)}," for key, value in keys.items())
    return f"# in Python\nargs = GRPOConfig(\n{lines}\n    …)"


def of_yaml(key: str, value: Any) -> str:
    return f"{key}={written(value)}"


def of_nemo_rl(key: str, value: Any) -> str:
    return f"++{key}={written(value).replace('.inf', 'inf')}"   # ++: also if a file lacks the key


def of_flags(key: str, value: Any) -> str:
    """Return a flag of an argument parser; slime's have dashes, and none stands for false."""
    flag = f"--{key}" if "." in key else f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else ""
    values = value if isinstance(value, list) else [value]
    return " ".join([flag, *map(str, values)])


def of_hydra(key: str, value: Any) -> str:
    """Return a key for Hydra, which would sweep over "a,b" and read 0.5_5 as 0.55 unquoted."""
    if isinstance(value, str) and value.startswith("${"):
        return f"'+{key}={value}'"                          # verl's YAML does not have this key
    if isinstance(value, str) and not value.isidentifier():
        return f"'{key}=\"{value}\"'"
    return f"{key}={written(value).replace('.inf', 'inf')}"


def in_yaml(block: Mapping[str, Any], indent: str = "") -> str:
    return "\n".join(
        f"{indent}{key}:\n{in_yaml(value, indent + '  ')}" if isinstance(value, Mapping)
        else f"{indent}{key}: {written(value)}" for key, value in block.items())


def constructor(config: RolloutCorrectionConfig) -> str:
    """Return Python that makes a configuration."""
    given = ", ".join(f"{key}={in_python(value)}" for key, value in own_keys(config).items())
    return f"RolloutCorrectionConfig({given})"


def in_python(value: Any) -> str:
    """Return a value as Python on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{key}": {in_python(x)}' for key, x in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(in_python, value)) + ")"
    return f'"{value}"' if isinstance(value, str) else (
        'float("inf")' if value == math.inf else repr(value))


def written(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(x)}" for key, x in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str):
        return value if value.isidentifier() else f'"{value}"'
    text = {"None": "null", "True": "true", "False": "false", "inf": ".inf"}.get(
        str(value), str(value))
    return text if "." in text else text.replace("e", ".0e") if is_exponent(text) else text


def is_exponent(text: str) -> bool:
    """True of 1e-05, which YAML takes for a number only with a point: 1.0e-05."""
    return text[0].isdigit() and "e" in text
