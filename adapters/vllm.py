"""vLLM as a guest in the trainer's process: what it must not do there, and what it must be told.

This file decides nothing that is learned. It knows no other file of the project.
"""

import os
import random
import sys
import tempfile
import warnings
from contextlib import contextmanager

import numpy
import torch


def import_vllm():
    """vLLM's two classes, imported with the settings that an engine inside a trainer needs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights by reference
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the threads are the trainer's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import LLM, SamplingParams
    except Exception as error:  # a vLLM built for other hardware fails with more than ImportError
        raise ImportError(f"vLLM does not import ({error}); install requirements-vllm.txt on a GPU "
                          "or requirements-vllm-cpu.txt on a CPU.") from error
    return LLM, SamplingParams


@contextmanager
def as_guest():
    """Start vLLM without a trace: it expects a process of its own, so it reseeds every generator,
    replaces `torch.set_num_threads`, and prints warnings from C++ (shown if the start fails)."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    seeds = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=gpus), tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        stderr = os.dup(2)
        if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
            os.dup2(held.fileno(), 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            random.setstate(seeds[0])
            numpy.random.set_state(seeds[1])


def repack_head(model):
    """vLLM for CPU multiplies by a packed copy of lm_head. Where that is tied to the embedding, a
    reload (as of 0.32.0) renews the embedding alone, and the sampler would keep its old logits."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
