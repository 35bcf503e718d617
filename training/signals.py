"""Ctrl-C, SIGTERM and SIGHUP always end a run with an exit code and its last checkpoint's name.

This file decides: while Python still imports, the process ends immediately. After `listen` a
signal is raised as `Ended`, so that the engine is closed. SIGTERM first lets the step in progress
end and be saved, within train.grace seconds; another SIGTERM changes nothing then, since a launcher
may send two. After `Ended` was raised, any signal ends the process without waiting.

It imports no other file of this repository, since trainer.py imports it first.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM
from typing import Any

CODES: dict[int, int] = {SIGINT: 130, SIGTERM: 143, SIGHUP: 129}
WORDS: dict[int, str] = {
    SIGINT: "interrupted", SIGTERM: "ended by SIGTERM",
    SIGHUP: "ended by SIGHUP, as its terminal is gone"}


def nothing_yet() -> str:
    return "nothing had begun"


class Ended(BaseException):
    """A signal came: `code` is the exit code, and the text says what is left when it is printed."""

    def __init__(self, number: int):
        self.number, self.code = number, CODES[number]

    def __str__(self) -> str:
        return f"{WORDS[self.number]}: {Received.where()}"


class Received:
    """Received holds the signals that came to this process, and how they are answered."""

    where: Callable[..., str] = nothing_yet    # () says what is left of the run
    listening = False              # the imports are through
    ended: Ended | None = None     # what was raised; a library may have caught it
    ending = False            # SIGTERM came: the step in progress is the last
    failed = False                 # the run has said why it ended
    grace = 0.0                    # seconds that a step has after SIGTERM; 0: none is in progress


def show(text: str) -> None:
    """Print a text whole; a reader that has gone, as in `| head -1`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:        # Python would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def catch() -> None:
    """Handle the three signals from now on, except SIGHUP where nohup ignores it."""
    for number in CODES:           # Ctrl-C in a background job too, which has it ignored
        if number != SIGHUP or signal.getsignal(SIGHUP) != signal.SIG_IGN:
            signal.signal(number, answer)


def listen() -> None:
    """Raise a signal from now on; before this, and after `done`, it ends the process at once."""
    Received.where, Received.ended, Received.ending = nothing_yet, None, False
    Received.listening, Received.failed = True, False


def done(failed: bool) -> None:
    """Let a signal end the process immediately from now on, since everything is written or said."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    Received.where, Received.listening = lambda: "the run had ended", False
    Received.failed = failed


def answer(number: int, _: Any) -> None:
    if not Received.listening or Received.ended:
        if int(os.environ.get("RANK", "0")) == 0 and not Received.failed:
            with contextlib.suppress(OSError):                 # the terminal may be gone
                bar = "\n" * Received.listening                # a progress bar may not have ended
                os.write(2, f"{bar}trainer.py: {Received.ended or Ended(number)}\n".encode())
        os._exit(CODES[number])
    if number != SIGTERM or not Received.grace:
        end(number)
    if not Received.ending:
        Received.ending = True
        signal.signal(SIGALRM, lambda *_: end(number))
        signal.setitimer(signal.ITIMER_REAL, Received.grace)


def end(number: int) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    Received.ended = Ended(number)
    raise Received.ended


@contextlib.contextmanager
def save_first(grace: float) -> Iterator[None]:
    """Give a step `grace` seconds after SIGTERM to end and to be saved."""
    if Received.ended:             # and somebody has caught it
        raise Received.ended
    Received.grace = grace
    try:
        yield
    finally:
        Received.grace = 0.0
