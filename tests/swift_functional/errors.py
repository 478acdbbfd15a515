"""Error of a comparison that could not run."""

from __future__ import annotations


class NotRunError(Exception):
    """The tests could not be run; the message has reason and remedy."""
