"""A rank writes its part of a checkpoint as one safetensors file, tensor by tensor.

This file decides: saving takes the memory of one tensor. torch's own writer serialises the file in
memory, which more than doubles a process. Its reader reads this file, on any number of ranks.
"""

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.futures import Future

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorByTensor(HuggingFaceStorageWriter):
    """A TensorByTensor streams the shards and offsets that the ranks agreed to write (`plan`).

    The format: the length of the header in 8 bytes, the header in JSON, the tensors' bytes.
    """

    def write_data(self, plan: Any, planner: Any) -> Future:
        rank = plan.storage_data["shard_index"]
        with open(Path(self.path) / f"rank-{rank:05d}.safetensors", "wb") as file:
            text = json.dumps(header(plan.items)).encode()
            text += b" " * (-len(text) % 8)
            file.write(len(text).to_bytes(8, "little") + text)
            for item in plan.items:
                tensor = cast(torch.Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
                file.write(tensor.flatten().view(torch.uint8).numpy().data)
        written = Future()
        written.set_result([])
        return written


def header(items: Any) -> dict:
    """Return type, shape and place of each tensor in the file, and of its shard in the whole."""
    found, offsets, place = {}, {}, 0
    for item in items:
        chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
        end = place + math.prod(chunk.sizes) * dtype.itemsize
        found[item.index.fqn] = {"dtype": NAMES[dtype], "shape": list(chunk.sizes),
                                 "data_offsets": [place, end]}
        offsets[item.index.fqn] = {"saved_offsets": list(chunk.offsets)}
        place = end
    return found | {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}}
