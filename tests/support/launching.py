"""Programs run in processes of their own, alone or as ranks, without importing the trainer each.

A processor takes five seconds to import torch, transformers and the trainer, and a test of four
ranks would pay them four times. So one process imports all once, and forks. What a test starts, by
itself or by torchrun, is this file: a Python that has imported nothing. It hands its directory,
environment and streams to a fork in which the program runs, passes signals on and ends as it ends.

    python launching.py SOCKET program.py arguments …          # SOCKET is that of `serve`
    python launching.py SOCKET -m module arguments …
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

from three_policies.tests.support.waiting import HANG

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
# What many forks need, and what each would otherwise import or compile for itself.
IMPORTED = """
import matplotlib.pyplot, peft, torch.distributed.run
from three_policies import trainer
from three_policies.tests.support import tolerances
import transformers.models.qwen2.modeling_qwen2
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
get_checkpoint_conversion_mapping("qwen2")         # compiles many patterns, and keeps them
"""


def shell(command, cwd, **options):
    """Run a command to its end, and keep its output."""
    given = {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=cwd, timeout=HANG, **given | options)


def torchrun(ranks, begin, *program, node=None):
    """Return the command that starts so many ranks of a program; one rank alone has no launcher.

    `begin`: `forks`, so that launcher and ranks are forks, or []. `node`: where several nodes meet.
    """
    launcher = [*begin, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
                *(node or ["--standalone"])]
    return [sys.executable, *(launcher if ranks > 1 or node else []), *begin, *program]


@contextlib.contextmanager
def serving(imported=IMPORTED):
    """Yield the beginning of a command whose program runs in a fork: this file and its socket."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = f"{directory}/socket"
        listener.bind(path)
        listener.listen(64)                # who connects before all is imported waits for an answer
        program = (f"{imported}\nfrom three_policies.tests.support import launching\n"
                   f"launching.serve({listener.fileno()})")
        server = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        listener.close()
        try:
            yield [str(HERE), path]
        finally:
            server.stdin.close()                               # it ends with its input
            server.wait(HANG)


def serve(listening):
    """Answer every connection to a socket by a fork, until the standard input ends."""
    import torch
    torch.set_num_threads(1)                                   # no thread is there before a fork
    gc.freeze()                            # else a fork walks through all libraries and copies them
    for finalizer in list(weakref.finalize._registry):  # pyright: ignore[reportAttributeAccessIssue]
        finalizer.atexit = False           # else a fork takes torch's libraries apart when it ends
    with socket.socket(fileno=listening) as listener:
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            with contextlib.suppress(ChildProcessError):       # those that have ended since
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return keep(connection)
            connection.close()


def keep(connection):
    """Run a request in another fork and say how it ended.

    It is killed if the requester or the server ends: Ray may leave a worker behind.
    """
    size, streams, *_ = socket.recv_fds(connection, 8, 3)
    request = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    server, child = os.getppid(), os.fork()
    if child == 0:
        connection.close()
        return run(*json.loads(request), streams)
    connection.sendall(child.to_bytes(8, "big"))
    ended, status = 0, 0
    while not ended:
        requester_ended = select.select([connection], [], [], 0.02)[0]     # it says nothing more
        if requester_ended or os.getppid() != server:
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
    os._exit(0)


def run(argv, cwd, environment, streams):
    """Be the program: a Python that was started with these arguments, and has imported much."""
    import torch
    os.setpgid(0, 0)                       # Ray kills a worker's whole group: not this server's
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)               # not ignored, as it is under nohup
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv, code = argv, 0
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):          # its last words
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # A Python that ends takes apart all it has imported, which takes a fork 0.4 s. The rest is as
    # Python does it: other threads end, then handlers are called, then the streams are emptied.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def receive(connection):
    """Return the next number that `keep` says, or raise ConnectionError if it says no more."""
    said = connection.recv(8, socket.MSG_WAITALL)
    if len(said) < 8:
        raise ConnectionError("no answer")
    return int.from_bytes(said, "big", signed=True)


def main(path, argv):
    """Have the program run in a fork, and end as it ends."""
    request = json.dumps([argv, os.getcwd(), dict(os.environ)]).encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
            connection.sendall(request)
            child = receive(connection)
            for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
                signal.signal(number, lambda number, _: os.kill(child, number))
            code = receive(connection)
    except ConnectionError:
        return "launching.py: the server of forks has ended, so how the program ended is unknown"
    if code < 0:
        with contextlib.suppress(OSError):                     # SIGKILL has no handler to replace
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
