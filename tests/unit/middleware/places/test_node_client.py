"""Object servers that do not answer, and whose fault that is."""

import socket
import threading
from collections import Counter

import pytest

from hapi_middleware.config import FilterConfig
from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.places.node_client import NodeClient
from hapi_middleware.places.node_computer import NodeComputer
from hapi_middleware.places.node_faults import LONGEST_SECONDS, Node
from hapi_middleware.places.node_table import NodeTable
from hapi_middleware.shared_table import SharedTable
from hapi_protocol.backend import STEP_JOB, STEP_MODEL
from hapi_protocol.errors import (
    TooSlowError,
    UnavailableError,
    make_error,
)
from hapi_protocol.job_messages import ModelIdentity

MODEL = ModelIdentity("AUTH_a", "c", "o", "etag", 100)


class Log:
    """Keeps what the filter reports."""

    def __init__(self):
        self.counts = Counter()
        self.lines = []

    def update_stats(self, name, amount):
        self.counts[name] += amount

    def warning(self, text, *values):
        self.lines.append(text % values)

    debug = error = warning


@pytest.fixture
def silent():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def computer_of(address, **options):
    log = Log()
    client = NodeClient(
        FilterConfig(**options),
        [b"k" * 40],
        FilterMetrics(log),
        log,
        NodeTable(SharedTable(8)),
    )
    facts = {"ip": address[0], "port": address[1], "device": "d1"}
    node = Node(facts, 7, "/AUTH_a/c/o", 0)
    return NodeComputer(client, node, None, FilterMetrics(log)), client, log


def test_silent_object_server_is_not_asked_for_a_while(silent):
    computer, client, log = computer_of(silent, object_silence_seconds=0.2)
    with pytest.raises(UnavailableError, match=r"is silent"):
        computer.find_model(MODEL, "tx")
    assert client.table.is_left_out(*silent)
    assert log.counts == counted("silent", silent)


def counted(kind, address):
    """A fault is counted once in all, and once for its object server."""
    name = f"hapi.node.{kind}"
    return {name: 1, f"{name}.127-0-0-1_{address[1]}": 1}


ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"HTTP/1.1 20",
        b"junk\r\n\r\n",
        ANSWER[:-2],
        ANSWER,
        ANSWER + b"5\r\nab",
        ANSWER + b"junk\r\n",
        ANSWER + b"2\r\nab\r\n",
    ],
)
def test_object_server_that_dies_in_mid_answer_is_left_out(beginning):
    """It is killed: that was a traceback and status 500."""

    def answer():
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(beginning)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        computer, client, log = computer_of(server.getsockname())
        with pytest.raises(UnavailableError, match=r"cannot be reached"):
            computer.find_model(MODEL, "tx")
        thread.join()
        assert client.table.is_left_out(*server.getsockname())
        assert log.counts == counted("lost", server.getsockname())


def test_impatience_of_the_access_log_is_no_fault_of_the_server(silent):
    """It waits for a usage for less time than a server may be silent."""
    computer, client, log = computer_of(silent, object_silence_seconds=30.0)
    with pytest.raises(TooSlowError):
        computer._ask_usage("job", "tx", 0.2)
    assert not client.table.is_left_out(*silent)
    assert not log.counts


def test_absent_object_server_is_not_asked_for_a_while():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    computer, client, log = computer_of(address)
    with pytest.raises(UnavailableError, match=r"cannot be reached"):
        computer.find_model(MODEL, "tx")
    assert client.table.is_left_out(*address)
    assert log.counts == counted("lost", address)


def test_refusals_at_the_same_time_count_once(silent):
    """Twelve requests for one package made a minute an hour."""
    computer, client, _ = computer_of(silent)
    refusal = UnavailableError("worker_unavailable", "no space")
    node = computer._node
    for _ in range(12):
        client.faults.noted_degraded(node, "model", refusal)
    again = client.table.back_off(
        *silent, "model", "model", seconds=1.0, longest=LONGEST_SECONDS
    )
    assert again == 2 * FilterConfig().object_suppress_seconds


def test_package_that_cannot_be_validated_is_no_fault_of_the_server(silent):
    """Others compute there with models that it has."""
    computer, client, _ = computer_of(silent)
    refusal = UnavailableError("worker_unavailable", "it was killed")
    assert client.faults.noted(computer._node, STEP_MODEL, refusal) is refusal
    assert not client.table.is_left_out(*silent)
    assert (
        client.faults.noted(computer._node, STEP_JOB, refusal) is not refusal
    )
    assert client.table.is_left_out(*silent)


def test_names_of_objects_forge_no_line_of_the_log(silent):
    computer, client, log = computer_of(silent)
    error = make_error("source_damaged", "/AUTH_a/c/x\nhapi: all is well")
    client.faults.noted(computer._node, STEP_JOB, error)
    client.faults.noted_degraded(
        computer._node, "/AUTH_a/c/m\nhapi: so", error
    )
    assert len(log.lines) == 2
    assert not any("\n" in line for line in log.lines)
