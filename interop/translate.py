"""The command `three-policies translate`: a correction in our keys, or in another system's.

    three-policies translate config.yaml          # of verl, SkyRL, TRL or prime-rl, or of ours
    three-policies translate 'rollout_rs: token_k1' 'rollout_rs_threshold: "0.5_2.0"'
    three-policies translate --to verl decoupled_token_is       # lines to paste; skyrl, trl

What differs from how that system reads the block, or cannot be written, is a sentence on stderr.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from three_policies.checks import nearest
from three_policies.interop.dialects import from_dialect, own_keys
from three_policies.interop.export import SYSTEMS, Export, to_dialect
from three_policies.presets import PRESETS, RolloutCorrectionConfig

DESCRIPTION = """Write a correction in the keys of RolloutCorrectionConfig, or of another system. It
is given as the name of a preset, or as a block of this project, verl, SkyRL, TRL or prime-rl."""
STATUS = """Exit code 0: the keys do all of it; sentences marked "*" on stderr say what is read or
written in another way. 1: something is left out; a sentence marked "!" names it, says what that
system has instead, and how this project does it there. 2: the block cannot be read."""


def block_of(given: Sequence[str]) -> Mapping[str, Any]:
    """Return the block of a preset, a file or lines of YAML; raise ValueError if it is none."""
    try:
        import yaml
    except ImportError:
        raise ValueError("translate reads YAML, so it needs PyYAML: pip install pyyaml") from None
    if len(given) == 1 and given[0].strip() in PRESETS:
        return {"preset": given[0].strip()}
    named = len(given) == 1 and Path(given[0]).suffix in (".yaml", ".yml")
    source = given[0] if named else "the block"
    try:
        text = Path(given[0]).read_text(encoding="utf-8-sig") if named else "\n".join(given)
        block = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:    # also no UTF-8, no real date
        words = " ".join(str(error).split())[:200]
        raise ValueError(f"{source} cannot be read as YAML: {words}") from None
    if not isinstance(block, Mapping):
        close = nearest(block, PRESETS) if isinstance(block, str) and " " not in block else ""
        close = close if "mean" in close else ""
        raise ValueError("the block must be a mapping of settings in YAML, or the name of a "
                         f"preset, not {block!r}{close}")
    return {"rollout_correction": block["correction"]} if set(block) == {"correction"} else block


def main(argv: Sequence[str] | None = None) -> int:
    """Print the correction in the keys asked for; return 0, 1 if a part is left out, or 2."""
    parser = argparse.ArgumentParser(prog="three-policies translate", description=DESCRIPTION,
                                     epilog=STATUS)
    parser.add_argument("--to", choices=("own", *SYSTEMS), default="own",
                        help="whose keys are written; own, the default: this project's")
    parser.add_argument("block", nargs="+", metavar="PRESET | FILE.yaml | 'key: value'",
                        help="a preset's name, a file of YAML, or its lines")
    given = parser.parse_args(argv)

    try:
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always")
            config = from_dialect(block_of(given.block))
    except (OSError, ValueError) as error:
        why = f"{error.filename} cannot be read: {error.strerror}" if isinstance(
            error, OSError) else error
        print(f"translate: {why}", file=sys.stderr)
        return 2

    for remark in remarks:
        print(f"* {remark.message}", file=sys.stderr)
    if given.to == "own":
        print(in_own_keys(config))
        return 0
    export = to_dialect(config, given.to)
    for mark, sentences in (("*", export.remarks), ("!", export.left_out)):
        for sentence in sentences:
            print(f"{mark} {sentence}", file=sys.stderr)
    print("\n\n".join(paragraphs(config, export, given.to)))
    return 1 if export.left_out else 0


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
    if export.recipe and export.recipe.code:
        found.append("# or all of it, in Python\n" + export.recipe.code.format(constructor(config)))
    if system == "verl" and not config.bypass_mode:
        found.append("# in the trainer, to dump log-probs for the doctor (interop/README.md)\n"
                     "three_policies.interop.verl.dump(data, path)")
    return found


def overrides(keys: Mapping[str, Any], system: str) -> str:
    """Return the keys as arguments for a shell, a line each."""
    make = of_hydra if system == "verl" else of_yaml
    return " \\\n".join(make(key, value) for key, value in keys.items())


def of_trl(keys: Mapping[str, Any]) -> str:
    lines = "\n".join(f"    {key}={in_python(value)}," for key, value in keys.items())
    return f"# in Python\nargs = GRPOConfig(\n{lines}\n    …)"


def of_yaml(key: str, value: Any) -> str:
    return f"{key}={written(value)}"


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
    if isinstance(value, tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str):
        return value if value.isidentifier() else f'"{value}"'
    text = {"None": "null", "True": "true", "False": "false", "inf": ".inf"}.get(
        str(value), str(value))
    return text if "." in text else text.replace("e", ".0e") if is_exponent(text) else text


def is_exponent(text: str) -> bool:
    """True of 1e-05, which YAML takes for a number only with a point: 1.0e-05."""
    return text[0].isdigit() and "e" in text
