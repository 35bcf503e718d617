"""Three policies meet in RL for language models; these names correct for the first of them.

    from three_policies import LossConfig, RolloutCorrectionConfig, correct, policy_loss

Each is imported, and torch with it, when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from three_policies.presets import RolloutCorrectionConfig
    from three_policies.correction import correct
    from three_policies.losses import LossConfig, policy_loss

__all__ = ["LossConfig", "RolloutCorrectionConfig", "correct", "policy_loss"]

PLACES = {"RolloutCorrectionConfig": "presets", "correct": "correction",
          "LossConfig": "losses", "policy_loss": "losses"}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"three_policies has no {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"three_policies.{PLACES[name]}"), name)
