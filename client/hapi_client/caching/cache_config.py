"""Options of all caches of features and splits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hapi_client.option_checks import check_integers, check_types
from hapi_protocol.errors import ClientError
from hapi_protocol.headers import CACHE_MODES, CACHE_OFF


@dataclass(frozen=True)
class CacheConfig:
    """Options of the caches, in memory, in directories and in Swift.

    Attributes:
        memory_bytes: memory in which features are cached for later epochs
            and jobs of this process; 0 for none.  None for a quarter of what
            this process may use, divided among the ranks of its host.  Ranks
            that torchrun has started on a host share theirs.
        directory: directory in which features are cached for later runs, and
            for all ranks and loader workers of this host; None for none.
        directory_bytes: its size limit, beyond which features that were not
            used for longest are removed; None for half of what the disk has
            free.
        store: features that the worker computes, in your account: ``"off"``,
            ``"read"``, or ``"readwrite"``, which takes space there (the
            operator has to enable it).
        split_directory: directory on this machine in which splits of models
            are cached; None for ``HAPI_CACHE_DIR``, else ``~/.cache/hapi``;
            "" for none.  A region that :func:`hapi_client.split_model` has
            returned is split already.

    Raises:
        ClientError: ``bad_configuration`` naming the option, its value and
            what is allowed.
    """

    memory_bytes: int | None = None
    directory: str | os.PathLike[str] | None = None
    directory_bytes: int | None = None
    store: str = CACHE_OFF
    split_directory: str | Path | None = None

    def __post_init__(self) -> None:
        check_integers(self, 0, "memory_bytes", "directory_bytes")
        paths = (str, os.PathLike, type(None))
        check_types({"directory": paths, "split_directory": paths}, vars(self))
        if self.directory_bytes is not None and self.directory is None:
            raise ClientError(
                "bad_configuration",
                f"directory_bytes is {self.directory_bytes}, but there is no "
                "directory; give both, or neither",
            )
        if self.store not in CACHE_MODES:
            raise ClientError(
                "bad_configuration",
                f"store is {self.store!r}; one of {', '.join(CACHE_MODES)}",
            )
