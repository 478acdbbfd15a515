"""Two tiers on one machine, as two machines: a link of any rate between.

::

    with two_tiers() as bed:
        bed.set_link(12.5e6)
        with bed.client.remote("benchmarks.client_tier") as client:
            ...

The storage tier is the embedded Swift, with separate server processes, and
hapi-worker, all on one core and in one network namespace; the client tier is
whatever is started with :class:`Tier`, on another core in another namespace.
All of it ends with the ``with`` block, and also when this process is killed.
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

from benchmarks.devices import CPU, VARIABLE
from benchmarks.folders import new_folder, remove_folder, remove_stale
from benchmarks.network import (
    STORAGE_ADDRESS,
    Link,
    Namespace,
    missing_requirements,
)
from benchmarks.remote import Remote

from hapi_cluster.process_control import die_with

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0
QUESTION_SECONDS = 120.0
LOOPBACK = "127.0.0.1"

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


Cores = tuple[tuple[int, ...], tuple[int, ...]]
"""Of the storage tier, of the client tier."""


class TestbedError(Exception):
    """What this machine lacks for a testbed, and what would do."""

    __test__ = False


@dataclass(frozen=True)
class Tier:
    """Where to start processes: its cores, one network namespace.

    Attributes:
        name: ``storage`` or ``client``.
        cores: numbers of the cores that its processes share.
        namespace: None for the machine's own network.
        environment: of its processes, beside that of this process.
    """

    name: str
    cores: tuple[int, ...]
    namespace: Namespace | None
    environment: Mapping[str, str]

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on this tier."""
        cores = ",".join(map(str, self.cores))
        pinned = ["taskset", "--cpu-list", cores, *argv]
        if self.namespace is None:
            return pinned
        return self.namespace.command(pinned)

    def start(
        self, argv: Sequence[str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a process, in a session of its own.

        The kernel kills it when the thread that called this ends.

        Args:
            argv: the command.
            options: of ``subprocess.Popen``.
        """
        return self._start(argv, preexec_fn=die_with(os.getpid()), **options)

    def _start(
        self, argv: Sequence[str], **options: Any
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(argv),
            env={**os.environ, **self.environment},
            start_new_session=True,
            **options,
        )

    def remote(self, module: str, *arguments: str) -> Remote:
        """Starts ``python -m module``, which answers questions.

        It unwinds by itself when its input ends.

        Args:
            module: calls :func:`benchmarks.remote.serve`.
            arguments: of its command line.
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

    Attributes:
        storage: the tier of Swift and the worker.
        client: the tier of the training job; its environment has the
            credentials.
        folder: temporary, removed at the end.
        link: None without namespaces, when nothing can be shaped.
        removed: folders of killed runs that were cleaned up at the start.
    """

    __test__ = False

    storage: Tier
    client: Tier
    folder: Path
    link: Link | None
    removed: Sequence[Path] = field(default_factory=list)
    _storage: Remote | None = None

    @property
    def shaped(self) -> bool:
        """Whether a link can be set."""
        return self.link is not None

    def set_link(self, bytes_per_second: float | None) -> None:
        """Sets the link's rate in both directions, also in mid-run.

        Args:
            bytes_per_second: of TCP payload; None for no limit.

        Raises:
            TestbedError: without namespaces.
        """
        if self.link is None:
            raise TestbedError(
                "without network namespaces no link can be shaped; run as"
                " root, and without --no-netns"
            )
        self.link.shape(bytes_per_second)

    def affinities(self) -> dict[str, list[int]]:
        """Cores that each process of the storage tier may use."""
        return dict(self._ask("affinities"))

    def storage_seconds(self) -> float:
        """CPU seconds of the storage tier's processes so far."""
        return float(self._ask("cpu_seconds"))

    def storage_sessions(self) -> list[int]:
        """Numbers of the sessions of the storage tier's processes."""
        return list(self._ask("sessions"))

    def worker_counters(self) -> dict[str, float]:
        """Jobs, samples, batches and uploads of the worker so far."""
        return dict(self._ask("worker_counters"))

    def restart_worker(self) -> None:
        """A new worker, which knows no model and no profile."""
        self._ask("restart_worker")

    def stop_worker(self) -> None:
        """No worker, until it is restarted."""
        self._ask("stop_worker")

    def _ask(self, do: str) -> Any:
        assert self._storage is not None
        return self._storage.ask(do, seconds=QUESTION_SECONDS)


@contextlib.contextmanager
def two_tiers(
    *,
    netns: bool = True,
    cores: Cores | None = None,
    worker_options: Mapping[str, str] | None = None,
    worker_device: str = CPU,
    client_device: str = CPU,
    **settings: Any,
) -> Iterator[Testbed]:
    """Starts both tiers.

    Args:
        netns: two network namespaces and a link, which needs root; else
            everything shares the machine's network, unshaped.
        cores: of the storage tier and of the client tier; None for one each.
            Processes have as many threads as their tier has cores.
        worker_options: of the worker; the rest are an operator's defaults.
        worker_device: where the worker computes, such as ``cuda``.
        client_device: where the client tier's processes do
            (:mod:`benchmarks.devices`).
        settings: more fields of ``hapi_cluster.settings.ClusterSettings``.

    Raises:
        TestbedError: naming what is missing.
        RemoteError: when the cluster does not start.
    """
    storage_cores, client_cores = _checked(cores)
    if netns:
        _require_network()
    removed = remove_stale()
    options = {"device": worker_device, **(worker_options or {})}
    with contextlib.ExitStack() as stack:
        folder = new_folder()
        stack.callback(remove_folder, folder)
        # Temporary files of both tiers go with the folder.
        scratch = folder / "tmp"
        scratch.mkdir()
        scratch_environment = {"TMPDIR": str(scratch)}
        spaces = [
            stack.enter_context(Namespace()) if netns else None
            for _ in range(2)
        ]
        link = None
        if spaces[0] is not None and spaces[1] is not None:
            link = Link(spaces[0], spaces[1])
        storage = Tier(
            "storage",
            storage_cores,
            spaces[0],
            {**thread_variables(storage_cores), **scratch_environment},
        )
        remote = stack.enter_context(
            storage.remote("benchmarks.storage_tier", str(folder))
        )
        credentials = remote.ask(
            "start",
            seconds=START_SECONDS,
            **{
                "processes": True,
                "host": STORAGE_ADDRESS if netns else LOOPBACK,
                "worker_options": options,
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
                VARIABLE: client_device,
            },
        )
        yield Testbed(storage, client, folder, link, removed, remote)


def _checked(cores: Cores | None) -> Cores:
    usable = sorted(os.sched_getaffinity(0))
    if shutil.which("taskset") is None:
        raise TestbedError(
            "tiers are pinned to their cores with taskset, which is missing;"
            " install util-linux"
        )
    if cores is None:
        if len(usable) < 2:
            raise TestbedError(
                "a testbed gives each tier a core of its own, and this"
                f" process may use only core {usable[0]}; start it with more"
            )
        return (usable[0],), (usable[1],)
    storage, client = cores
    for name, tier in (("storage", storage), ("client", client)):
        unusable = sorted({*tier} - {*usable})
        if unusable or not tier:
            raise TestbedError(
                f"the {name} tier cannot have the cores"
                f" {', '.join(map(str, unusable)) or 'none'}; this process"
                f" may use {', '.join(map(str, usable))}"
            )
    if shared := {*storage} & {*client}:
        raise TestbedError(
            f"both tiers have core {min(shared)}; they stand for two machines"
        )
    return cores


def thread_variables(cores: tuple[int, ...]) -> dict[str, str]:
    """Of the environment of processes that have these cores."""
    return dict.fromkeys(THREAD_VARIABLES, str(len(cores)))


def _require_network() -> None:
    missing = missing_requirements()
    if missing:
        raise TestbedError(
            f"network namespaces need {', '.join(missing)}, missing here;"
            " with --no-netns the tiers share the machine's network, and no"
            " link is shaped"
        )
