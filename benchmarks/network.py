"""Two network namespaces and the shaped link between them.

The namespaces have no name: each belongs to a process that holds it (``cat``,
waiting for the end of its input), and the kernel removes namespace and
interfaces with the last process inside.  So a run that is killed leaves
nothing behind.  The interfaces are made inside the namespaces: the machine's
own network is never touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

STORAGE_ADDRESS = "10.213.77.1"
CLIENT_ADDRESS = "10.213.77.2"
PREFIX_LENGTH = 30
INTERFACE = "tier0"
TOOLS = ("ip", "tc", "unshare", "nsenter")
COMMAND_SECONDS = 30.0

PAYLOAD_BYTES = 1448
"""Of a full TCP segment with time stamps, MTU 1500."""

FRAME_BYTES = PAYLOAD_BYTES + 66
"""The same with the TCP, IP and Ethernet headers that ``tbf`` counts."""

MAX_SEGMENTED_BYTES = 9000
"""That a sender may hand over at once.  The usual 64 KiB would overflow the
queue of a slow link each time, for TCP to send much of it again."""

BURST_SECONDS = 0.01
MIN_BURST_BYTES = 16 * 1024
QUEUE_SECONDS = 0.1


class NetworkError(Exception):
    """A command that failed, or what this machine lacks."""


def missing_requirements() -> list[str]:
    """What is needed for namespaces and is not here; empty if all is.

    Tried in a namespace of its own, which is gone on return.
    """
    tools = [name for name in TOOLS if shutil.which(name) is None]
    if tools:
        return [f"the commands {', '.join(tools)} (iproute2, util-linux)"]
    if os.geteuid() != 0:
        return ["root"]
    for argv, what in (
        (["true"], "the right to make network namespaces (CAP_SYS_ADMIN)"),
        (["ip", "link", "set", "lo", "up"], "CAP_NET_ADMIN"),
        (_veth("one", "two"), "the kernel's veth interfaces"),
        (
            ["tc", "qdisc", "add", "dev", "lo", "root", *tbf(1e6)],
            "the kernel's tbf traffic shaping (sch_tbf)",
        ),
    ):
        done = subprocess.run(
            ["unshare", "--net", *argv],
            capture_output=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if done.returncode:
            return [what]
    return []


def _veth(name: str, peer: str, namespace: str | None = None) -> list[str]:
    made = ["ip", "link", "add", "name", name, "type", "veth"]
    there = [] if namespace is None else ["netns", namespace]
    return [*made, "peer", "name", peer, *there]


def tbf(bytes_per_second: float) -> list[str]:
    """Arguments of ``tc`` for a rate of TCP payload.

    Headers come on top, so that a transfer of full segments moves
    ``bytes_per_second`` of its own bytes.
    """
    bits = round(8 * bytes_per_second * FRAME_BYTES / PAYLOAD_BYTES)
    burst = max(MIN_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
    rate = ["rate", f"{bits}bit", "burst", str(burst)]
    return ["tbf", *rate, "latency", f"{round(QUEUE_SECONDS * 1000)}ms"]


def run(argv: Sequence[str]) -> str:
    """Standard output of a short command; NetworkError if it fails."""
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode:
        raise NetworkError(
            f"{' '.join(argv)} failed with status {done.returncode}:"
            f" {done.stderr.strip()}"
        )
    return done.stdout


class Namespace:
    """A network namespace of its own, loopback up."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        try:
            # An echo says that the namespace is there.
            self._holder.stdin.write(b"\n")
            self._holder.stdin.flush()
            if not self._holder.stdout.readline():
                raise NetworkError("unshare --net failed; are you root?")
            self.run(["ip", "link", "set", "lo", "up"])
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process that holds it."""
        return self._holder.pid

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` inside."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *argv]

    def run(self, argv: Sequence[str]) -> str:
        """Standard output of a short command inside."""
        return run(self.command(argv))

    def close(self) -> None:
        """Gives it up; it goes when the last process inside has ended."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.kill()
        self._holder.wait(COMMAND_SECONDS)
        self._holder.stdin.close()
        self._holder.stdout.close()

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Traffic:
    """Bytes on the wire so far, headers included.

    Attributes:
        down: from the storage tier to the client.
        up: from the client to the storage tier.
    """

    down: int
    up: int


class Link:
    """A veth pair between two namespaces, shaped in both directions."""

    def __init__(self, storage: Namespace, client: Namespace) -> None:
        self._ends = (storage, client)
        self.bytes_per_second: float | None = None
        storage.run(_veth(INTERFACE, INTERFACE, str(client.pid)))
        for end, address in zip(
            self._ends, (STORAGE_ADDRESS, CLIENT_ADDRESS), strict=True
        ):
            place = f"{address}/{PREFIX_LENGTH}"
            end.run(["ip", "address", "add", place, "dev", INTERFACE])
            segments = ["gso_max_size", str(MAX_SEGMENTED_BYTES)]
            end.run(["ip", "link", "set", INTERFACE, "up", *segments])

    def shape(self, bytes_per_second: float | None) -> None:
        """Sets the rate of both directions, also while data flows.

        Args:
            bytes_per_second: of TCP payload; None for no limit.
        """
        if bytes_per_second is None and self.bytes_per_second is None:
            return
        for end in self._ends:
            base = ["tc", "qdisc"]
            where = ["dev", INTERFACE, "root"]
            if bytes_per_second is None:
                end.run([*base, "del", *where])
            else:
                end.run([*base, "replace", *where, *tbf(bytes_per_second)])
        self.bytes_per_second = bytes_per_second

    def traffic(self) -> Traffic:
        """The counters of the client's interface."""
        text = self._ends[1].run(["ip", "-s", "-j", "link", "show", INTERFACE])
        counters = json.loads(text)[0]["stats64"]
        return Traffic(
            down=counters["rx"]["bytes"], up=counters["tx"]["bytes"]
        )
