"""``hapi-worker``: the command."""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from hapi_worker.config import WorkerConfig, load_config
from hapi_worker.version import package_version

TICK_SECONDS = 1.0
EXIT_USAGE = 2
EXIT_CANNOT_START = 1

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``hapi-worker``; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        config = load_config(options.config)
    except ValueError as error:
        print(f"hapi-worker: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.check:
        print(f"{options.config}: no errors")
        return 0
    logging.basicConfig(
        level=config.log_level,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    return _serve(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hapi-worker",
        description="Runs the pushed-down layers of models next to the "
        "data: listens on a unix socket for the hapi filter of a Swift "
        "proxy on the same host.",
        epilog="SIGTERM and SIGINT: refuse new jobs, let running ones end "
        "for drain_seconds, exit 0.",
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="INI file with a section [hapi-worker]; every option is "
        "explained in hapi-worker.conf-sample",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="read the configuration, say whether it is right, and exit",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"hapi-worker {package_version()}",
    )
    return parser


def _serve(config: WorkerConfig) -> int:
    # torch takes seconds to load, which --help and --check need not wait.
    from hapi_worker.server import SocketInUseError
    from hapi_worker.service import Service

    signals = _catch_signals()
    try:
        service = Service(config)
        service.begin()
    except (SocketInUseError, OSError, ValueError) as error:
        logger.error("cannot start: %s", error)
        return EXIT_CANNOT_START
    logger.info(
        "version %s on %s, listening at %s",
        package_version(),
        service.worker.device,
        config.socket,
    )
    notify_systemd("READY=1")
    while not select.select([signals], [], [], TICK_SECONDS)[0]:
        service.worker.admission.drop_lapsed()
    notify_systemd("STOPPING=1")
    logger.info("draining for at most %g s", config.drain_seconds)
    if not service.drain():
        logger.warning("jobs still run after the drain; they are broken off")
    service.end()
    return 0


def _catch_signals() -> socket.socket:
    """A socket that becomes readable at SIGTERM or SIGINT."""
    readable, writable = socket.socketpair()
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach())
    for number in (signal.SIGTERM, signal.SIGINT):
        # The handler itself does nothing: it would run in the middle of
        # whatever the main thread holds.
        signal.signal(number, lambda number, frame: None)
    return readable


def notify_systemd(state: str) -> None:
    """Tells systemd, if it started us (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.connect(address)
            notifier.sendall(state.encode())
    except OSError as error:
        logger.warning("cannot notify systemd: %s", error)


if __name__ == "__main__":
    sys.exit(main())
