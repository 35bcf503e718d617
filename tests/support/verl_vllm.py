"""Let vLLM's asynchronous server be verl's rollout on a CPU: vLLM's worker gets this extension.

verl 0.9.1 starts the server, sends it requests and sends it weights, all by its own code. Its
extension of vLLM's worker loads weights into the layers where they are; on a CPU these have been
packed. This one hands them to vLLM's own `reload_weights`, which unpacks and packs again.
"""

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class Extension(vLLMColocateWorkerExtension):
    """Load the weights that verl's trainer sends, all at once."""

    def update_weights_from_ipc(self, use_shm=True, **_):
        received = []
        BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm).receive_weights(
            lambda weights, is_last: received.extend((name, x.clone()) for name, x in weights))
        self.reload_weights(weights_iterator=iter(received))
