"""``hapi-worker``: the command."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hapi_protocol.printable import LineFormatter
from hapi_worker.config import WorkerConfig, load_config, merged
from hapi_worker.monitoring.malloc_tuning import (
    HeapTrimmer,
    keep_heap,
    restart_without_thread_caches,
)
from hapi_worker.server.status import package_version
from hapi_worker.server.systemd import (
    inherited_sockets,
    monotonic_usec,
    notify_systemd,
)

TICK_SECONDS = 1.0
"""Grants expire after ten seconds, devices hang for minutes."""
EXIT_USAGE = 2
EXIT_CANNOT_START = 1
EXIT_NO_DEVICE = 3
OUT_OF_SERVICE = 255
"""Stands in place of a signal's number."""

END_SECONDS = 5.0
"""Time for all threads to end after the drain."""

if TYPE_CHECKING:
    from hapi_worker.jobs.worker import Worker
    from hapi_worker.models.package_loader import ValidatingLoader
    from hapi_worker.server.service import Service

logger = logging.getLogger(__name__)


_EPILOG = """\
Examples:
  hapi-worker --config /etc/hapi/hapi-worker.conf
  hapi-worker --config /etc/hapi/hapi-worker.conf --check

SIGTERM and SIGINT: refuse new jobs, let running ones end for drain_seconds,
exit with 0.  SIGHUP: read the file again and take over limits and weights.
Exit status 1: it cannot start; 2: the command line or the file is wrong;
3: the last device failed."""


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
    if arguments is None:  # not called by another program
        restart_without_thread_caches()
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level, handlers=[handler])
    return _serve(options.config, config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hapi-worker",
        description="Runs the pushed-down layers of models next to the "
        "data: listens on a\nunix socket for the hapi filter of a Swift "
        "proxy on the same host.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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


def _serve(path: str, config: WorkerConfig) -> int:
    try:
        listeners = inherited_sockets()
        _check_paths(listeners, config)
    except (OSError, ValueError) as error:
        return _cannot_start(error)
    keep_heap()  # before there are threads
    # torch takes seconds to load; the checks above must not wait for it.
    from hapi_splitter.fork_server import ForkServer
    from hapi_splitter.inputs.image_decode import preload_decoders
    from hapi_worker.jobs.worker import Worker
    from hapi_worker.models.package_loader import ValidatingLoader
    from hapi_worker.server.service import Service
    from hapi_worker.server.unix_server import SocketInUseError

    signals = _Signals()
    fork_server = ForkServer()
    loader = ValidatingLoader(fork_server)
    try:
        preload_decoders()
        worker = Worker(
            config,
            load=loader,
            fork_server=fork_server,
            out_of_service=signals.end,
        )
        service = Service(worker, listeners)
        # Objects of the start stay: the collector need not scan them.
        gc.freeze()
        service.begin()
    except (SocketInUseError, ImportError, OSError, ValueError) as error:
        return _cannot_start(error)
    logger.info(
        "version %s on %s, listening at %s",
        package_version(),
        ", ".join(executor.name for executor in worker.executors),
        config.socket,
    )
    notify_systemd("READY=1")
    loader.begin()
    worker.self_test.begin()
    heap = HeapTrimmer(lambda: bool(worker.admission.jobs()))
    while (number := signals.wait(TICK_SECONDS)) in (None, signal.SIGHUP):
        if number is None:
            worker.admission.drop_expired()
            worker.check_devices()
            heap.check()
        else:
            _reload(path, worker)
    notify_systemd("STOPPING=1")
    if number == OUT_OF_SERVICE:
        logger.critical("no device is left; the worker ends")
        return _ended(service, loader, EXIT_NO_DEVICE)
    logger.info("draining for at most %g s", worker.config.drain_seconds)
    if not service.drain():
        logger.warning("jobs still run after the drain; they are broken off")
    return _ended(service, loader, 0)


def _cannot_start(error: Exception) -> int:
    logger.error("cannot start: %s", error)
    return EXIT_CANNOT_START


def _ended(service: Service, loader: ValidatingLoader, status: int) -> int:
    """Ends service and loader, and returns the exit status.

    If threads still run, the process ends here: an interpreter that ends
    while a thread of torch runs is aborted, and the driver of a device that
    hangs may wait for that thread.
    """
    # Libraries warn about objects that are not collected at exit.
    gc.unfreeze()
    service.worker.self_test.end()
    idle = loader.end()
    ending = threading.Thread(target=service.end, daemon=True)
    ending.start()
    ending.join(END_SECONDS)
    if not service.ended:
        logger.warning("the worker exits while threads are still busy")
    if not (idle and service.ended):
        logging.shutdown()
        os._exit(status)
    return status


def _check_paths(listeners: Iterable[str], config: WorkerConfig) -> None:
    """Checks that the worker uses all sockets that systemd opened.

    Raises:
        ValueError: it does not use one of them.
    """
    used = (config.socket, config.socket + ".admin")
    unused = sorted(set(listeners) - set(used))
    if unused:
        raise ValueError(
            f"systemd listens at {', '.join(unused)}, and the worker uses "
            f"{used[0]} and {used[1]}: let ListenStream= of "
            "hapi-worker.socket name the same paths as the option socket"
        )


def _reload(path: str, worker: Worker) -> None:
    """Reads the configuration again; a bad file changes nothing."""
    notify_systemd(f"RELOADING=1\nMONOTONIC_USEC={monotonic_usec()}")
    try:
        config, unchanged = merged(worker.config, load_config(path))
    except ValueError as error:
        logger.error("cannot reload, and go on as before: %s", error)
    else:
        if unchanged:
            logger.warning(
                "these options need a new start: %s", ", ".join(unchanged)
            )
        worker.reload(config)
        logging.getLogger().setLevel(config.log_level)
        logger.info("the configuration is reloaded")
    notify_systemd("READY=1")


class _Signals:
    """Signals, and the end of the last device, as numbers to wait for."""

    def __init__(self) -> None:
        self._readable, self._writable = socket.socketpair()
        self._writable.setblocking(False)
        signal.set_wakeup_fd(self._writable.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The handler does nothing: it would interrupt the main thread
            # while that holds locks.
            signal.signal(number, lambda number, frame: None)

    def wait(self, seconds: float) -> int | None:
        """Returns the next signal or :data:`OUT_OF_SERVICE`, else None."""
        if not select.select([self._readable], [], [], seconds)[0]:
            return None
        return self._readable.recv(1)[0]

    def end(self) -> None:
        """Reports that no device is left; callable from any thread."""
        self._writable.send(bytes([OUT_OF_SERVICE]))


if __name__ == "__main__":
    sys.exit(main())
