"""Additional proxy servers in front of an embedded Swift.

Each is a ``swift-proxy-server`` with its own configuration, port and log, and
with the rings, data, users and worker of the cluster.  It can be reloaded as
operators do it, and ends with the process that started it.
"""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hapi_cluster.configs import BACKEND_HOST
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.ports import port_of, reserve_preferred
from hapi_cluster.probes import answers
from hapi_cluster.process_control import die_with

START_SECONDS = 30.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.02

Changes = Mapping[str, Mapping[str, str]]
Start = Callable[..., "subprocess.Popen[bytes]"]

_SCRIPT = """\
#!{python}
import os
import sys

sys.path[:] = {path!r}

from hapi_cluster.process_control import die_with
from swift.common.utils import set_swift_dir

# Its workers must not outlive a manager that is killed.
os.register_at_fork(after_in_child=die_with(os.getpid()))
# Before the storage policies are imported, which are read only once.
set_swift_dir({etc!r})
{prepare}

from swift.proxy.server import main

sys.exit(main())
"""


def _start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
        **options,
    )


class SideProxy:
    """A proxy server that runs for the length of a ``with`` block.

    Args:
        directory: of the running cluster.
        folder: new folder for configuration, script and log.
        changes: options of the proxy's configuration by section.
        without: filters that are removed from its pipeline.
        prepare: Python that it runs before it starts.
        start: starts a command, as ``subprocess.Popen`` does.
    """

    def __init__(
        self,
        directory: Path,
        folder: Path,
        changes: Changes | None = None,
        *,
        without: Sequence[str] = (),
        prepare: str = "",
        start: Start = _start,
    ) -> None:
        self._paths = ClusterPaths(directory)
        self._port = reserve_preferred(BACKEND_HOST, 0)
        self._without = without
        self._config = folder / "proxy-server.conf"
        # swift-reload recognises a server by its name, in a folder "bin".
        self._script = folder / "bin" / "swift-proxy-server"
        self.log = folder / "proxy.log"
        self.address = (BACKEND_HOST, port_of(self._port))
        self.url = f"http://{BACKEND_HOST}:{port_of(self._port)}"
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._script.parent.mkdir(parents=True)
        self._script.write_text(
            _SCRIPT.format(
                python=sys.executable,
                path=[entry or os.getcwd() for entry in sys.path],
                etc=str(self._paths.etc),
                prepare=prepare,
            )
        )
        self._script.chmod(0o700)
        self.configure(changes or {})

    def configure(self, changes: Changes) -> None:
        """Writes the configuration for the next start or reload.

        Args:
            changes: to the cluster's own configuration of its proxy.
        """
        parser = configparser.RawConfigParser(
            delimiters=("=",), default_section=""
        )
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read(self._paths.server_config("proxy"))
        parser["DEFAULT"]["bind_port"] = str(port_of(self._port))
        main = parser["pipeline:main"]
        names = main["pipeline"].split()
        main["pipeline"] = " ".join(
            name for name in names if name not in self._without
        )
        for section, options in changes.items():
            parser[section].update(options)
        with self._config.open("w") as out:
            parser.write(out)

    @property
    def pid(self) -> int:
        """Process number of the manager; with ``workers = 0`` the only one."""
        assert self._process is not None
        return self._process.pid

    def workers(self) -> set[int]:
        """Numbers of the processes that the manager has forked."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return set(map(int, path.read_text().split()))

    def reload(self) -> None:
        """Runs ``swift-reload``; returns when the new workers serve.

        Raises:
            ValueError: with its output, if it fails or takes too long.
        """
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "swift.cli.reload",
                f"--timeout={START_SECONDS:g}",
                str(self.pid),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=2 * START_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise ValueError(
                f"swift-reload ended with status {done.returncode}:\n"
                f"{done.stdout.decode()}"
            )

    def __enter__(self) -> SideProxy:
        with self.log.open("ab") as log:
            self._process = self._start(
                [str(self._script), str(self._config), "--verbose"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while not answers(self.address, "/healthcheck"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise ValueError(
                    f"a proxy did not start:\n{self.log.read_text()}"
                )
            time.sleep(POLL_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)
        self._port.close()
