"""A scripted Swift, a connection to it, and commands in this process."""

from functools import partial

import pytest

from commands import run_hapi
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
from scripted_swift import scripted_swift

FAST = ConnectionOptions(
    connect_seconds=5,
    read_seconds=5,
    body_seconds=10,
    backoff=Backoff(attempts=3, first_seconds=0.01, max_seconds=0.02),
)


@pytest.fixture
def fast():
    """Short timeouts, and three attempts in quick succession."""
    return FAST


@pytest.fixture
def swift():
    with scripted_swift() as server:
        yield server


@pytest.fixture
def credentials(swift):
    return Credentials.v1(swift.auth_url, "test:tester", "testing")


@pytest.fixture
def connection(credentials):
    with Connection(credentials, FAST) as opened:
        yield opened


@pytest.fixture
def hapi(monkeypatch):
    """Runs a command and returns its exit status."""
    return partial(run_hapi, monkeypatch)
