"""Runs Swift's servers: ``python -m hapi_cluster.run_servers ETC NAME…``.

One server runs as its ``swift-NAME-server`` script would run it.  For several
servers the rings are made first; then all run in this process, on one
eventlet hub.

Swift is imported inside the functions because the order matters: storage
policies are read when their module is imported, before ``swift_dir`` of a
server's configuration is known.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hapi_cluster.settings import server_kind

DEFAULT_CLIENT_TIMEOUT_SECONDS = 60.0
"""Swift's default of ``client_timeout``."""


def serve(etc: Path, names: Sequence[str]) -> int:
    """Serves until killed; returns the exit status if a server ends."""
    from swift.common import utils

    utils.set_swift_dir(str(etc))
    configs = [
        (str(etc / f"{name}-server.conf"), f"{server_kind(name)}-server")
        for name in names
    ]
    if len(configs) == 1:
        from swift.common.wsgi import run_wsgi

        return int(run_wsgi(*configs[0], verbose=True))
    from hapi_cluster.rings import ensure_rings

    ensure_rings(etc)
    return _serve_together(configs)


def _serve_together(configs: Sequence[tuple[str, str]]) -> int:
    """Runs all servers on one hub until the first one ends.

    ``run_server`` cannot be used, because each call makes a new hub.
    """
    from swift.common import utils

    try:
        from swift.common.concurrency import eventlet
    except ImportError:  # Swift before 2.38
        import eventlet

    eventlet.hubs.use_hub(utils.get_hub())
    if hasattr(utils, "monkey_patch"):
        utils.monkey_patch()
    else:  # Swift before 2.31
        utils.eventlet_monkey_patch()
    ended = eventlet.event.Event()
    for path, section in configs:
        conf, _, global_conf, strategy = _check_config(path, section)
        listener = strategy.no_fork_sock()
        thread = eventlet.spawn(_serve_one, conf, global_conf, listener)
        thread.link(lambda thread: ended.send(thread))
    ended.wait().wait()
    return 1


def _check_config(path: str, section: str) -> Any:
    from swift.common import wsgi

    if hasattr(wsgi, "check_config"):
        return wsgi.check_config(path, section, verbose=True)
    # Swift before 2.31 has no function for this part of run_wsgi().
    conf, logger, log_name = wsgi._initrp(path, section, verbose=True)
    strategy = wsgi.WorkersStrategy(conf, logger)
    return conf, logger, {"log_name": log_name}, strategy


def _serve_one(
    conf: dict[str, Any], global_conf: dict[str, Any], listener: Any
) -> None:
    """Does the same as ``swift.common.wsgi.run_server`` after its hub."""
    from swift.common import constraints, wsgi
    from swift.common.utils import NullLogger

    app = wsgi.loadapp(conf["__file__"], global_conf=global_conf)
    timeout = float(
        conf.get("client_timeout") or DEFAULT_CLIENT_TIMEOUT_SECONDS
    )
    warnings.filterwarnings(
        "ignore", message="capitalize_response_headers is disabled"
    )
    wsgi.wsgi.server(
        listener,
        app,
        NullLogger(),
        custom_pool=wsgi.RestrictedGreenPool(
            size=int(conf.get("max_clients", "1024"))
        ),
        protocol=wsgi.SwiftHttpProtocol,
        socket_timeout=timeout,
        capitalize_response_headers=False,
        # Swift before 2.31 leaves the limit to eventlet.
        url_length_limit=getattr(
            constraints, "MAX_REQUEST_LINE", wsgi.wsgi.MAX_REQUEST_LINE
        ),
    )


def main(argv: list[str]) -> int:
    etc, *names = argv
    return serve(Path(etc), names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
