"""Another proxy of a running cluster, with other options of the filter."""

from __future__ import annotations

import base64
import configparser
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import requests

from hapi_cluster import Cluster
from hapi_cluster.process_control import die_with
from own_servers import OwnServers
from slow_link import SlowLink
from waiting import until

HOST = "127.0.0.1"


@contextmanager
def second_proxy(
    cluster: Cluster,
    folder: Path,
    filter_options: Mapping[str, str],
    *,
    links: Mapping[int, int] | None = None,
    encrypts: bool = False,
) -> Iterator[str]:
    """Yields the URL of another proxy.

    Args:
        cluster: the cluster.
        folder: for the proxy's configuration and log.
        filter_options: options that its filter has in addition.
        links: ports by which it reaches the object servers' own ports.
        encrypts: encrypt what is stored through it.
    """
    etc = folder / "etc"
    shutil.copytree(cluster.directory / "etc", etc)
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    parser = configparser.RawConfigParser(
        delimiters=("=",), default_section=""
    )
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    path = etc / "proxy-server.conf"
    parser.read(path)
    parser["DEFAULT"].update({"bind_port": str(port), "swift_dir": str(etc)})
    parser["filter:hapi"].update(filter_options)
    if encrypts:
        _encrypt(parser)
    with path.open("w") as file:
        parser.write(file)
    for builder in etc.glob("object*.builder") if links else ():
        _redirect(builder, links or {})
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hapi_cluster.run_servers", etc, "proxy"],
            stdout=log,
            stderr=log,
            cwd="/",
            preexec_fn=die_with(os.getpid()),
        )
    url = f"http://{HOST}:{port}"
    try:
        until(lambda: _answers(url), message=(folder / "proxy.log").read_text)
        yield url
    finally:
        process.terminate()
        process.wait(300)


def _encrypt(parser: configparser.RawConfigParser) -> None:
    secret = base64.b64encode(secrets.token_bytes(32)).decode()
    parser["filter:keymaster"] = {
        "use": "egg:swift#keymaster",
        "encryption_root_secret": secret,
    }
    parser["filter:encryption"] = {"use": "egg:swift#encryption"}
    pipeline = parser["pipeline:main"]["pipeline"].split()
    last = pipeline.index("proxy-logging", pipeline.index("hapi"))
    pipeline[last:last] = ["keymaster", "encryption"]
    parser["pipeline:main"]["pipeline"] = " ".join(pipeline)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/healthcheck", timeout=5).ok
    except requests.ConnectionError:
        return False


def _redirect(builder_path: Path, ports: Mapping[int, int]) -> None:
    from swift.common.ring import RingBuilder

    builder = RingBuilder.load(str(builder_path))
    for device in builder.devs:
        device["port"] = ports[device["port"]]
    builder.get_ring().save(str(builder_path.with_suffix(".ring.gz")))


@contextmanager
def counted_links(
    cluster: Cluster, servers: OwnServers
) -> Iterator[dict[int, SlowLink]]:
    """Yields a link to each object server, by the server's port."""
    ports = [
        port
        for name, port in cluster.status()["ports"].items()
        if name.startswith("object")
    ]
    with ExitStack() as stack:
        links = {}
        for port in ports:
            links[port] = SlowLink((HOST, port), math.inf)
            stack.callback(links[port].close)
        _set_addresses(cluster, servers, links)
        yield links


def _set_addresses(
    cluster: Cluster, servers: OwnServers, links: Mapping[int, SlowLink]
) -> None:
    """Restarts the object servers with the addresses of their links."""
    names = ",".join(f"{HOST}:{link.port}" for link in links.values())
    section = "[filter:hapi_object]\n"
    for path in (cluster.directory / "etc").glob("object*-server.conf"):
        text = path.read_text()
        if section in text:
            addresses = f"{section}addresses = {names}\n"
            path.write_text(text.replace(section, addresses))
            servers.restart(path.name.removesuffix("-server.conf"))
