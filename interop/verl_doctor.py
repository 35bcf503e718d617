"""Let the doctor watch verl's driver, and dump what it examines. For verl 0.9.1.

To import this file is the hook, and verl does so by one override:

    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=three_policies.interop.verl_doctor

The driver says the doctor's line on the first batch and whenever it changes, and verl's own logger
gets doctor/alarm, doctor/fault, doctor/unsure, doctor/e_rho and doctor/k3. Where DOCTOR_DUMP names
a directory, what was examined is dumped there, a file a step. It needs
actor_rollout_ref.rollout.calculate_log_probs=true and decoupled mode: in bypass mode verl's π_old
is a copy of π_rollout, which one warning says.
"""

import functools
import os
from pathlib import Path
from typing import Any

# pyright: reportMissingImports=false
from verl.trainer.ppo.v1 import PPOTrainer

from three_policies.doctor.normal import Class
from three_policies.doctor.watch import Watch
from three_policies.interop.verl import rows

MOST = 512              # responses of a batch that are fetched; the doctor examines a part of them

compute = PPOTrainer._compute_old_log_prob


@functools.wraps(compute)
def watched(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
    """Compute π_old as verl does, then show the batch to the doctor."""
    batch = compute(self, batch, metrics)
    if not hasattr(self, "_doctor"):
        self._doctor = Watch(os.environ.get("DOCTOR_DUMP"))
    self._doctor.see(self.global_steps, lambda: shown(self.config, batch), metrics.__setitem__)
    return batch


def shown(config: Any, batch: Any) -> list[dict[str, Any]]:
    """Return rows with both log-probs, or raise ValueError where verl has no two."""
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ValueError("actor_rollout_ref.rollout.calculate_log_probs must be true")
    if (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
        raise ValueError("in bypass mode old_log_probs are a copy of rollout_log_probs: set "
                         "algorithm.rollout_correction.bypass_mode=false")
    of = pair(config.actor_rollout_ref)
    return [row | {"pair": of} for row in rows(batch, MOST)]


def pair(config: Any) -> dict[str, Any]:
    """Return what verl's settings say of both sides, for a dump."""
    actor, path = config.actor, Path(config.model.path) / "config.json"
    how = actor.get("fsdp_config") or actor.get("megatron") or {}
    return {"engine": config.rollout.get("dtype"), "quantize": config.rollout.get("quantization"),
            "trainer": (how.get("mixed_precision") or {}).get("param_dtype") or how.get("dtype"),
            "experts": Class.of_config(path).experts if path.is_file() else None}


PPOTrainer._compute_old_log_prob = watched
