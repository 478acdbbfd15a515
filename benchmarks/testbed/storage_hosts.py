"""Hosts of a Swift whose object servers compute, set up from the samples.

Each host has a network namespace on one bridge, configuration and servers of
its own.  Four have an object server, two devices and a worker; two have a
proxy, the first one also the account and container servers and a worker.
All of it is made inside the namespaces of :func:`enter`, with which the
kernel removes it, whatever ends this process.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swift.common.ring import RingBuilder

from benchmarks.testbed.network import (
    Namespace,
    missing_requirements,
    run,
    veth,
)
from benchmarks.testbed.two_tiers import ROOT, TestbedError
from hapi_cluster.configs import USERS
from hapi_cluster.probes import answers
from hapi_cluster.settings import LAYOUTS

ENTERED = "HAPI_CHAOS_ENTERED"
FOLDER = Path("/dev/shm")
"""Folder of all files, a file system of our mount namespace."""
STORAGE, PROXIES = ("o1", "o2", "o3", "o4"), ("p1", "p2")
DEVICES = ("d1", "d2")
PLACES = {"p1": "object, proxy", "p2": "object"}
PORTS = {"object": 6200, "container": 6201, "account": 6202, "proxy": 8080}
REPLICATED, CODED = "replicated", "ec21"
REPLICAS, PART_POWER = 3, 5
DAEMONS = ("replicator", "reconstructor", "updater", "auditor")
SUBNET, DEVICE_SIZE = "10.213.78", "128m"
START_SECONDS, DAEMON_SECONDS, POLL_SECONDS = 120.0, 180.0, 0.1
WORKER = {"device": "cpu", "memory_limit": "512MiB"}
_TIMESTAMP_CHARACTERS = 16
_PROGRAM = """\
#!{python}
import os, sys
from swift.common.utils import set_swift_dir
# Before the storage policies are imported, which are read only once.
set_swift_dir(os.path.dirname(sys.argv[1]))
from {module} import main
sys.exit(main())
"""
_MODULES = {
    **{f"{kind}-server": f"swift.{kind}.server" for kind in PORTS},
    "object-server": "swift.obj.server",
    **{f"object-{name}": f"swift.obj.{name}" for name in DAEMONS},
}


def enter(argv: Sequence[str]) -> None:
    """Runs this program again, in namespaces and with a fresh ``FOLDER``.

    It is the first process of a PID namespace: what it starts ends with it.
    """
    if ENTERED not in os.environ:
        if missing := missing_requirements():
            raise TestbedError(f"namespaces need {', '.join(missing)}")
        paths = [os.path.abspath(path) for path in sys.path]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), ENTERED: "yes"}
        kinds = ("--net", "--mount", "--pid", "--fork", "--mount-proc")
        own = (sys.executable, "-m", "benchmarks", "object_chaos", *argv)
        os.execvp("unshare", ["unshare", *kinds, "--kill-child", *own])
    run(["mount", "-t", "tmpfs", "chaos", str(FOLDER)])
    run(["ip", "link", "add", "hosts", "type", "bridge"])
    run(["ip", "address", "add", f"{SUBNET}.254/24", "dev", "hosts"])
    run(["ip", "link", "set", "hosts", "up"])


class Server:
    """A process in a session of its own.

    Args:
        argv: its command.
        log: file for its output.
        answers: returns True if it serves.
    """

    def __init__(
        self, argv: Sequence[str], log: Path, answers: Callable[[], bool]
    ) -> None:
        self._argv, self._log, self._answers = argv, log, answers
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Its number while it runs."""
        return None if self._process.poll() is not None else self._process.pid

    def signal(self, number: int) -> None:
        """Signals the process and those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self, number: int, *, group: bool = True) -> None:
        """Ends the process by a signal, or only the first of its group."""
        if group:
            self.signal(number)
        else:
            self._process.send_signal(number)
        self._process.wait(START_SECONDS)

    def await_answer(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.pid is None or time.monotonic() > deadline:
                raise TestbedError(f"{self._argv} does not serve: {self._log}")
            time.sleep(POLL_SECONDS)


class Host:
    """A host with its namespace, configuration, devices and servers."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = name, f"{SUBNET}.{number}"
        self.folder, self.etc = FOLDER / name, FOLDER / name / "etc"
        self.namespace = Namespace()
        self.servers: dict[str, Server] = {}
        self.etc.mkdir(parents=True)
        (self.folder / "cache").mkdir()
        run(veth(f"to-{name}", "eth0", str(self.namespace.pid)))
        run(["ip", "link", "set", f"to-{name}", "master", "hosts", "up"])
        place = ["address", "add", f"{self.address}/24", "dev", "eth0"]
        self.namespace.run(["ip", *place])
        self.namespace.run(["ip", "link", "set", "eth0", "up"])
        for device in DEVICES:
            disk = self.folder / "disks" / device
            disk.mkdir(parents=True)
            self.device(device).mkdir(parents=True)
            size = f"size={DEVICE_SIZE}"
            run(["mount", "-t", "tmpfs", "-o", size, "chaos", str(disk)])
            self.mount(device)

    def device(self, name: str) -> Path:
        return self.folder / "node" / name

    def mount(self, device: str) -> None:
        disk = self.folder / "disks" / device
        run(["mount", "--bind", str(disk), str(self.device(device))])

    def unmount(self, device: str) -> None:
        run(["umount", "-l", str(self.device(device))])

    def configure(
        self,
        name: str,
        sections: Mapping[str, Mapping[str, str]],
        without: Sequence[str] = (),
    ) -> Path:
        """Writes a configuration: the sample, if any, with more options."""
        parser = configparser.RawConfigParser(
            delimiters=("=",), default_section=""
        )
        parser.read(ROOT / "deploy" / f"{name}-sample")
        parser.read_dict(sections)
        if parser.has_section("pipeline:main"):
            main = parser["pipeline:main"]
            *filters, app = main["pipeline"].split()
            filters = [key for key in filters if key not in without]
            main["pipeline"] = " ".join([*filters, app])
            uses = {f"filter:{key}": key for key in filters}
            uses[f"app:{app}"] = app.removesuffix("-server")
            for section, options in uses.items():
                if not parser.has_section(section):
                    parser.add_section(section)
                if not {"use", "paste.filter_factory"} & {*parser[section]}:
                    program = f"egg:swift#{options.replace('-', '_')}"
                    parser[section]["use"] = program
        path = self.etc / name
        with path.open("w") as out:
            parser.write(out)
        return path


class StorageHosts:
    """The hosts, serving until :meth:`stop`.

    ``with_filter`` is False after :meth:`remove_filter`.
    """

    def __init__(self) -> None:
        self.with_filter = True
        self.keys = [secrets.token_urlsafe(48)]
        self.logs = FOLDER / "logs"
        self._suffix = secrets.token_hex(8)
        key = base64.urlsafe_b64encode(secrets.token_bytes(32))
        self._fernet_key = key.decode()
        self.logs.mkdir()
        (FOLDER / "bin").mkdir()
        for name, module in _MODULES.items():
            program = FOLDER / "bin" / f"swift-{name}"
            text = _PROGRAM.format(python=sys.executable, module=module)
            program.write_text(text)
            program.chmod(0o700)
        self.hosts = {
            name: Host(name, number)
            for number, name in enumerate((*STORAGE, *PROXIES), 1)
        }
        self._rings = self._new_rings()
        self.rebalance({})
        self.write_keys()
        for host in self.hosts.values():
            self._start(host)
        for server in self.servers.values():
            server.await_answer()

    def remove_filter(self) -> None:
        """Makes it the same Swift without filters and workers."""
        self.with_filter = False
        for host in self.hosts.values():
            if worker := host.servers.pop("worker", None):
                worker.end(signal.SIGTERM)
            for kind in set(host.servers) & {"object", "proxy"}:
                host.servers[kind].end(signal.SIGTERM)
                self._start_swift(host, kind)
                host.servers[kind].await_answer()

    def stop(self) -> None:
        """Ends all servers and namespaces."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            for server in self.servers.values():
                server.signal(number)
        for server in self.servers.values():
            server.end(signal.SIGCONT)
        for host in self.hosts.values():
            host.namespace.close()

    @property
    def servers(self) -> dict[str, Server]:
        """All servers by name: ``o1-object``, ``p1-worker`` …"""
        return {
            f"{host.name}-{name}": server
            for host in self.hosts.values()
            for name, server in host.servers.items()
        }

    def url(self, proxy: str) -> str:
        return f"http://{self.hosts[proxy].address}:{PORTS['proxy']}"

    def _start(self, host: Host) -> None:
        policies = {
            policy["name"]: policy for policy in LAYOUTS["mixed"].policies
        }
        chosen = {**policies[REPLICATED], "default": "yes"}, policies[CODED]
        host.configure(
            "swift.conf",
            {
                "swift-hash": {"swift_hash_path_suffix": self._suffix},
                "storage-policy:0": chosen[0],
                "storage-policy:1": chosen[1],
            },
        )
        kinds = ["object"] if host.name in STORAGE else ["proxy"]
        if host.name == PROXIES[0]:
            kinds += ["account", "container"]
        for kind in kinds:
            self._start_swift(host, kind)
        if host.name != PROXIES[-1]:
            socket = host.folder / "worker.sock"
            options = {"socket": str(socket), **WORKER}
            conf = host.configure("hapi-worker.conf", {"hapi-worker": options})
            argv = [sys.executable, "-m", "hapi_worker.main", "--config"]
            admin = Path(f"{socket}.admin")
            host.servers["worker"] = Server(
                host.namespace.command([*argv, str(conf)]),
                self.logs / f"{host.name}-worker.log",
                lambda: answers(admin, "/healthz"),
            )

    def _start_swift(self, host: Host, kind: str) -> None:
        sections = {
            "DEFAULT": {
                "bind_ip": host.address,
                "bind_port": str(PORTS[kind]),
                # The least with which a server can be reloaded.
                "workers": "1",
                "user": "root",
                "swift_dir": str(host.etc),
                "devices": str(host.folder / "node"),
                "recon_cache_path": str(host.folder / "cache"),
                "log_custom_handlers": "hapi_cluster.logs.to_stderr",
            }
        }
        hapi = {
            "worker_socket": str(host.folder / "worker.sock"),
            "backend_key_file": str(host.etc / "hapi-backend.key"),
        }
        if kind == "proxy":
            hapi["places"] = PLACES[host.name]
            sections |= {"filter:hapi": hapi, **self._proxy()}
        elif kind == "object":
            sections |= {f"object-{daemon}": {} for daemon in DAEMONS}
            # There is no rsync daemon.
            sections["object-replicator"] = {"sync_method": "ssync"}
            sections["filter:hapi_object"] = hapi
        else:
            own = {"pipeline": f"healthcheck recon {kind}-server"}
            sections["pipeline:main"] = own
        without = () if self.with_filter else ("hapi", "hapi_object")
        conf = host.configure(f"{kind}-server.conf", sections, without)
        program = FOLDER / "bin" / f"swift-{kind}-server"
        address = host.address, PORTS[kind]
        host.servers[kind] = Server(
            host.namespace.command([str(program), str(conf), "--verbose"]),
            self.logs / f"{host.name}-{kind}.log",
            lambda: answers(address, "/healthcheck"),
        )

    def _proxy(self) -> dict[str, dict[str, str]]:
        users = {
            f"user_{name.replace(':', '_')}": " ".join(facts)
            for name, facts in USERS.items()
        }
        cache = "hapi_cluster.memory_cache:filter_factory"
        return {
            "app:proxy-server": {"account_autocreate": "true"},
            # Its logger takes no custom handler; this is the discard port.
            "filter:proxy-logging": {
                "access_log_udp_host": "127.0.0.1",
                "access_log_udp_port": "9",
            },
            "filter:cache": {"paste.filter_factory": cache},
            "filter:tempauth": {
                "fernet_key_all": self._fernet_key,
                "active_fernet_key_id": "all",
                **users,
            },
        }

    def write_keys(self) -> None:
        """Writes the backend keys, one a line, on all hosts."""
        for host in self.hosts.values():
            path = host.etc / "hapi-backend.key"
            path.touch(0o600)
            path.write_text("\n".join(self.keys) + "\n")

    def reload(self) -> None:
        """Reloads object servers and proxies, all at the same time."""
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            list(pool.map(self._reload, self.hosts.values()))

    def _reload(self, host: Host) -> None:
        kind = "object" if host.name in STORAGE else "proxy"
        words = ["-m", "swift.cli.reload", str(host.servers[kind].pid)]
        command = host.namespace.command([sys.executable, *words])
        with (self.logs / f"{host.name}-reload.log").open("ab") as log:
            subprocess.run(
                command,
                check=True,
                stdout=log,
                stderr=log,
                timeout=START_SECONDS,
            )

    # -- rings, daemons, replicas -----------------------------------------

    def _new_rings(self) -> dict[str, RingBuilder]:
        rings = {}
        first = self.hosts[PROXIES[0]]
        for name in ("account", "container", "object", "object-1"):
            kind = name.partition("-")[0]
            is_object = kind == "object"
            hosts = [self.hosts[server] for server in STORAGE]
            ring = RingBuilder(PART_POWER, REPLICAS if is_object else 1, 0)
            for number, host in enumerate(hosts if is_object else [first]):
                for device in DEVICES:
                    place = {"region": 1, "zone": number, "device": device}
                    address = {"ip": host.address, "port": PORTS[kind]}
                    ring.add_dev({**place, **address, "weight": 100.0})
            rings[name] = ring
        return rings

    def rebalance(self, weights: Mapping[int, float]) -> None:
        """Sets weights by device number, and writes new rings everywhere."""
        for name, ring in self._rings.items():
            if name.startswith("object"):
                for number, weight in weights.items():
                    ring.set_dev_weight(number, weight)
            elif weights:
                continue
            ring.rebalance(seed="chaos")
            for host in self.hosts.values():
                # Servers may read it at any time.
                ring.get_ring().save(str(host.etc / "new"))
                (host.etc / "new").rename(host.etc / f"{name}.ring.gz")

    def run_daemon(self, host: Host, name: str) -> None:
        """Runs a daemon once, as ``swift-init object-NAME once`` does."""
        program = FOLDER / "bin" / f"swift-object-{name}"
        conf = str(host.etc / "object-server.conf")
        argv = ["nice", str(program), conf, "once", "--verbose"]
        with (
            (self.logs / f"{host.name}-{name}.log").open("ab") as log,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            subprocess.run(
                host.namespace.command(argv),
                stdout=log,
                stderr=log,
                timeout=DAEMON_SECONDS,
            )

    def replicate(self) -> None:
        """One pass of the daemons of all hosts, but for the auditor."""
        for host in STORAGE:
            for name in ("replicator", "reconstructor", "updater"):
                self.run_daemon(self.hosts[host], name)

    def replicas(self, path: str) -> list[Path]:
        """The newest file of ``account/container/object`` on each device."""
        text = f"/{path}{self._suffix}"
        digest = hashlib.md5(text.encode()).hexdigest()
        return [
            max(folder.glob("*.data"))
            for name in STORAGE
            for folder in (self.hosts[name].folder / "node").glob(
                f"*/objects*/*/{digest[-3:]}/{digest}"
            )
            if [*folder.glob("*.data")]
        ]

    def is_healthy(self, path: str) -> bool:
        """True if all replicas, and no others, have the newest version."""
        names = [replica.name for replica in self.replicas(path)]
        times = {name[:_TIMESTAMP_CHARACTERS] for name in names}
        # Fragments differ in their numbers, replicas do not.
        is_whole = len({*names}) in (1, REPLICAS)
        return len(names) == REPLICAS and len(times) == 1 and is_whole
