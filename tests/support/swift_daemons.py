"""Runs Swift's daemons for an embedded cluster, which starts none."""

from __future__ import annotations

import configparser
import importlib
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from hapi_cluster import Cluster
from waiting import SECONDS

MODULES: Mapping[str, str] = {
    "account-reaper": "swift.account.reaper",
    "container-sharder": "swift.container.sharder",
    "container-updater": "swift.container.updater",
    "object-expirer": "swift.obj.expirer",
}
_INTERNAL_CLIENT: Mapping[str, Mapping[str, str]] = {
    "pipeline:main": {"pipeline": "catch_errors proxy-server"},
    "app:proxy-server": {
        "use": "egg:swift#proxy",
        "account_autocreate": "true",
    },
    "filter:catch_errors": {"use": "egg:swift#catch_errors"},
}


def run_once(
    cluster: Cluster, daemon: str, options: Mapping[str, str] | None = None
) -> str:
    """Runs a daemon once, as ``swift-init DAEMON once`` does.

    Args:
        cluster: a running cluster.
        daemon: a key of :data:`MODULES`.
        options: options of its section.

    Returns:
        Its log.
    """
    etc = Path(cluster.directory) / "etc"
    conf = etc / f"{daemon}.conf"
    server_conf = etc / f"{daemon.partition('-')[0]}-server.conf"
    _write(conf, server_conf, options or {})
    return _run(__file__, str(conf), MODULES[daemon])


def order_shards(
    cluster: Cluster, account: str, container: str, rows: int
) -> None:
    """Orders the sharding of a container, as an operator does.

    Args:
        cluster: a running cluster.
        account: account of the container.
        container: name of the container.
        rows: number of rows per shard.
    """
    _run(
        "-m",
        "swift.cli.manage_shard_ranges",
        str(_database(cluster, account, container)),
        "find_and_replace",
        str(rows),
        "--enable",
    )


def _database(cluster: Cluster, account: str, container: str) -> Path:
    query = "SELECT account, container FROM container_info"
    for path in Path(cluster.directory).glob("srv/*/containers/**/*.db"):
        with closing(sqlite3.connect(path)) as found:
            if found.execute(query).fetchone() == (account, container):
                return path
    raise LookupError(f"no database of {account}/{container}")


def _run(*words: str) -> str:
    ran = subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def _write(conf: Path, server_conf: Path, options: Mapping[str, str]) -> None:
    """Writes the server's defaults and the daemon's internal client."""
    server, made = (
        configparser.RawConfigParser(delimiters=("=",), default_section="")
        for _ in range(2)
    )
    server.read(server_conf)
    ours = {
        "internal_client_conf_path": str(conf),
        "recon_cache_path": str(conf.parent),
        **options,
    }
    sections = {"DEFAULT": dict(server["DEFAULT"]), conf.stem: ours}
    made.read_dict({**sections, **_INTERNAL_CLIENT})
    with conf.open("w") as out:
        made.write(out)


def main(conf: str, module: str) -> None:
    # The import of the daemon's module reads the policies.
    from swift.common import utils

    utils.set_swift_dir(str(Path(conf).parent))
    sys.argv = [module, conf, "once", "--verbose"]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main(*sys.argv[1:])
