"""Child processes of tests."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """``preexec_fn`` of a child that a test interrupts.

    A shell starts background jobs with SIGINT ignored, and children inherit
    that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
