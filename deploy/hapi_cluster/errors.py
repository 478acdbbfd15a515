"""Errors of an embedded cluster.

::

    ClusterError
    ├── SwiftMissingError      the ``cluster`` extra is not installed
    ├── SettingsError          an argument of ``start`` is not allowed
    ├── DirectoryError         the directory cannot hold a cluster
    │   ├── NotAClusterError   it is not empty, or holds no cluster
    │   └── XattrError         its file system has no user xattrs
    ├── SocketPathError        no path short enough for the worker's socket
    ├── PortBusyError          a fixed port is taken
    ├── AlreadyRunningError    the directory's cluster is running already
    ├── NotRunningError        the directory's cluster is not running
    ├── StartError             a server does not answer
    ├── ServerEndedError       a server ended, and the cluster with it
    └── StopError              a process did not end

Each has a ``message`` (what, with the value) and a ``remedy`` (what to do).
They are never sent over HTTP and so not in ``hapi_protocol.errors``.
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base of all errors of this package."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}"


class SwiftMissingError(ClusterError):
    """Swift's servers are not installed in this interpreter."""


class SettingsError(ClusterError):
    """An argument of ``start`` is not allowed."""


class DirectoryError(ClusterError):
    """The directory cannot be created, read or written."""


class NotAClusterError(DirectoryError):
    """The directory is not empty and holds no cluster."""


class XattrError(DirectoryError):
    """The directory's file system has no user extended attributes."""


class SocketPathError(ClusterError):
    """No path is short enough for the worker's unix socket."""


class PortBusyError(ClusterError):
    """A requested port is taken."""


class AlreadyRunningError(ClusterError):
    """The directory's cluster is running already."""


class NotRunningError(ClusterError):
    """The directory's cluster is not running."""


class StartError(ClusterError):
    """A server did not answer in time while starting."""


class ServerEndedError(ClusterError):
    """A server ended, and the cluster with it."""


class StopError(ClusterError):
    """A process of the cluster did not end in time."""
