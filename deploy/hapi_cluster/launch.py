"""Turns settings into ports, files and processes of a cluster."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi_cluster.configs import (
    BACKEND_HOST,
    Deployment,
    Secrets,
    render_all,
)
from hapi_cluster.errors import SettingsError, SocketPathError, StartError
from hapi_cluster.logs import tail
from hapi_cluster.paths import ClusterPaths, read_state, write_private
from hapi_cluster.ports import port_of, reserve, reserve_preferred
from hapi_cluster.preflight import check_xattrs
from hapi_cluster.probes import answers
from hapi_cluster.settings import (
    LAYOUTS,
    ClusterSettings,
    object_names,
)

MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) without the terminating zero byte."""
WORKER_SOCKET = "worker.sock"
KEPT_SETTINGS = (
    "host",
    "processes",
    "hapi_filter",
    "worker",
    "encryption",
    "worker_options",
    "filter_options",
    "object_servers",
    "object_workers",
    "object_options",
)
"""Settings in ``cluster.json``: ``hapi cluster start`` uses them again."""
RINGS_SECONDS = 60.0
"""A deadline only: rings of 64 partitions are built in a moment."""
TEMPORARY_PREFIX = "hapi-run-"
RUN_MARK = "directory"
"""File in a temporary folder that names the folder that it stands for."""


@dataclass(frozen=True)
class ServerSpec:
    """Specification of a server process.

    Attributes:
        name: name in status and logs.
        argv: command line.
        log: file for stdout and stderr.
        answers: returns True if the process serves requests.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    answers: Callable[[], bool]


@contextlib.contextmanager
def prepared(
    paths: ClusterPaths, settings: ClusterSettings
) -> Iterator[tuple[dict[str, Any], list[ServerSpec]]]:
    """Reserves the ports and writes the files of a start.

    At the end the ports are released and the workers' sockets removed.

    Yields:
        Contents of ``cluster.json``, and the servers in the order of their
        start.

    Raises:
        ClusterError: the settings do not suit the directory or the machine.
    """
    last = read_state(paths.state)
    layout = choose_layout(settings, last.get("layout"))
    with contextlib.ExitStack() as stack:
        ports = {}
        reservations = reserve_ports(settings, last.get("ports", {}))
        for name, reservation in reservations.items():
            ports[name] = port_of(reservation)
            stack.callback(reservation.close)
        for folder in (paths.etc, paths.logs, paths.devices):
            folder.mkdir(mode=0o700, exist_ok=True)
        run = stack.enter_context(_run_folder(paths, last.get("run")))
        sockets = worker_sockets(settings, run)
        deployment = Deployment(
            settings=settings,
            layout=layout,
            secrets=_load_secrets(paths.secrets),
            ports=ports,
            user=_user_name(),
            paths=paths,
            worker_sockets=sockets,
        )
        _write_files(deployment)
        host = reachable(settings.host)
        netloc = f"[{host}]" if ":" in host else host
        state = {
            "status": "starting",
            "layout": layout,
            "proxy_url": f"http://{netloc}:{ports['proxy']}",
            "ports": ports,
            **{name: getattr(settings, name) for name in KEPT_SETTINGS},
            "run": str(run),
            "worker_socket": (
                str(sockets["worker"]) if settings.worker else None
            ),
            "stop_seconds": settings.stop_seconds,
            "warnings": check_xattrs(paths.directory),
            "children": {},
        }
        yield state, _server_specs(deployment)


def make_rings(paths: ClusterPaths) -> None:
    """Makes the rings of servers that run in processes of their own."""
    log = paths.log("rings")
    with log.open("ab") as out:
        done = subprocess.run(
            [sys.executable, "-m", "hapi_cluster.rings", str(paths.etc)],
            stdout=out,
            stderr=out,
            timeout=RINGS_SECONDS,
        )
    if done.returncode != 0:
        raise StartError(
            f"the ring builder failed. The end of {log}:\n{tail(log)}",
            f"Read {log}, then start again.",
        )


def reserve_ports(
    settings: ClusterSettings, last: Mapping[str, int]
) -> dict[str, socket.socket]:
    """Reserves the servers' ports, those of the last start if still free."""
    if settings.port is None:
        proxy = reserve_preferred(settings.host, last.get("proxy", 0))
    else:
        proxy = reserve(settings.host, settings.port)
    reservations = {"proxy": proxy}
    for server in settings.backends:
        reservations[server] = reserve_preferred(
            BACKEND_HOST, last.get(server, 0)
        )
    return reservations


def choose_layout(settings: ClusterSettings, last: str | None) -> str:
    """The layout of the directory.

    Raises:
        SettingsError: the settings ask for another layout.
    """
    layout = last or settings.layout or "single"
    if settings.layout not in (None, layout):
        raise SettingsError(
            f"this cluster's layout is {last!r}, not {settings.layout!r}.",
            "Omit the layout, or start in a new directory.",
        )
    devices = LAYOUTS[layout].devices
    if settings.object_servers > devices:
        raise SettingsError(
            f"layout {layout!r} has {devices} devices for "
            f"{settings.object_servers} object servers.",
            "Choose fewer object servers, or another layout.",
        )
    return layout


@contextlib.contextmanager
def _run_folder(paths: ClusterPaths, last: str | None) -> Iterator[Path]:
    """A new folder for sockets, temporary if the cluster's path is too long.

    Args:
        paths: paths of the cluster.
        last: folder of the last start, removed if that was killed and it is
            this directory's, which a copied directory's is not.

    Raises:
        SocketPathError: both paths are too long.
    """
    run = paths.run
    for stale in (run, Path(last or run)):
        if stale.exists() and (stale == run or _is_marked(stale, run)):
            shutil.rmtree(stale)
    if _fits(run):
        run.mkdir(mode=0o700)
    else:
        run = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
        (run / RUN_MARK).write_bytes(os.fsencode(paths.run))
    try:
        if not _fits(run):
            raise SocketPathError(
                f"{run / WORKER_SOCKET} is too long for a unix socket"
                f" ({MAX_SOCKET_PATH_BYTES} bytes).",
                "Choose a directory with a shorter path, or set TMPDIR to"
                " one.",
            )
        yield run
    finally:
        shutil.rmtree(run)


def _is_marked(folder: Path, run: Path) -> bool:
    """Returns True for a temporary folder in place of ``run``."""
    mark = folder / RUN_MARK
    return (
        folder.name.startswith(TEMPORARY_PREFIX)
        and mark.is_file()
        and mark.read_bytes() == os.fsencode(run)
    )


def _fits(run: Path) -> bool:
    name = os.fsencode(admin_socket(run / WORKER_SOCKET))
    return len(name) <= MAX_SOCKET_PATH_BYTES


def worker_sockets(settings: ClusterSettings, run: Path) -> dict[str, Path]:
    """Sockets of all workers, by name; always with the proxy's ``worker``."""
    names = [name for name in settings.worker_names if name != "worker"]
    return {
        "worker": run / WORKER_SOCKET,
        # Shorter than the first one, because paths are limited.
        **{name: run / f"o{n}.sock" for n, name in enumerate(names, 1)},
    }


def _load_secrets(path: Path) -> Secrets:
    """Reads the cluster's secrets; creates them on its first start."""
    if path.exists():
        return Secrets(**json.loads(path.read_text()))
    fresh = Secrets(
        hash_suffix=secrets.token_hex(16),
        fernet_key=base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        encryption_root=base64.b64encode(secrets.token_bytes(32)).decode(),
    )
    write_private(path, json.dumps(vars(fresh), indent=2) + "\n")
    return fresh


def _write_files(deployment: Deployment) -> None:
    """Creates the device folders and writes the configuration files."""
    paths = deployment.paths
    if not paths.backend_key.exists():
        write_private(paths.backend_key, secrets.token_urlsafe(48) + "\n")
    for number in range(LAYOUTS[deployment.layout].devices):
        folder = paths.devices / f"d{number + 1}"
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in render_all(deployment).items():
        write_private(paths.etc / name, text)


def _user_name() -> str:
    # Swift's servers drop privileges to a user by name.
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError as error:
        raise SettingsError(
            f"user id {uid} has no name on this machine, and Swift needs it.",
            "Add it to /etc/passwd, or run as a user that has a name.",
        ) from error


def _server_specs(deployment: Deployment) -> list[ServerSpec]:
    """The processes to run, in the order of their start."""
    settings = deployment.settings
    servers = (*settings.backends, "proxy")
    alone: tuple[str, ...] = ()
    if settings.processes:
        alone = servers
    elif settings.has_object_processes:
        alone = object_names(settings.object_servers)
    together = tuple(name for name in servers if name not in alone)
    return [
        *([_servers(deployment, "swift", together)] if together else []),
        *(_servers(deployment, name, (name,)) for name in alone),
        *(_worker(deployment, name) for name in settings.worker_names),
    ]


def _servers(
    deployment: Deployment, name: str, servers: tuple[str, ...]
) -> ServerSpec:
    host = reachable(deployment.settings.host)
    addresses = [
        (host if s == "proxy" else BACKEND_HOST, deployment.ports[s])
        for s in servers
    ]
    paths, module = deployment.paths, "hapi_cluster.run_servers"
    return ServerSpec(
        name,
        (sys.executable, "-m", module, str(paths.etc), *servers),
        paths.log(name),
        lambda: all(answers(a, "/healthcheck") for a in addresses),
    )


def reachable(host: str) -> str:
    """An address that leads to a server listening on ``host``."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return loopback.get(host, host)


def _worker(deployment: Deployment, name: str) -> ServerSpec:
    python = (sys.executable, "-m", "hapi_worker.main")
    command = deployment.settings.worker_command or python
    admin = admin_socket(deployment.worker_sockets[name])
    return ServerSpec(
        name,
        (*command, "--config", str(deployment.paths.worker_config(name))),
        deployment.paths.log(name),
        lambda: answers(admin, "/healthz"),
    )


def admin_socket(worker_socket: Path) -> Path:
    """Path of the worker's admin socket, which answers even when busy."""
    return Path(f"{worker_socket}.admin")
