"""A long run that a test starts in a process of its own, listens to, and ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from three_policies.tests.support.small import SMALL

HERE = Path(__file__).resolve().parents[2]

LONG = [*SMALL, "rollout.engine=transformers", "train.steps=100000", "train.save_every=2", "run=x"]


def as_from_a_terminal():
    """Give SIGHUP its default: nohup, which these tests may run under, has it ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(arguments, cwd, begin=(), program=HERE / "trainer.py"):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *begin, str(program), *arguments],
                            cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True,
                            preexec_fn=as_from_a_terminal)  # noqa: PLW1509


def said_until(process, words):
    """Return what the process says on stderr up to a line with these words.

    A process that ends says no more.
    """
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            break
    return "".join(said)
