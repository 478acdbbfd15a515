"""Commands run in this process, with or without credentials."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from hapi_client.cli import main as cli
from scripted_swift import ScriptedSwift, scripted_swift

Hapi = Callable[..., int]


def set_login(monkeypatch: pytest.MonkeyPatch, auth_url: str) -> None:
    monkeypatch.setenv("ST_AUTH", auth_url)
    monkeypatch.setenv("ST_USER", "test:tester")
    monkeypatch.setenv("ST_KEY", "testing")


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith(("ST_", "OS_")):
            monkeypatch.delenv(variable)


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for a Swift that does not answer."""
    set_login(monkeypatch, "http://127.0.0.1:9/auth/v1.0")


@pytest.fixture
def swift(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSwift]:
    with scripted_swift() as server:
        set_login(monkeypatch, server.auth_url)
        yield server


@pytest.fixture
def hapi(monkeypatch: pytest.MonkeyPatch) -> Hapi:
    """Runs a command and returns its exit status."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["hapi", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0)

    return run
