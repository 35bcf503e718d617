"""Another processor's last bits: each weight of a model made here, times 1 + 1e-6·N(0, 1).

    THREE_POLICIES_PERTURB=3 pytest tests/doctor/test_rescore.py       # the third draw

conftest.py calls `perturb` if that variable is set, and without it nothing changes. Processors add
up in another order, which moves a log-prob by about as much. What a test says of a model that it
makes must be the same for every draw.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

SIZE = 1e-6


def perturb(draw: int) -> None:
    """Perturb each causal model from now on when it is made from a seed, not when it is loaded."""
    make = PreTrainedModel.post_init

    def post_init(self: Any) -> None:
        make(self)
        generator = torch.Generator().manual_seed(draw)        # torch's own goes on as without it
        if type(self).__name__.endswith("ForCausalLM"):        # once: it contains a bare model
            with torch.no_grad():
                for p in self.parameters():
                    if not p.is_meta:                          # else its weights come from a file
                        p *= 1 + SIZE * torch.randn(p.shape, generator=generator, device="cpu")
    PreTrainedModel.post_init = post_init
