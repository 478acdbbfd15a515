"""Cached rows in the memory of this process, shared by its jobs.

They outlive the job that computed them, so that the next job of a notebook or
a sweep finds them; the least recently used leave when another job needs space.

Ranks of a host share theirs.  Each trains on another part of the samples in
each epoch, so ranks that cache for themselves compute what others have
computed.  The memory is a file without a name (``memfd_create``), which ranks
find among the open files of one another in ``/proc``.  So nothing has to be
removed, and nothing can be left behind: it ends with the last process that has
it open, even if all of them were killed, and the size of ``/dev/shm`` (64 MB
in docker) is no limit.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakSet

from hapi_client.caching.row_map import FORMAT_VERSION, RowFormat, RowMap

JOIN_SECONDS = 2.0
"""Longest wait for another rank that opens the same memory."""
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


def local_ranks(environ: Mapping[str, str]) -> int:
    """Returns the ranks on this host, as torchrun states them; at least 1."""
    with suppress(ValueError):
        return max(1, int(environ.get("LOCAL_WORLD_SIZE") or 1))
    return 1


def shared_name(environ: Mapping[str, str]) -> str:
    """Returns the name of this run's memory; empty for a single rank."""
    if local_ranks(environ) == 1:
        return ""
    run = " ".join(environ.get(name, "") for name in _RUN)
    return f"hapi-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


@dataclass
class _Entry:
    rows: RowMap
    users: WeakSet[object] = field(default_factory=WeakSet)


class MemoryPool:
    """Rows in memory by the key of their facts.  Thread-safe."""

    def __init__(self) -> None:
        self._reset()
        # A forked child has its own: threads of its parent may hold the lock.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def open(
        self,
        form: RowFormat,
        user: object,
        limit_bytes: int,
        shared: str = "",
    ) -> RowMap | None:
        """Returns rows, which stay until their users have ended.

        Args:
            form: facts and sizes of the rows.
            user: the job; :meth:`release` ends its use, or its end does.
            limit_bytes: bytes of rows that the whole pool may have.
            shared: name of the run whose ranks share them; empty for none.

        Returns:
            None if no row has space.

        Raises:
            OSError: if the host refuses the memory, or ranks cannot share it.
        """
        with self._lock:
            entry = self._entries.get(form.key)
            in_use = sum(
                other.rows.length_bytes
                for other in self._entries.values()
                if other.users and other is not entry
            )
            capacity = form.capacity(limit_bytes - in_use)
            if entry and not entry.users and entry.rows.capacity < capacity:
                del self._entries[form.key]
                entry = None
            if entry is None:
                if not capacity:
                    return None
                needed = int(form.offsets[capacity])
                self._evict(limit_bytes - needed)
                rows = _allocate(form, form.num_bytes(capacity), shared)
                entry = self._entries[form.key] = _Entry(rows)
            entry.users.add(user)
            self._entries.move_to_end(form.key)
            return entry.rows

    def _evict(self, limit_bytes: int) -> None:
        for key, entry in list(self._entries.items()):
            total = sum(e.rows.length_bytes for e in self._entries.values())
            if total <= limit_bytes:
                break
            if not entry.users:
                del self._entries[key]

    def release(self, user: object) -> None:
        """Ends all uses of a job."""
        with self._lock:
            for entry in self._entries.values():
                entry.users.discard(user)

    def clear(self) -> None:
        """Frees what no open job uses."""
        with self._lock:
            self._evict(-1)


POOL = MemoryPool()


def _allocate(form: RowFormat, num_bytes: int, shared: str) -> RowMap:
    """Takes memory, page by page as rows are written."""
    if not shared:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return RowMap(form, mmap.mmap(-1, num_bytes, flags=flags))
    name = f"{shared}-{form.key}-{FORMAT_VERSION}"
    with _only_rank(name), ExitStack() as undo:
        known = _find_shared(name)
        file = os.memfd_create(name) if known is None else known
        undo.callback(os.close, file)
        if known is None:
            os.truncate(file, num_bytes)
            # Refused if no other rank could do so.
            os.close(os.open(f"/proc/self/fd/{file}", os.O_RDWR))
        memory = mmap.mmap(file, 0)
        undo.pop_all()
    return RowMap(form, memory, file)


@contextmanager
def _only_rank(name: str) -> Iterator[None]:
    """Excludes other ranks, by a socket's name, which ends with its process.

    Raises:
        TimeoutError: if another process has it for too long.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        while True:
            try:
                lock.bind(f"\0{name}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, "another rank opens its memory"
                    ) from None
                time.sleep(0.005)
        yield


def _find_shared(name: str) -> int | None:
    """Opens the memory of another rank, if there is one."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = f"/proc/{pid}/fd"
        try:
            paths = [f"{folder}/{number}" for number in os.listdir(folder)]
        except OSError:  # it has ended, or is another user's
            continue
        for path in paths:
            with suppress(OSError):  # closed meanwhile
                if os.readlink(path) == f"/memfd:{name} (deleted)":
                    file = os.open(path, os.O_RDWR)
                    if os.fstat(file).st_uid == os.geteuid():
                        return file
                    os.close(file)
    return None
