"""The pools, one forward pass, and a body that is read strictly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from cheroot.makefile import StreamReader

from hapi_protocol.errors import (
    DoesNotFitError,
    HapiError,
    TooLargeError,
    TooSlowError,
)
from hapi_worker.execution.devices import choose_devices
from hapi_worker.execution.forward import core_clock, padded, run_prefix
from hapi_worker.jobs.chunked_body import ChunkedBody
from hapi_worker.peer import ClientDisconnectedError, Connection
from hapi_worker.scheduling.fair_pool import DEVICE, FairPool
from hapi_worker.scheduling.fair_queue import Ledger


@pytest.fixture
def pool() -> Iterator[FairPool]:
    pool = FairPool("test", 1, Ledger(), torch_threads=1)
    yield pool
    pool.close()


def test_pool_serves_accounts_in_turn(pool: FairPool) -> None:
    gate = threading.Event()
    order: list[str] = []
    done = threading.Event()
    pool.submit("first", gate.wait)
    for _ in range(8):
        pool.submit("a", lambda: (time.sleep(0.06), order.append("a"))[1])
    pool.submit("b", lambda: order.append("b"))
    pool.submit("b", done.set)
    gate.set()
    assert done.wait(5)
    assert order.index("b") <= 2


@pytest.mark.parametrize(("device", "num_cores"), [("cpu", 3), ("cuda", 1)])
def test_core_seconds_count_torchs_threads_beside_this_one(
    device: str, num_cores: int
) -> None:
    pool = FairPool("cores", 1, Ledger(), torch_threads=3)
    found: list[float] = []

    def measure() -> None:
        thread = time.thread_time()
        while time.thread_time() < thread + 0.05:
            pass
        before = core_clock(torch.device(device)), time.thread_time()
        found.append(before[0] / before[1])

    done = threading.Event()
    pool.submit("a", measure)
    pool.submit("a", done.set)
    assert done.wait(10)
    pool.close()
    assert found == [pytest.approx(num_cores, rel=0.05)]


def test_pool_survives_work_that_raises(
    pool: FairPool, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    pool.submit("a", lambda: 1 // 0)
    pool.submit("a", done.set)
    assert done.wait(5)
    assert "ZeroDivisionError" in caplog.text


def test_paused_pool_ends_what_runs_and_begins_nothing(
    pool: FairPool,
) -> None:
    begun, release, after = (threading.Event() for _ in range(3))

    def work() -> None:
        begun.set()
        release.wait(5)

    pool.submit("a", work)
    assert begun.wait(5)
    with pool.paused(0.05) as idle:
        assert not idle
    pool.submit("a", after.set)
    threading.Timer(0.1, release.set).start()
    with pool.paused(5) as idle:
        assert idle
        assert not after.wait(0.2)
    assert after.wait(5)


def test_pool_threads_have_their_own_number_of_torch_threads() -> None:
    before = torch.get_num_threads()
    pools = [FairPool(f"t{n}", 1, Ledger(), torch_threads=n) for n in (1, 3)]
    found = []
    for pool in pools:
        done = threading.Event()
        pool.submit("a", lambda: found.append(torch.get_num_threads()))
        pool.submit("a", done.set)
        assert done.wait(5)
        pool.close()
    assert found == [1, 3]
    assert torch.get_num_threads() == before


def test_closed_pool_takes_no_work_and_has_no_threads() -> None:
    pool = FairPool("closing", 2, Ledger())
    pool.close()
    with pytest.raises(RuntimeError):
        pool.submit("a", lambda: None)
    assert not [t for t in threading.enumerate() if "closing" in t.name]


def test_paused_pool_lets_the_piece_that_pauses_it_go_on(
    pool: FairPool,
) -> None:
    found: list[bool] = []
    done = threading.Event()

    def work() -> None:
        with pool.paused(1.0, num_allowed=1) as idle:
            found.append(idle)

    pool.submit("a", work)
    pool.submit("a", done.set)
    assert done.wait(5)
    assert found == [True]


def test_urgent_work_goes_before_the_same_accounts_other_work(
    pool: FairPool,
) -> None:
    gate, done = threading.Event(), threading.Event()
    order: list[str] = []
    pool.submit("a", gate.wait)
    pool.submit("a", lambda: order.append("decode"))
    pool.submit("a", lambda: order.append("pass"), kind=DEVICE, urgent=True)
    pool.submit("a", done.set)
    gate.set()
    assert done.wait(5)
    assert order == ["pass", "decode"]


def test_unknown_device_is_refused() -> None:
    assert choose_devices("cpu") == [torch.device("cpu")]
    assert choose_devices("cpu,cpu") == [torch.device("cpu")] * 2
    with pytest.raises(ValueError, match="cuda:99"):
        choose_devices("cuda:99")


def test_devices_of_two_kinds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices("auto") == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    with pytest.raises(ValueError, match="one kind"):
        choose_devices("cpu,cuda:1")


def test_batch_is_padded_with_zeros() -> None:
    images = [torch.ones(2, 3), torch.full((2, 3), 2.0)]
    batch = padded(images, 4, torch.device("cpu"))
    assert batch.shape == (4, 2, 3)
    assert batch[:, 0, 0].tolist() == [1, 2, 0, 0]


def prefix_with_room_for(batch: int) -> tuple[list[int], object]:
    sizes: list[int] = []

    def prefix(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        if len(images) > batch:
            raise torch.OutOfMemoryError("no room")
        return images * 2

    return sizes, prefix


def test_batch_is_halved_until_it_fits() -> None:
    images = torch.arange(7.0).reshape(7, 1)
    sizes, prefix = prefix_with_room_for(2)
    computed = run_prefix(
        prefix,  # type: ignore[arg-type]
        images,
        device=torch.device("cpu"),
    )
    assert computed.features.tolist() == (images * 2).tolist()
    assert sizes[0] == 7
    assert computed.num_halvings == 2
    assert max(size for size in sizes if size <= 2) == 2


def test_cpu_that_cannot_allocate_is_out_of_memory_too() -> None:
    sizes: list[int] = []

    def prefix(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        if len(images) > 2:
            return torch.empty(2**60, dtype=torch.uint8)
        return images * 2

    images = torch.arange(4.0).reshape(4, 1)
    computed = run_prefix(prefix, images, device=torch.device("cpu"))
    assert computed.features.tolist() == (images * 2).tolist()
    assert sizes == [4, 2, 2]


def test_failure_of_the_model_is_not_taken_for_want_of_memory() -> None:
    def prefix(images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        run_prefix(
            prefix,
            torch.zeros(2, 1),
            device=torch.device("cpu"),
        )


def test_one_sample_that_does_not_fit_is_an_error() -> None:
    _, prefix = prefix_with_room_for(0)
    with pytest.raises(DoesNotFitError, match="no room"):
        run_prefix(
            prefix,  # type: ignore[arg-type]
            torch.zeros(2, 1),
            device=torch.device("cpu"),
        )


class Wire:
    """Both ends of a connection; ``body`` reads what ``send`` writes."""

    def __init__(self, length_bytes: int, idle_seconds: float) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.connection = Connection(
            self.ours, StreamReader(self.ours, "rb", 64 * 1024)
        )
        self.body = ChunkedBody(
            self.connection,
            length_bytes=length_bytes,
            idle_seconds=idle_seconds,
        )

    def send(self, data: bytes) -> None:
        self.theirs.sendall(data)

    def read_all(self) -> bytes:
        pieces = []
        while piece := self.body.read(1000):
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire(10, 0.3)
    yield wire
    wire.close()


def test_body_is_the_chunks_joined(wire: Wire) -> None:
    wire.send(b"4;x=y\r\nabcd\r\n006\r\nefghij\r\n0\r\nTrailer: x\r\n\r\n")
    assert wire.read_all() == b"abcdefghij"
    assert wire.body.read(10) == b""
    assert wire.body.bytes_read == 10


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"a",
        b"a\r\n",
        b"a\r\nabcd",
        b"a\r\nabcdefghij",
        b"a\r\nabcdefghij\r\n",
        b"a\r\nabcdefghij\r\n0",
        b"a\r\nabcdefghij\r\n0\r\n",
    ],
)
def test_body_that_is_cut_off_never_ends_cleanly(
    wire: Wire, sent: bytes
) -> None:
    wire.send(sent)
    wire.theirs.close()
    with pytest.raises(ClientDisconnectedError):
        wire.read_all()


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"-1\r\n", HapiError),
        (b"zz\r\n", HapiError),
        (b"\r\n", HapiError),
        (b"0x4\r\nabcd\r\n", HapiError),
        (b"2\r\nabcd\r\n", HapiError),
        (b"4\r\nabcd\r\n0\r\n\r\n", HapiError),
        (b"b\r\nabcdefghijk\r\n", TooLargeError),
        (b"ffffffffffffffffff\r\n", TooLargeError),
        (b"1" * 1000, HapiError),
        (b"4\r\nab", TooSlowError),
    ],
)
def test_body_that_is_not_as_announced_is_refused(
    wire: Wire, sent: bytes, kind: type[HapiError]
) -> None:
    wire.send(sent)
    with pytest.raises(kind):
        wire.read_all()


def test_trailers_behind_the_body_come_to_an_end(wire: Wire) -> None:
    wire.send(b"a\r\nabcdefghij\r\n0\r\n" + b"X: y\r\n" * 20)
    with pytest.raises(HapiError, match="more than 16 trailers"):
        wire.read_all()


def test_time_spent_waiting_for_the_sender_is_known(wire: Wire) -> None:
    threading.Timer(0.15, wire.send, [b"1\r\na\r\n"]).start()
    assert wire.body.read(10) == b"a"
    assert 0.1 < wire.body.waited_seconds < 0.3


def test_reader_is_woken_when_the_job_is_cancelled() -> None:
    wire = Wire(10, 60.0)
    threading.Timer(0.1, wire.connection.stop_reading).start()
    started = time.monotonic()
    with pytest.raises(ClientDisconnectedError):
        wire.body.read(1)
    assert time.monotonic() - started < 5
    assert not wire.connection.is_disconnected()
    wire.theirs.close()
    assert wire.connection.is_disconnected()
    wire.close()
    assert wire.connection.is_disconnected()
