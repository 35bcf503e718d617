"""Tests wait for an event, never for a clock.

A loaded machine is slow, and nothing is wrong with it. HANG is the one limit in seconds: only what
hangs forever reaches it, and fails the test.
"""

import time

HANG = 1800


def until(happened, process=None):
    """Wait until `happened()` is true.

    Fail if the process that should make it true has ended, or after HANG seconds.
    """
    end = time.monotonic() + HANG
    while not happened():
        assert process is None or process.poll() is None or happened(), (
            "the process ended before it happened")
        assert time.monotonic() < end, f"it has not happened within {HANG} seconds"
        time.sleep(0.02)
