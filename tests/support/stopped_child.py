"""A server of processes whose children stop as soon as they are forked."""

from __future__ import annotations

import os
import signal

from hapi_splitter import fork_server


class _Server(fork_server._Server):
    def _detach(self, output: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    fork_server._Server = _Server
    fork_server.serve(lambda descriptor, request: {})
