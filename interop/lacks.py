"""What the tables of another system are made of: rows of what it can express, and lacks.

A row is a key of theirs, the field of ours that it stands for, and a function that makes its value.
A lack is a field that no key of theirs expresses: where it is in use, what they have in its place,
and the configuration without it. export.py takes out the lacks, in their order, before it asks the
rows. The readers read what the rows write. The tables are in to_verl.py, to_skyrl.py, ….
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from three_policies.checks import interval
from three_policies.presets import RolloutCorrectionConfig as Config
from three_policies.rejection import CRITERIA


class Row(NamedTuple):
    """A key of theirs, the field of ours that it stands for, and the value that it gets."""

    key: str
    field: str
    value: Callable[[Config], Any]                  # UNSET: the key is not written


class Lack(NamedTuple):
    """A field of ours that they cannot express, where it is in use, and what is done instead.

    `changes` False: the lines mean the same without it, so nothing is lost.
    """

    field: str
    here: Callable[[Config], bool]
    theirs: str                                     # what they have in its place
    rest: Callable[[Config], Config]
    changes: bool = True


class Recipe(NamedTuple):
    """How this project does in their trainer what their keys cannot: a name, a place, code."""

    what: str
    place: str
    code: str = ""


class System(NamedTuple):
    """What one system can express, and where to turn for the rest."""

    name: str
    rows: Sequence[Row]
    lacks: Sequence[Lack]
    recipe: Callable[[Config], Recipe]
    default: str = ""                               # what they do if none of their keys is written


UNSET: Any = object()


# ------------------------------------------------------------------------- what lacks are made of

def without(**changes: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, **changes)


def without_criterion(name: str) -> Callable[[Config], Config]:
    return lambda config: replace(config, rollout_rs={
        key: bound for key, bound in config.rollout_rs.items() if key != name})


def nothing(config: Config) -> Config:
    return Config()


def is_pair(config: Config) -> bool:
    return isinstance(config.rollout_is_threshold, tuple)


def ends(config: Config) -> tuple[float | None, float | None]:
    """Return the weights' lower and upper bound; of a number C, None and C."""
    bound = config.rollout_is_threshold
    return bound if isinstance(bound, tuple) else (None, bound)


def lacks_criterion(name: str, theirs: str,
                    here: Callable[[Config], bool] = lambda config: True) -> Lack:
    return Lack(f"rollout_rs.{name}", lambda config: name in config.rollout_rs and here(config),
                theirs, without_criterion(name))


NO_CRITERIA = without(rollout_rs={})
NOTHING_MEASURED = without(metrics_only=False, rollout_is=None, rollout_is_threshold=2.0,
                           rollout_is_batch_normalize=False, rollout_rs={})
NO_WEIGHTS = without(rollout_is=None, rollout_is_threshold=2.0, rollout_is_batch_normalize=False)


def opened(config: Config) -> Config:
    """Return the configuration with None for each end that bounds nothing float32 can hold."""
    def of(bound: Any) -> Any:
        if not isinstance(bound, tuple):
            return bound
        low, high = bound
        low = None if low is None or low < 1e-38 else low
        high = None if high is None or high > 1e38 else high
        return math.inf if low is None and high is None else (low, high)
    criteria = {name: of(bound) for name, bound in config.rollout_rs.items()}
    return replace(config, rollout_is_threshold=of(config.rollout_is_threshold), rollout_rs={
        name: bound for name, bound in criteria.items()
        if CRITERIA[name].read is not interval or isinstance(bound, tuple)})


def has_effect_on_weights(config: Config) -> bool:
    return config.rollout_is_threshold != 2.0 or config.rollout_is_batch_normalize


# Fields that change no weight and no mask; each system's lacks begin with them.
IDLE = (
    Lack("rollout_is_count_below", lambda c: c.rollout_is_count_below is not None,
         "it only decides what our metrics count as low, and is not written",
         without(rollout_is_count_below=None), changes=False),
    Lack("rollout_rs and rollout_is_threshold", lambda c: opened(c) != c,
         "an end of ∞, or beyond float32's 1e±38, bounds nothing, and is written as an open one",
         opened, changes=False),
    Lack("rollout_is_threshold and rollout_is_batch_normalize",
         lambda c: c.rollout_is is None and has_effect_on_weights(c),
         "they have no effect without rollout_is, and are not written", NO_WEIGHTS, changes=False),
    Lack("rollout_is_batch_normalize",
         lambda c: c.rollout_is_batch_normalize and c.ratio_is_the_weight,
         "it has no effect where the loss's own ratio is the weight, and is not written",
         without(rollout_is_batch_normalize=False), changes=False))


def own_loop(config: Config) -> Recipe:
    return Recipe("`correct` and `policy_loss` do it in a loop of your own",
                  "README.md#use-it-in-your-own-loop")


def of_micro_batches(config: Config) -> bool:
    """True if a loss inside another trainer, which sees one micro-batch at a time, can do it."""
    return not (config.of_whole_batches or config.score_centering)
