"""Read what a user hands to `translate`: a preset's name, a file, lines of YAML, or arguments.

Arguments are those of a command line, key=value (Hydra's) or --key value. Of a file or a command
line only what concerns a correction is read; a remark names what is left aside.
"""

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from three_policies.checks import choice, nearest
from three_policies.interop.dialects import BESIDE, KEYS, OF_ANY, WRAPPERS
from three_policies.interop.meanings import UNREAD
from three_policies.presets import PRESETS

ARGUMENT = re.compile(r"--[a-zA-Z][\w.-]*(=.*)?|[+~]{0,2}[a-zA-Z][\w.]*=.*", re.DOTALL)
OF_CORRECTIONS = {*KEYS, *OF_ANY, *BESIDE, *(key for table in UNREAD.values() for key in table)}
BLOCKS = {"rollout_correction", "off_policy_correction"}        # a wrong key in these is a mistake


class Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error, and not the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [(key.value, key) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, (name, key) in enumerate(names):
            if name in [before for before, _ in names[:i]]:
                raise ValueError(f"{name} is given twice, in line {key.start_mark.line + 1} again")
        return super().construct_mapping(node, deep)


def block_of(given: Sequence[str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the block that is meant, and remarks; raise ValueError or OSError if there is none."""
    name = given[0].strip()
    if len(given) == 1 and name in PRESETS:
        return {"preset": name}, []
    file = len(given) == 1 and (Path(name).suffix in (".yaml", ".yml") or is_file(name))
    source = name if file else "the block"
    try:
        text = Path(name).read_text(encoding="utf-8-sig") if file else "\n".join(given)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} cannot be read as YAML: {error}") from None

    words = words_of(text if file else " \n".join(given), given)
    block = of_yaml(text, source, words)
    from_arguments = not isinstance(block, Mapping) and any(map(ARGUMENT.fullmatch, words))
    if from_arguments:
        block = of_arguments(words)
    if not isinstance(block, Mapping):
        close = nearest(block, PRESETS) if isinstance(block, str) and " " not in block else ""
        raise ValueError(f"{source} must be a mapping of settings in YAML, key=value arguments, or "
                         f"the name of a preset, not {str(block)[:60]!r}"
                         f"{close if 'mean' in close else ''}")
    if "correction" in block:
        return of_ours(block)
    return part_of(block) if file or from_arguments else (block, [])


def is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):                               # no name of a file
        return False


def words_of(text: str, given: Sequence[str]) -> list[str]:
    """Return the words of a command line; the shell has already taken off the quotes of `given`."""
    if len(given) > 1 and all(map(ARGUMENT.fullmatch, given)):
        return [*given]
    if len(given) > 1 and given[0].startswith("--"):
        return [*given]
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:                                          # a quote is open
        return []


def of_yaml(text: str, source: str, words: Sequence[str]) -> Any:
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:    # also no real date
        if "given twice" in str(error):
            raise ValueError(f"{source}: {error}") from None
        if any(map(ARGUMENT.fullmatch, words)):
            return None
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{source} cannot be read as YAML: {why}") from None


def of_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the sections and keys that arguments set; a dash in a name is slime's."""
    block: dict[str, Any] = {}
    for name, value in pairs(words):
        *sections, last = (["slime"] if "-" in name else []) + name.replace("-", "_").split(".")
        inner = block
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{name}: {section} is a value already")
        if last in inner:
            raise ValueError(f"{name} is given twice")
        inner[last] = value
    return block


def pairs(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    rest = [word.rstrip(",") if ARGUMENT.fullmatch(word) else word for word in words]
    while rest:
        word = rest.pop(0)
        if not ARGUMENT.fullmatch(word):
            continue                                            # the command itself
        if not word.startswith("--") or "=" in word:
            name, value = word.lstrip("+~").removeprefix("--").split("=", 1)
            yield name, scalar(value)
            continue
        values: list[Any] = []
        while rest and not ARGUMENT.fullmatch(rest[0]):
            values.append(scalar(rest.pop(0)))
        yield word[2:], True if not values else values[0] if len(values) == 1 else values


def scalar(text: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError):
        return text


def of_ours(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the correction of one of this project's files, which may be a preset's name."""
    correction, others = block["correction"], [key for key in block if key != "correction"]
    if isinstance(correction, str):
        choice("correction", correction, tuple(PRESETS))
        correction = {"preset": correction}
    remark = [f"only correction is read, not {shortened(others)}"] if others else []
    return {"rollout_correction": correction}, remark


def shortened(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def part_of(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return what concerns a correction of a whole configuration, if any of it does."""
    aside: list[str] = []
    found = kept(block, (), aside)
    if not found or not aside:
        return block, []
    return found, [f"no part of a correction, and not read: {shortened(aside)}"]


def kept(block: Mapping[str, Any], path: tuple[str, ...], aside: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in block.items():
        where = (*path, str(key))
        if BLOCKS & {*path} or (key in BLOCKS and isinstance(value, str)):    # verl's "${…}"
            found[key] = value
        elif key in WRAPPERS and (value is None or isinstance(value, Mapping)):
            inner = kept(value or {}, where, aside)
            if inner or key in BLOCKS:
                found[key] = inner
        elif all(name in WRAPPERS for name in path) and is_of_corrections(str(key)):
            found[key] = value
        else:
            aside.append(".".join(where).removeprefix("slime."))
    return found


def is_of_corrections(key: str) -> bool:
    """True of a key that can be read, and of one that looks like it: from_dialect then says so."""
    return key in OF_CORRECTIONS or bool(difflib.get_close_matches(key, KEYS, 1, 0.87))
