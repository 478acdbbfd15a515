"""Runs ``hapi`` in this process."""

from __future__ import annotations

import sys

import pytest

from hapi_client.cli import main as cli


def run_hapi(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Runs a command with wide tables; returns its exit status."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["hapi", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)
