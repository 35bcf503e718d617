"""Write a configuration of ours in the keys of another system.

to_verl.py, to_skyrl.py, … decide what can be expressed. What a system lacks is taken out of the
configuration first, with one sentence, so that the keys express what remains exactly:
`from_dialect(export.block)` is `export.config`.

    export = to_dialect(RolloutCorrectionConfig.seq_mis(), "verl")
    export.keys          # {"algorithm.rollout_correction.rollout_is": "sequence", …}
    export.left_out      # [] if these keys do what the configuration does
"""

import warnings
from typing import Any, NamedTuple

from three_policies.interop.lacks import UNSET, Recipe
from three_policies.interop.to_nemo_rl import NEMO_RL
from three_policies.interop.to_openrlhf import OPENRLHF
from three_policies.interop.to_skyrl import SKYRL
from three_policies.interop.to_slime import SLIME
from three_policies.interop.to_trl import TRL
from three_policies.interop.to_verl import VERL
from three_policies.presets import RolloutCorrectionConfig as Config

SYSTEMS = {"verl": VERL, "skyrl": SKYRL, "trl": TRL, "openrlhf": OPENRLHF, "slime": SLIME,
           "nemo-rl": NEMO_RL}


class Export(NamedTuple):
    """The keys for a configuration, what these mean, and a sentence for all that differs."""

    config: Config                                  # what the keys mean, as one of ours
    keys: dict[str, Any]                            # {"section.key": value}
    left_out: list[str]                             # sentences: these keys do something else
    remarks: list[str]                              # sentences: these keys do the same
    recipe: Recipe | None                           # None if nothing is left out

    @property
    def block(self) -> dict[str, Any]:
        """Return the keys as nested sections, as YAML has them."""
        block: dict[str, Any] = {}
        for key, value in self.keys.items():
            *sections, last = key.split(".")
            inner = block
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
        return block


def to_dialect(config: Config, system: str) -> Export:
    """Return a configuration in the keys of a system of SYSTEMS."""
    theirs, given = SYSTEMS[system], config
    recipe, left_out, remarks = theirs.recipe(given), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")             # the configuration has given its warnings
        for lack in theirs.lacks:
            if not lack.here(config):
                continue
            config = lack.rest(config)
            (left_out if lack.changes else remarks).append(f"{lack.field}: {lack.theirs}")

    values = {row.key: row.value(config) for row in theirs.rows}
    keys = {key: value for key, value in values.items() if value is not UNSET}
    if left_out and config == Config():
        keys = {}                                   # nothing of it is left to be written
    return Export(config, keys, left_out, remarks, recipe if left_out else None)
