"""What keeps the tests from being run."""

from __future__ import annotations


class NotRunError(Exception):
    """There is no result; the message says why, and what to do."""
