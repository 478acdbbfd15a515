"""Turns settings into ports, files and processes of a cluster."""

from __future__ import annotations

import base64
import json
import os
import pwd
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hapi_cluster.configs import (
    BACKEND_HOST,
    Deployment,
    Secrets,
    render_all,
)
from hapi_cluster.errors import SettingsError, SocketPathError
from hapi_cluster.paths import TEMPORARY_PREFIX, ClusterPaths
from hapi_cluster.ports import PortReservation
from hapi_cluster.probes import answers, connects
from hapi_cluster.server_process import ChildSpec
from hapi_cluster.settings import (
    LAYOUTS,
    ClusterSettings,
    object_names,
)
from hapi_cluster.state import write_private

MAX_SOCKET_PATH_BYTES = 107
"""sizeof(sockaddr_un.sun_path) without the terminating zero byte."""
MEMCACHED_MEGABYTES = 64


@dataclass(frozen=True)
class Socket:
    """The worker's socket.

    Attributes:
        path: path of the socket.
        is_temporary: its folder is temporary and removed with it.
    """

    path: Path
    is_temporary: bool


def reserve_ports(
    settings: ClusterSettings, last: Mapping[str, int]
) -> dict[str, PortReservation]:
    """Reserves the servers' ports, those of the last start if still free."""
    if settings.port is None:
        proxy = PortReservation.prefer(settings.host, last.get("proxy", 0))
    else:
        proxy = PortReservation.take(settings.host, settings.port)
    reservations = {"proxy": proxy}
    for server in settings.backends:
        reservations[server] = PortReservation.prefer(
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


def choose_socket(run: Path) -> Socket:
    """A socket in ``run``, or in a temporary folder if its path is too long.

    Raises:
        SocketPathError: both paths are too long.
    """
    path = run / "worker.sock"
    if _fits(path):
        return Socket(path, is_temporary=False)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
    path = folder / "worker.sock"
    if _fits(path):
        return Socket(path, is_temporary=True)
    folder.rmdir()
    raise SocketPathError(
        f"{path} is too long for a unix socket"
        f" ({MAX_SOCKET_PATH_BYTES} bytes).",
        "Choose a directory with a shorter path, or set TMPDIR to one.",
    )


def worker_sockets(settings: ClusterSettings, own: Path) -> dict[str, Path]:
    """Sockets of all workers, by name.

    Args:
        settings: of the start.
        own: socket of the proxy's worker, which may not run.
    """
    names = [each for each in settings.worker_names if each != "worker"]
    return {
        "worker": own,
        **{
            # Shorter than the first one, because paths are limited.
            name: own.with_name(f"o{number}.sock")
            for number, name in enumerate(names, 1)
        },
    }


def _fits(path: Path) -> bool:
    name = os.fsencode(admin_socket(path))
    return len(name) <= MAX_SOCKET_PATH_BYTES


def load_secrets(path: Path) -> Secrets:
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


def write_files(
    paths: ClusterPaths,
    settings: ClusterSettings,
    layout: str,
    ports: Mapping[str, int],
    sockets: Mapping[str, Path],
) -> None:
    """Creates the device folders and writes the configuration files."""
    if not paths.backend_key.exists():
        write_private(paths.backend_key, secrets.token_urlsafe(48) + "\n")
    deployment = Deployment(
        settings=settings,
        layout=layout,
        secrets=load_secrets(paths.secrets),
        ports=ports,
        user=_user_name(),
        etc=paths.etc,
        devices=paths.devices,
        worker_sockets=sockets,
        backend_key=paths.backend_key,
    )
    for number in range(LAYOUTS[layout].devices):
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


def child_specs(
    paths: ClusterPaths,
    settings: ClusterSettings,
    ports: Mapping[str, int],
    sockets: Mapping[str, Path],
) -> list[ChildSpec]:
    """The processes to run, in the order of their start."""
    specs = [_memcached(paths, ports)] if "memcached" in ports else []
    servers = (*settings.backends, "proxy")
    alone: tuple[str, ...] = ()
    if settings.processes:
        alone = servers
    elif settings.has_object_processes:
        alone = object_names(settings.object_servers)
    together = tuple(name for name in servers if name not in alone)
    if together:
        specs.append(_servers(paths, "swift", together, settings, ports))
    specs += [
        _servers(paths, name, (name,), settings, ports) for name in alone
    ]
    specs += [
        _worker(paths, settings, name, sockets[name])
        for name in settings.worker_names
    ]
    return specs


def _servers(
    paths: ClusterPaths,
    name: str,
    servers: tuple[str, ...],
    settings: ClusterSettings,
    ports: Mapping[str, int],
) -> ChildSpec:
    addresses = [
        (reachable(settings.host if s == "proxy" else BACKEND_HOST), ports[s])
        for s in servers
    ]
    module = "hapi_cluster.run_servers"
    return ChildSpec(
        name,
        (sys.executable, "-m", module, str(paths.etc), *servers),
        paths.log(name),
        lambda: all(answers(a, "/healthcheck") for a in addresses),
    )


def reachable(host: str) -> str:
    """An address that leads to a server listening on ``host``."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return loopback.get(host, host)


def _memcached(paths: ClusterPaths, ports: Mapping[str, int]) -> ChildSpec:
    port = ports["memcached"]
    program = shutil.which("memcached")
    assert program is not None
    as_root = ("-u", "root") if os.geteuid() == 0 else ()
    options = ("-U", "0", "-m", str(MEMCACHED_MEGABYTES))
    return ChildSpec(
        "memcached",
        (program, "-l", BACKEND_HOST, "-p", str(port), *options, *as_root),
        paths.log("memcached"),
        lambda: connects((BACKEND_HOST, port)),
    )


def _worker(
    paths: ClusterPaths,
    settings: ClusterSettings,
    name: str,
    worker_socket: Path,
) -> ChildSpec:
    command = settings.worker_command or (
        sys.executable,
        "-m",
        "hapi_worker.main",
    )
    admin = admin_socket(worker_socket)
    return ChildSpec(
        name,
        (*command, "--config", str(paths.worker_config(name))),
        paths.log(name),
        lambda: answers(admin, "/healthz"),
        (worker_socket, admin),
    )


def admin_socket(worker_socket: Path) -> Path:
    """Path of the worker's admin socket, which answers even when busy."""
    return Path(f"{worker_socket}.admin")
