"""Two tiers on one machine that stand for two machines with a link between.

::

    with two_tiers() as bed:
        bed.set_link(12.5e6)
        with bed.client.remote("benchmarks.suite.client_process") as client:
            ...

The storage tier is the embedded Swift, with separate server processes, and
hapi-worker: on one core, in one network namespace.  The client tier is what
:class:`Tier` starts on another core in another namespace.  All processes end
with the ``with`` block, and also if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.testbed.folders import new_folder, remove_folder, remove_stale
from benchmarks.testbed.network import (
    STORAGE_ADDRESS,
    Link,
    Namespace,
    missing_requirements,
)
from benchmarks.testbed.process_resources import CPU, DEVICE_VARIABLE
from benchmarks.testbed.remote import Remote
from hapi_cluster.process_control import die_with

ROOT = Path(__file__).resolve().parents[2]
STORAGE_PROCESS = "benchmarks.testbed.storage_process"
START_SECONDS = 180.0
QUESTION_SECONDS = 120.0
LOOPBACK = "127.0.0.1"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class TestbedError(Exception):
    """This machine lacks something that a testbed needs."""

    __test__ = False


COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Installed packages have compiled modules.  Where they were not written, each
process compiles those that it imports, which takes seconds."""


@dataclass(frozen=True)
class Tier:
    """Cores and network namespace in which processes are started.

    ``namespace`` is None for the machine's own network; ``environment`` is
    added to that of this process.
    """

    name: str
    cores: tuple[int, ...]
    namespace: Namespace | None
    environment: Mapping[str, str]

    def start(
        self, argv: Sequence[str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a process in a session of its own.

        The kernel kills it when the calling thread ends.

        ``options`` are those of ``subprocess.Popen``.
        """
        return self._start(argv, preexec_fn=die_with(os.getpid()), **options)

    def _start(
        self, argv: Sequence[str], **options: Any
    ) -> subprocess.Popen[bytes]:
        cores = ",".join(map(str, self.cores))
        command = ["taskset", "--cpu-list", cores, *argv]
        if self.namespace is not None:
            command = self.namespace.command(command)
        return subprocess.Popen(
            command,
            env={**os.environ, **COMPILED, **self.environment},
            start_new_session=True,
            **options,
        )

    def remote(self, module: str, *arguments: str) -> Remote:
        """Starts ``python -m module``, which answers questions.

        The module calls :func:`benchmarks.testbed.remote.serve`, and ends when
        its standard input ends.
        """
        process = self._start(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        return Remote(process, f"{module} on the {self.name} tier")


@dataclass
class Testbed:
    """Both tiers, running; see :func:`two_tiers`.

    The environment of ``client`` has the credentials; ``folder`` is removed at
    the end; ``link`` is None without namespaces.
    """

    __test__ = False

    storage: Tier
    client: Tier
    folder: Path
    link: Link | None
    _storage: Remote | None = field(default=None)

    @property
    def shaped(self) -> bool:
        """True if the link's rate can be set."""
        return self.link is not None

    def set_link(self, bytes_per_second: float | None) -> None:
        """Sets the link's rate in both directions, also during transfers.

        Args:
            bytes_per_second: of TCP payload; None for no limit.

        Raises:
            TestbedError: there are no namespaces.
        """
        if self.link is None:
            raise TestbedError(
                "a link can only be shaped with network namespaces; run as"
                " root, and without --no-netns"
            )
        self.link.shape(bytes_per_second)

    def affinities(self) -> dict[str, list[int]]:
        """Cores that each process of the storage tier may use."""
        return dict(self._ask("affinities"))

    def storage_sessions(self) -> list[int]:
        """Sessions of the storage tier's processes."""
        return list(self._ask("sessions"))

    def restart_worker(self) -> None:
        """Starts a new worker, without models and profiles."""
        self._ask("restart_worker")

    def _ask(self, do: str) -> Any:
        assert self._storage is not None
        return self._storage.ask(do, seconds=QUESTION_SECONDS)


@contextlib.contextmanager
def two_tiers(
    *,
    netns: bool = True,
    cores: int = 1,
    worker_device: str = CPU,
    client_device: str = CPU,
    **settings: Any,
) -> Iterator[Testbed]:
    """Starts both tiers.

    Args:
        netns: two network namespaces and a link, which needs root; without
            them both tiers share the machine's network, unshaped.
        cores: of each tier, and threads of its processes.
        worker_device, client_device: devices that the tiers compute on.
        settings: more fields of ``hapi_cluster.settings.ClusterSettings``.

    Raises:
        TestbedError: naming what is missing.
        RemoteError: the cluster does not start.
    """
    storage_cores, client_cores = _tier_cores(cores)
    if netns:
        _require_network()
    remove_stale()
    with contextlib.ExitStack() as stack:
        folder = new_folder()
        stack.callback(remove_folder, folder)
        # Temporary files of both tiers are removed with the folder.
        scratch = folder / "tmp"
        scratch.mkdir()
        scratch_environment = {"TMPDIR": str(scratch)}
        link: Link | None = None
        spaces: list[Namespace | None] = [None, None]
        if netns:
            ends = [stack.enter_context(Namespace()) for _ in spaces]
            link, spaces = Link(*ends), [*ends]
        storage = Tier(
            "storage",
            storage_cores,
            spaces[0],
            {**thread_variables(storage_cores), **scratch_environment},
        )
        remote = stack.enter_context(
            storage.remote(STORAGE_PROCESS, str(folder))
        )
        credentials = remote.ask(
            "start",
            seconds=START_SECONDS,
            **{
                "processes": True,
                "host": STORAGE_ADDRESS if netns else LOOPBACK,
                "worker_options": {"device": worker_device},
                **settings,
            },
        )
        client = Tier(
            "client",
            client_cores,
            spaces[1],
            {
                **thread_variables(client_cores),
                **scratch_environment,
                **credentials,
                DEVICE_VARIABLE: client_device,
            },
        )
        yield Testbed(storage, client, folder, link, remote)


def _tier_cores(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores of the storage tier and of the client tier."""
    usable = sorted(os.sched_getaffinity(0))
    if shutil.which("taskset") is None:
        raise TestbedError("the command taskset is missing (util-linux)")
    if len(usable) < 2 * count:
        raise TestbedError(
            f"two tiers need {2 * count} cores; this process may use"
            f" {len(usable)}"
        )
    return tuple(usable[:count]), tuple(usable[count : 2 * count])


def thread_variables(cores: tuple[int, ...]) -> dict[str, str]:
    """Environment variables of processes that have these cores."""
    return dict.fromkeys(THREAD_VARIABLES, str(len(cores)))


def _require_network() -> None:
    missing = missing_requirements()
    if missing:
        raise TestbedError(
            f"network namespaces need {', '.join(missing)}; use --no-netns to"
            " run without them (no link is shaped then)"
        )
