"""Ray on this machine, for a user of a cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from as_user import environment_of
from hapi_cluster import Cluster

_QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would replace print for later tests of this process too.
    "RAY_TQDM_PATCH_PRINT": "0",
}


@contextmanager
def local_ray(cluster: Cluster) -> Iterator[None]:
    """Runs two CPUs of Ray, whose processes have the user's credentials.

    They import what this one does.
    """
    # Sockets in a folder of a longer path would have too long a name.
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
    ):
        for name, value in {**environment_of(cluster), **_QUIET}.items():
            patch.setenv(name, value)
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
