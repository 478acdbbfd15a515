"""Settings of one start of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hapi_cluster.errors import SettingsError

DEFAULT_START_SECONDS = 90.0
"""A cold start imports torch from disk; the time is a deadline only."""
DEFAULT_STOP_SECONDS = 15.0
"""A worker ends its threads in five seconds; the time is a deadline only."""
MAX_OBJECT_SERVERS = 16
"""More than any layout has devices."""


@dataclass(frozen=True)
class Layout:
    """Rings and storage policies of a cluster.

    Attributes:
        replicas: replicas of accounts, containers and replicated objects.
        devices: number of ring devices.
        policies: options of the storage policies, the default one first.
    """

    replicas: int
    devices: int
    policies: tuple[Mapping[str, str], ...]


_REPLICATED = {"name": "replicated"}
_EC42 = {
    "name": "ec42",
    "policy_type": "erasure_coding",
    "ec_type": "liberasurecode_rs_vand",
    "ec_num_data_fragments": "4",
    "ec_num_parity_fragments": "2",
}
_EC21 = {
    **_EC42,
    "name": "ec21",
    "ec_type": "isa_l_rs_vand",
    "ec_num_data_fragments": "2",
    "ec_num_parity_fragments": "1",
}

LAYOUTS: Mapping[str, Layout] = {
    "single": Layout(1, 1, ({"name": "single"},)),
    "replicated": Layout(3, 4, (_REPLICATED,)),
    "ec": Layout(3, 6, (_EC42,)),
    "mixed": Layout(3, 6, (_EC42, _REPLICATED, _EC21)),
}


def object_names(count: int) -> tuple[str, ...]:
    """Names of the object servers: ``object``, ``object-2``, …"""
    return "object", *(f"object-{n}" for n in range(2, count + 1))


def server_kind(name: str) -> str:
    """``object`` for ``object-2``."""
    return name.partition("-")[0]


FILES = (
    "swift.conf",
    "proxy-server.conf",
    "account-server.conf",
    "container-server.conf",
    "object-server.conf",
)
"""Names of Swift's configuration files."""


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of one start of a cluster.

    The layout is fixed at the directory's first start; everything else may
    differ from start to start.
    """

    processes: bool = False
    """Separate server processes instead of all four apps in one."""
    worker: bool = True
    """Start and supervise hapi-worker."""
    hapi_filter: bool = True
    """Put the hapi filter into the proxy's pipeline."""
    host: str = "127.0.0.1"
    """Address of the proxy; the other servers listen on loopback."""
    port: int | None = None
    """Port of the proxy; None: the last start's if free, else a free one."""
    layout: str | None = None
    """Name in LAYOUTS; None: the directory's layout, ``single`` if new."""
    object_servers: int = 1
    """Object servers, among which the devices are dealt out; at most as many
    as the layout has devices."""
    object_workers: int = 0
    """The first of them that have the filter hapi_object and a worker of
    their own; the others have neither.  A single object server shares the
    proxy's worker, as on one host."""
    encryption: bool = False
    """Encrypt object data at rest (keymaster and encryption filters)."""
    keystone_url: str | None = None
    """URL of a Keystone (``http://…/v3``) that validates tokens instead of
    tempauth.  Its service user is set by ``swift_options``, in
    ``filter:authtoken``.  Needs keystonemiddleware."""
    worker_options: Mapping[str, str] = field(default_factory=dict)
    """Additional options of ``[hapi-worker]``."""
    filter_options: Mapping[str, str] = field(default_factory=dict)
    """Additional options of ``[filter:hapi]``."""
    object_options: Mapping[str, str] = field(default_factory=dict)
    """Additional options of ``[filter:hapi_object]``."""
    swift_options: Mapping[str, Mapping[str, Mapping[str, str]]] = field(
        default_factory=dict
    )
    """Additional options of Swift's files: ``{"swift.conf": {section: {}}}``.
    """
    worker_command: tuple[str, ...] | None = None
    """Command instead of ``python -m hapi_worker.main``; ``--config FILE``
    is appended."""
    start_seconds: float = DEFAULT_START_SECONDS
    """Deadline for all servers to answer, in seconds."""
    stop_seconds: float = DEFAULT_STOP_SECONDS
    """Time between SIGTERM and SIGKILL when stopping, in seconds."""

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout not in LAYOUTS:
            raise SettingsError(
                f"unknown layout {self.layout!r}.",
                f"Choose one of {', '.join(sorted(LAYOUTS))}.",
            )
        if self.port is not None and not 1 <= self.port <= 65535:
            raise SettingsError(
                f"port {self.port} is out of range.",
                "Choose 1024 to 65535, or omit it for a free one.",
            )
        servers, workers = self.object_servers, self.object_workers
        if not 1 <= servers <= MAX_OBJECT_SERVERS:
            raise SettingsError(
                f"object_servers is {servers}.",
                f"Choose 1 to {MAX_OBJECT_SERVERS}.",
            )
        if not 0 <= workers <= servers:
            raise SettingsError(
                f"object_workers is {workers}, of {servers} object servers.",
                f"Choose 0 to {servers}, or more object servers.",
            )
        for name in ("start_seconds", "stop_seconds"):
            if getattr(self, name) <= 0:
                raise SettingsError(
                    f"{name} is {getattr(self, name)}.",
                    "Choose a number of seconds above 0.",
                )
        self._check_options("worker_options", self.worker_options)
        self._check_options("filter_options", self.filter_options)
        self._check_options("object_options", self.object_options)
        for file, sections in self.swift_options.items():
            self._check_file(file, sections)

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of all servers but the proxy."""
        return "account", "container", *object_names(self.object_servers)

    @property
    def has_object_processes(self) -> bool:
        """Object servers run in processes of their own."""
        return (
            self.processes
            or self.object_servers > 1
            or self.object_workers > 0
        )

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Names of all workers: of the proxy, and of object servers."""
        own = ("worker",) if self.worker else ()
        if self.shares_worker:
            return own
        names = object_names(self.object_servers)[: self.object_workers]
        return *own, *(f"{name}-worker" for name in names)

    @property
    def shares_worker(self) -> bool:
        """The only object server uses the proxy's worker."""
        return self.worker and self.object_servers == self.object_workers == 1

    @classmethod
    def _check_file(
        cls, file: str, sections: Mapping[str, Mapping[str, str]]
    ) -> None:
        if file not in FILES:
            raise SettingsError(
                f"swift_options has the file {file!r}.",
                f"Choose one of {', '.join(FILES)}.",
            )
        for section, options in sections.items():
            if not section or set(section) & set("[]\r\n"):
                raise SettingsError(
                    f"swift_options[{file!r}] has the section {section!r}.",
                    "Give the section's name without [ and ].",
                )
            cls._check_options(f"swift_options[{file!r}]", options)

    @staticmethod
    def _check_options(name: str, options: Mapping[str, str]) -> None:
        for key, value in options.items():
            if not key or any(c in key for c in "=:[]#;\r\n \t"):
                raise SettingsError(
                    f"{name} has the key {key!r}.",
                    "A key is one word, as in an INI file.",
                )
            if not isinstance(value, str) or set(value) & set("\r\n"):
                raise SettingsError(
                    f"{name}[{key!r}] is {value!r}.",
                    "A value is a string on one line.",
                )
