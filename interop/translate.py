"""The command `three-policies translate`: a block of another system's configuration in our keys.

    three-policies translate config.yaml          # of verl, SkyRL or prime-rl; a preset of ours too
    three-policies translate 'rollout_rs: token_k1' 'rollout_rs_threshold: "0.5_2.0"'

What differs from how that system reads the block is a remark on stderr.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from three_policies.interop.dialects import from_dialect, own_keys


def block_of(given: Sequence[str]) -> Mapping[str, Any]:
    """Return the block of a file, or of lines of YAML; raise ValueError if it is no mapping."""
    try:
        import yaml
    except ImportError:
        raise ValueError("translate reads YAML, so it needs PyYAML: pip install pyyaml") from None
    named = len(given) == 1 and Path(given[0]).suffix in (".yaml", ".yml")
    text = Path(given[0]).read_text(encoding="utf-8") if named else "\n".join(given)
    try:
        block = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"this is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(block, Mapping):
        raise ValueError(f"the block must be a mapping of settings in YAML, not {block!r}")
    return {"rollout_correction": block["correction"]} if set(block) == {"correction"} else block


def main(argv: Sequence[str] | None = None) -> int:
    """Print the block in our keys; return 0, or 2 if it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="three-policies translate", description="Write a block of verl's, SkyRL's or "
        "prime-rl's configuration in the keys of RolloutCorrectionConfig.")
    parser.add_argument("block", nargs="+", metavar="FILE.yaml | 'key: value'",
                        help="a file of YAML, or its lines")
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
    lines = [f"  {key}: {written(value)}" for key, value in own_keys(config).items()]
    print("\n".join(["correction:", *lines]) if lines else
          "correction: {}        # nothing is corrected")
    return 0


def written(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(x)}" for key, x in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    words = {"None": "null", "True": "true", "False": "false", "inf": ".inf"}
    return words.get(str(value), str(value))
