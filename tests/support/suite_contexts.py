"""Contexts of the benchmarks' suite, for tests without a testbed."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.suite.experiment import Context


def context_of(section: dict[str, Any], **more: Any) -> Context:
    """A whole run of one experiment, which needs no testbed.

    Args:
        section: of the experiment.
        more: other attributes than usual.
    """
    usual: dict[str, Any] = {
        "sources": [],
        "tars": [],
        "quick": False,
        "rounds": 5,
        "only": [],
        "save": lambda: None,
        "note": lambda text: None,
        "testbed": lambda **_: pytest.fail("not needed"),
    }
    return Context(section=section, **{**usual, **more})
