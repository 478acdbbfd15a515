"""Addresses of a rendezvous that is none."""

from __future__ import annotations

import socket

import pytest

from hapi_protocol.errors import ClientError
from hapi_training import VirtualNodes
from hapi_training.rendezvous import RENDEZVOUS_VARIABLE, open_store
from node_training import network


@pytest.mark.parametrize(
    "address", ["", ":1", "host", "host:port", "host:0", "host:70000"]
)
def test_address_without_host_and_port_is_refused(address):
    with pytest.raises(ClientError, match="give HOST:PORT of 'hapi rend"):
        open_store(address)


def test_store_on_a_used_port_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClientError, match=f"cannot listen on {address}"):
            open_store(address)


@pytest.mark.parametrize("listens", [True, False])
def test_server_that_is_no_store_is_named(listens, monkeypatch):
    """torch waits for ever for one that accepts and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not listens:
            server.close()
        monkeypatch.setenv(RENDEZVOUS_VARIABLE, address)
        with pytest.raises(ClientError, match="does not answer") as caught:
            VirtualNodes(network(), 2, timeout_seconds=2.0)
    assert caught.value.code == "worker_lost"
    assert address in caught.value.message
