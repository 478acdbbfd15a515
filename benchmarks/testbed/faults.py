"""Faults of a Swift: their schedule, made from a seed, and their effects."""

from __future__ import annotations

import contextlib
import random
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.storage_hosts import (
    DEVICES,
    PROXIES,
    STORAGE,
    StorageHosts,
)

REST_SECONDS, RETRY_SECONDS = 5.0, 1.0
"""Least time between two faults of one host or process."""
WEIGHTS = (50, 150)
LEFT_OUT = "left out"
_OBJECTS = tuple(f"{name}-object" for name in STORAGE)
_WORKERS = tuple(f"{name}-worker" for name in (*STORAGE, PROXIES[0]))
_PROXIES = tuple(f"{name}-proxy" for name in PROXIES)
_DISKS = tuple(f"{name}-{device}" for name in STORAGE for device in DEVICES)
_LONG, _SHORT = (5.0, 30.0), (5.0, 10.0)


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    ``weight`` is its share of all faults, ``seconds`` its shortest and
    longest duration.  One that ``harms`` replicas is left out while they are
    not healed from the one before.
    """

    weight: int
    targets: tuple[str, ...]
    seconds: tuple[float, float] = _LONG
    harms: bool = False


KINDS: Mapping[str, Kind] = {
    "object_killed": Kind(3, _OBJECTS),
    "object_stopped": Kind(3, _OBJECTS),
    "worker_killed": Kind(3, _WORKERS),
    "worker_stopped": Kind(3, _WORKERS),
    "proxy_killed": Kind(2, _PROXIES, _SHORT),
    "proxy_restarted": Kind(2, _PROXIES, _SHORT),
    "disk_unmounted": Kind(3, _DISKS),
    "disk_full": Kind(2, _DISKS),
    "missed_overwrite": Kind(2, _OBJECTS, harms=True),
    "old_version": Kind(3, _OBJECTS, harms=True),
    "flipped_byte": Kind(3, _OBJECTS, harms=True),
    "rebalance": Kind(2, ("rings",), harms=True),
    "new_key": Kind(2, ("key",), _SHORT),
}


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule; ``dice`` chooses what its kind leaves open."""

    at: float
    kind: str
    target: str
    seconds: float
    dice: int


def schedule(
    seed: int, seconds: float, gap_seconds: tuple[float, float]
) -> list[Fault]:
    """Faults of a run; those of one host do not overlap."""
    chance = random.Random(seed)
    weights = [kind.weight for kind in KINDS.values()]
    free_at: dict[str, float] = {}
    faults = []
    at = chance.uniform(*gap_seconds)
    while at < seconds:
        [name] = chance.choices(list(KINDS), weights)
        target = chance.choice(KINDS[name].targets)
        duration = chance.uniform(*KINDS[name].seconds)
        dice = chance.randrange(2**32)
        hit = occupied(target)
        if any(free_at.get(node, 0) > at for node in hit):
            at += RETRY_SECONDS
            continue
        faults.append(Fault(at, name, target, duration, dice))
        free_at |= dict.fromkeys(hit, at + duration + REST_SECONDS)
        at += chance.uniform(*gap_seconds)
    return faults


def occupied(target: str) -> set[str]:
    """Names of the hosts and processes that a fault occupies."""
    if target == "key":
        return {*STORAGE, *_PROXIES}
    if target in (*_WORKERS, *_PROXIES):
        return {target}
    return {target.split("-")[0]}


class Faults:
    """Effects of faults; each method undoes its own at the block's end.

    Args:
        swift: the running hosts.
        puts: functions that store an object again, by its path
            ``account/container/object``: the objects that faults harm.
        old: folder for their older versions, of :meth:`keep_old`.
    """

    def __init__(
        self,
        swift: StorageHosts,
        puts: Mapping[str, Callable[[], object]],
        old: Path,
    ) -> None:
        self._swift, self._puts, self._old = swift, puts, old
        self._flipped: dict[Path, bytes] = {}
        self._locks = {
            name: threading.Lock()
            for kind in KINDS.values()
            for target in kind.targets
            for name in occupied(target)
        }

    @contextlib.contextmanager
    def of(self, fault: Fault) -> Iterator[str]:
        """Harms within its block; yields details.

        It is left out if an earlier fault of its hosts takes too long.
        """
        with contextlib.ExitStack() as stack:
            for name in sorted(occupied(fault.target)):
                if not self._locks[name].acquire(timeout=REST_SECONDS):
                    yield f"{LEFT_OUT}: {name} is busy"
                    return
                stack.callback(self._locks[name].release)
            if KINDS[fault.kind].harms and (sick := self.unhealed()):
                yield f"{LEFT_OUT}: {len(sick)} sick"
            elif fault.target in _WORKERS and not self._swift.with_filter:
                yield f"{LEFT_OUT}: no workers"
            else:
                effect = contextlib.contextmanager(getattr(self, fault.kind))
                chance = random.Random(fault.dice)
                yield stack.enter_context(effect(fault.target, chance))

    def unhealed(self) -> list[str]:
        """Objects of which a replica is missing, old or damaged."""
        self._flipped = {
            path: data
            for path, data in self._flipped.items()
            if path.exists() and path.read_bytes() == data
        }
        sick = [put for put in self._puts if not self._swift.is_healthy(put)]
        return sick + [str(path) for path in self._flipped]

    def keep_old(self) -> None:
        """Keeps the present version of all objects for ``old_version``."""
        for put in self._puts:
            for path in self._swift.replicas(put):
                kept = self._old / path.parent.name
                kept.mkdir(parents=True, exist_ok=True)
                # With the extended attributes that are Swift's metadata.
                shutil.copy2(path, kept)

    def object_killed(self, target: str, _: random.Random) -> Iterator[str]:
        server = self._swift.servers[target]
        # Of a worker only the first process, as the kernel does it.
        server.end(signal.SIGKILL, group=target not in _WORKERS)
        yield ""
        server.start()
        server.await_answer()

    worker_killed = proxy_killed = object_killed

    def object_stopped(self, target: str, _: random.Random) -> Iterator[str]:
        self._swift.servers[target].signal(signal.SIGSTOP)
        yield ""
        self._swift.servers[target].signal(signal.SIGCONT)

    worker_stopped = object_stopped

    def proxy_restarted(self, target: str, _: random.Random) -> Iterator[str]:
        server = self._swift.servers[target]
        server.end(signal.SIGHUP, group=False)
        server.start()
        yield ""
        server.await_answer()

    def disk_unmounted(self, target: str, _: random.Random) -> Iterator[str]:
        host, device = target.split("-")
        self._swift.hosts[host].unmount(device)
        yield ""
        self._swift.hosts[host].mount(device)

    def disk_full(self, target: str, _: random.Random) -> Iterator[str]:
        host, device = target.split("-")
        path = self._swift.hosts[host].device(device) / "full"
        with path.open("wb") as file, contextlib.suppress(OSError):
            while True:  # others write at the same time
                file.write(bytes(1 << 16))
        yield ""
        path.unlink()

    def missed_overwrite(
        self, target: str, chance: random.Random
    ) -> Iterator[str]:
        """A host is down while an object is stored again, the same."""
        name, path = self._at(target, chance)
        server = self._swift.servers[target]
        server.end(signal.SIGKILL)
        try:
            self._puts[name]()
            yield str(path)
        finally:
            server.start()
            server.await_answer()

    def old_version(self, target: str, chance: random.Random) -> Iterator[str]:
        """A host starts with an older, different version of an object."""
        _, path = self._at(target, chance)
        number = re.search(r"#\d+", path.name)
        pattern = f"*{number[0]}*.data" if number else "*.data"
        old, *_ = (self._old / path.parent.name).glob(pattern)
        server = self._swift.servers[target]
        server.end(signal.SIGKILL)
        path.unlink()
        shutil.copy2(old, path.parent)
        # Hashes of the partition, which would be as old.
        (path.parents[2] / "hashes.pkl").unlink(missing_ok=True)
        server.start()
        server.await_answer()
        yield str(path)

    def flipped_byte(
        self, target: str, chance: random.Random
    ) -> Iterator[str]:
        """A disk changes a byte, which its auditor finds at the end."""
        _, path = self._at(target, chance)
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1
        # In place: the attributes stay.
        with path.open("r+b") as file:
            file.write(data)
        self._flipped[path] = bytes(data)
        yield str(path)
        host = self._swift.hosts[target.split("-")[0]]
        self._swift.run_daemon(host, "auditor")

    def _at(self, target: str, chance: random.Random) -> tuple[str, Path]:
        """An object with a replica on the host, and that replica."""
        host = self._swift.hosts[target.split("-")[0]]
        return chance.choice(
            [
                (name, path)
                for name in self._puts
                for path in self._swift.replicas(name)
                if host.folder in path.parents
            ]
        )

    def rebalance(self, _: str, chance: random.Random) -> Iterator[str]:
        numbers = range(len(STORAGE) * len(DEVICES))
        weights = {number: chance.uniform(*WEIGHTS) for number in numbers}
        self._swift.rebalance(weights)
        yield ""

    def new_key(self, _: str, chance: random.Random) -> Iterator[str]:
        """A new key: as second line everywhere, as first line, alone."""
        [old], new = self._swift.keys, secrets.token_urlsafe(48)
        for keys in ([old, new], [new, old], [new]):
            self._swift.keys = keys
            self._swift.write_keys()
            self._swift.reload()
        yield ""
