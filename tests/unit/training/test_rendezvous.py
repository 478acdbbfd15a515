"""Addresses of a rendezvous that is none."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from hapi_protocol.errors import ClientError
from hapi_training import VirtualNodes
from hapi_training.store import RENDEZVOUS_VARIABLE, open_store
from node_training import batches, network


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


@pytest.mark.parametrize("address", ["no-such-host.invalid:1", "192.0.2.1:1"])
def test_store_of_another_machine_is_refused(address):
    """torch would listen here, and wait for the other one."""
    with pytest.raises(ClientError, match="give an address of this machine"):
        open_store(address)


def test_second_run_of_a_process_is_refused(monkeypatch):
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, f"127.0.0.1:{store.port}")
    nodes = VirtualNodes(network(), 2)
    with pytest.raises(ClientError, match=r"give one a module with all parts"):
        VirtualNodes(network(), 2)
    assert nodes.mine == (0, 1)


def test_worker_that_was_killed_while_it_got_in_line_holds_nobody(monkeypatch):
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, f"127.0.0.1:{store.port}")
    module = network()
    nodes = VirtualNodes(module, 2)
    for step in nodes.steps(batches(4), {"module": module}):
        for images, labels in step:
            step.backward(cross_entropy(module(images), labels))
        if step.number == 1:
            # It has a number and a ticket, and then no time for more.
            store.add("numbers", 1)
            store.add("waiting", 1)
    assert nodes.step == 4
