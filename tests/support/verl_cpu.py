"""Let verl's whole driver run on a CPU, by VERL_USE_EXTERNAL_MODULES, in every process.

verl imports this file by itself in the driver and in each of Ray's workers. It supplies what verl
0.9.1 has for accelerators alone: a platform, the engine's name for it, a backend for the process
group, and a rollout, which is rollout.py's TransformersEngine behind verl's own registry. The
engine rounds its weights to BITS bits, so π_rollout differs from π_old as under quantisation. The
seed of a sample follows from the step, the prompt and how often it was asked, so all runs draw the
same samples. One server serves all ranks. Left out are sleeping, aborted requests, images and
tools. verl patches a class wherever TRL is installed that TRL 1.16 no longer has: it is made up.
Where DUMP names a file, each batch is dumped for the doctor.

The loss "compared" is interop/verl.py's, and logs how far verl's own is from it.
"""

import contextlib
import os
import sys
import types
from collections import Counter
from typing import Any

import ray
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform

BITS = int(os.environ.get("BITS", "6"))             # of the engine's weights
HOTTER = float(os.environ.get("HOTTER", "1"))       # than verl asks: a fault of the engine
NOTHING = {name: lambda *_, **__: None for name in PlatformBase.__abstractmethods__}
NO_MEMORY = {f"{most}memory_{kind}": lambda *_: 0
             for most in ("", "max_") for kind in ("allocated", "reserved")}
DEVICE: Any = types.SimpleNamespace(**NOTHING | NO_MEMORY | {
    "current_device": lambda: "cpu", "get_device_name": lambda: "CPU",
    "mem_get_info": lambda *_: (0, 1)})
VALUES = {"device_name": "cpu", "vendor_name": "cpu", "device_module": DEVICE, "cudart": None}
PLATFORM = type("PlatformCPU", (PlatformBase,), NOTHING | VALUES | {
    "is_available": lambda self: True, "current_device": lambda self: "cpu",
    "device_count": lambda self: 1, "communication_backend_name": lambda self: "gloo",
    "is_ipc_supported": lambda self: False, "visible_devices_envvar": lambda self: "NO_DEVICES",
    "ray_resource_name": lambda self: "GPU", "ray_noset_envvars": lambda self: [],
    "get_device_capability": lambda *_: (None, None),
    "nvtx_range": lambda self, _: contextlib.nullcontext()})
set_platform(PLATFORM())
VALUE_HEAD: Any = types.ModuleType("trl.experimental.ppo")
VALUE_HEAD.AutoModelForCausalLMWithValueHead = type("AutoModelForCausalLMWithValueHead", (), {})
sys.modules["trl.experimental.ppo"] = VALUE_HEAD

from verl.utils import distributed

connect = distributed.initialize_global_process_group_ray
# verl asks for "cpu:gloo" and for the device's backend: on a CPU that is the same one twice.
distributed.initialize_global_process_group_ray = (
    lambda timeout_second=None, backend=None: connect(timeout_second, backend or "cpu:gloo"))

from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.rollout import base, replica

EngineRegistry.register(
    "language_model", ["fsdp2"], device="cpu", vendor="cpu")(FSDPEngineWithLMHead)


class Server:
    """Answer verl's requests for samples, as vLLM's server does, with the engine of rollout.py."""

    def __init__(self, path, length):
        from three_policies.rollout import Cut, TransformersEngine
        self.engine = TransformersEngine(path, dtype="float32", max_model_len=length, device="cpu",
                                         batch_size=1, cut=Cut(1.0, 0, 0.0, 0), candidates=0)
        self.eos_ids = [self.engine.model.config.eos_token_id]
        self.step, self.asked = 0, Counter()

    def generate(self, prompt_ids, sampling_params, **_):
        self.asked[tuple(prompt_ids)] += 1
        seed = hash((self.step, self.asked[tuple(prompt_ids)], *prompt_ids)) % 2**31
        self.engine.cut = self.engine.cut._replace(top_p=sampling_params["top_p"])
        sample, = self.engine.generate(
            [prompt_ids], [seed], temperature=sampling_params["temperature"] * HOTTER,
            max_tokens=self.engine.max_model_len - len(prompt_ids), eos_ids=self.eos_ids)
        return replica.TokenOutput(token_ids=sample.tokens, log_probs=sample.rollout_log_prob,
                                   stop_reason="completed",
                                   extra_fields={"global_steps": self.step})

    def load(self, weights, step):
        from three_policies.rollout import quantize_weights
        self.engine.update_weights(quantize_weights(weights.items(), BITS))
        self.step, self.asked = step, Counter()

    def sleep(self):
        """Keep the memory: a CPU shares it with the trainer."""


class Replica(replica.RolloutReplica):
    """Start one server, beside the workers."""

    async def launch_servers(self):
        config = self.config
        self._server_address = f"transformers_{self.replica_rank}"
        self._server_handle = ray.remote(Server).options(name=self._server_address).remote(
            self.model_config.path, config.prompt_length + config.response_length)
        self.servers = [self._server_handle]


class Rollout(base.BaseRollout):
    """Take the trainer's weights to the server; all ranks gather them, the first one sends them."""

    async def update_weights(self, weights, wire_format="named_tensors", global_steps=0, **_):
        full = {name: tensor.detach().clone() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            await ray.get_actor("transformers_0").load.remote(full, global_steps)

    async def resume(self, tags):
        """Do nothing: see Server.sleep."""

    async def release(self):
        """Do nothing: see Server.sleep."""


replica.RolloutReplicaRegistry.register("transformers", lambda: Replica)
base._ROLLOUT_REGISTRY["transformers", "async"] = f"{__name__}.Rollout"


def odd(solution_str, **_):
    """Reward a response of odd length: an untaught model earns that half of the time."""
    return float(len(solution_str) % 2)


if "DUMP" in os.environ:
    from verl.trainer.ppo.v1 import PPOTrainer
    compute = PPOTrainer._compute_old_log_prob

    def dumping(self, batch, metrics):
        from three_policies.interop.verl import dump
        batch = compute(self, batch, metrics)
        dump(batch, os.environ["DUMP"])
        return batch
    PPOTrainer._compute_old_log_prob = dumping


@register_policy_loss("compared")
def compared(**given):
    """Return our loss; log the distance of verl's value and gradient from ours, in float64."""
    bypass = given["config"].policy_loss.rollout_correction["bypass_mode"]
    wide = {name: x.detach().double() if torch.is_tensor(x) and x.is_floating_point() else x
            for name, x in given.items()}
    results = []
    for name in "three_policies", "bypass_mode" if bypass else "vanilla":
        log_prob = wide["log_prob"].clone().requires_grad_()
        loss, _ = get_policy_loss_fn(name)(**wide | {"log_prob": log_prob})
        results.append(torch.cat([loss[None], torch.autograd.grad(loss, log_prob)[0].flatten()]))
    ours, theirs = results
    loss, metrics = get_policy_loss_fn("three_policies")(**given)
    return loss, metrics | {"actor/apart": (ours - theirs).abs().max().item(),
                            "actor/gradient_size": theirs[1:].abs().max().item()}
