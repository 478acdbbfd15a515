"""What can go wrong with an embedded cluster.

::

    ClusterError
    ├── SwiftMissingError      the ``cluster`` extra is not installed
    ├── SettingsError          an argument of ``start`` is not allowed
    ├── DirectoryError         the directory cannot hold a cluster
    │   ├── NotAClusterError   it is not empty, or holds no cluster
    │   └── XattrError         its file system has no user xattrs
    ├── SocketPathError        no path short enough for the worker's socket
    ├── PortBusyError          a fixed port is taken
    ├── AlreadyRunningError    the directory's cluster runs already
    ├── NotRunningError        the directory's cluster does not run
    ├── StartError             a server did not come up
    └── StopError              a process did not go away

Each has a ``message`` (what, with the value) and a ``remedy`` (what to do).
They stay on one machine, so they are no part of the wire errors'
tree in ``hapi_protocol.errors``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class ClusterError(Exception):
    """Base of all errors of this package."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}"

    def to_json(self) -> dict[str, str]:
        """The error as it crosses the supervisor's ready pipe."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "remedy": self.remedy,
        }


class SwiftMissingError(ClusterError):
    """Swift's servers are not installed in this interpreter."""


class SettingsError(ClusterError):
    """An argument of ``start`` is not allowed."""


class DirectoryError(ClusterError):
    """The directory cannot be created, read or written."""


class NotAClusterError(DirectoryError):
    """The directory is not empty and holds no cluster."""


class XattrError(DirectoryError):
    """The directory's file system keeps no user extended attributes."""


class SocketPathError(ClusterError):
    """No path is short enough for the worker's unix socket."""


class PortBusyError(ClusterError):
    """A port that was asked for is taken."""


class AlreadyRunningError(ClusterError):
    """The directory's cluster is running already."""


class NotRunningError(ClusterError):
    """The directory's cluster is not running."""


class StartError(ClusterError):
    """A server died or did not answer in time while starting."""


class StopError(ClusterError):
    """A process of the cluster did not end in time."""


def error_from_json(value: Mapping[str, str]) -> ClusterError:
    """The inverse of :meth:`ClusterError.to_json`."""
    kinds = {kind.__name__: kind for kind in _kinds(ClusterError)}
    kind = kinds.get(value.get("error", ""), StartError)
    return kind(value.get("message", ""), value.get("remedy", ""))


def _kinds(kind: type[ClusterError]) -> Iterator[type[ClusterError]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from _kinds(sub)
