"""Two network namespaces and the shaped link between them.

The namespaces have no names: a process (``cat``) holds each of them, and the
kernel removes namespace and interfaces with the last process inside.  So a
killed run leaves nothing behind.  The interfaces are created inside the
namespaces; the machine's own network is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

STORAGE_ADDRESS = "10.213.77.1"
CLIENT_ADDRESS = "10.213.77.2"
PREFIX_LENGTH = 30
INTERFACE = "tier0"
TOOLS = ("ip", "tc", "unshare", "nsenter")
COMMAND_SECONDS = 30.0

PAYLOAD_BYTES = 1448
"""Payload of a full TCP segment with time stamps, MTU 1500."""

FRAME_BYTES = PAYLOAD_BYTES + 66
"""Payload with the TCP, IP and Ethernet headers that ``tbf`` counts."""

MAX_SEGMENTED_BYTES = 9000
"""Maximum that a sender hands over at once.  The default of 64 KiB overflows
the queue of a slow link each time, and TCP sends much of it again."""

BURST_SECONDS = 0.01
MIN_BURST_BYTES = 16 * 1024
QUEUE_SECONDS = 0.1


class NetworkError(Exception):
    """A command failed, or this machine lacks something."""


def missing_requirements() -> list[str]:
    """Requirements of namespaces that this machine lacks.

    Tried in a temporary namespace.
    """
    tools = [name for name in TOOLS if shutil.which(name) is None]
    if tools:
        return [f"the commands {', '.join(tools)} (iproute2, util-linux)"]
    if os.geteuid() != 0:
        return ["root"]
    tried = (
        (["true"], "the right to make network namespaces (CAP_SYS_ADMIN)"),
        (veth("one", "two"), "CAP_NET_ADMIN and the kernel's veth"),
        (
            ["tc", "qdisc", "add", "dev", "lo", "root", *tbf(1e6)],
            "the kernel's tbf traffic shaping (sch_tbf)",
        ),
    )
    for argv, what in tried:
        done = subprocess.run(
            ["unshare", "--net", *argv],
            capture_output=True,
            timeout=COMMAND_SECONDS,
        )
        if done.returncode:
            return [what]
    return []


def veth(name: str, peer: str, namespace: str | None = None) -> list[str]:
    made = ["ip", "link", "add", "name", name, "type", "veth"]
    there = [] if namespace is None else ["netns", namespace]
    return [*made, "peer", "name", peer, *there]


def tbf(bytes_per_second: float) -> list[str]:
    """Arguments of ``tc`` for a rate of TCP payload; headers are added."""
    bits = round(8 * bytes_per_second * FRAME_BYTES / PAYLOAD_BYTES)
    burst = max(MIN_BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
    rate = ["rate", f"{bits}bit", "burst", str(burst)]
    return ["tbf", *rate, "latency", f"{round(QUEUE_SECONDS * 1000)}ms"]


def run(argv: Sequence[str]) -> str:
    """Runs a short command; returns its output.

    Raises:
        NetworkError: the command fails.
    """
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
    """A new network namespace with loopback."""

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
            # The echo arrives when the namespace exists.
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
        """Number of the process that holds the namespace."""
        return self._holder.pid

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` inside."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *argv]

    def run(self, argv: Sequence[str]) -> str:
        """Runs a short command inside; returns its output."""
        return run(self.command(argv))

    def close(self) -> None:
        """Releases the namespace; it ends with the last process inside."""
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


class Link:
    """A veth pair between two namespaces, shaped in both directions."""

    def __init__(self, storage: Namespace, client: Namespace) -> None:
        self._ends = (storage, client)
        self.bytes_per_second: float | None = None
        storage.run(veth(INTERFACE, INTERFACE, str(client.pid)))
        for end, address in zip(
            self._ends, (STORAGE_ADDRESS, CLIENT_ADDRESS), strict=True
        ):
            place = f"{address}/{PREFIX_LENGTH}"
            end.run(["ip", "address", "add", place, "dev", INTERFACE])
            segments = ["gso_max_size", str(MAX_SEGMENTED_BYTES)]
            end.run(["ip", "link", "set", INTERFACE, "up", *segments])

    def shape(self, bytes_per_second: float | None) -> None:
        """Sets the rate of both directions, also during transfers.

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
