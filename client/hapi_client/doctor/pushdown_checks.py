"""Checks of everything that push-down needs, step by step.

Each check has a deadline.  Nothing is left behind except the container of
packages, which the first job would create.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from hapi_client.doctor.account_checks import (
    REQUESTS_PER_CHECK,
    AccountChecks,
    since,
)
from hapi_client.doctor.check_runner import (
    SKIPPED,
    WARNING,
    Finding,
    check,
    checks_of,
    run_checks,
)
from hapi_client.doctor.dataset_checks import DataSetChecks
from hapi_client.model.package_store import (
    DEFAULT_MODELS_CONTAINER,
    package_name,
)
from hapi_client.swift.capabilities import (
    cache_text,
    dtypes,
    model_library,
    places_text,
    size_text,
)
from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import HapiError, RightsError
from hapi_protocol.headers import Annotation
from hapi_protocol.versions import common_version

DEFAULT_SECONDS = 10.0
EXPIRES_SECONDS = 3600
"""Lifetime of the probe object, in case it cannot be deleted."""

_NOT_READABLE = ("unauthorized", "forbidden", "not_found")
_NO_PROBE = Finding(
    SKIPPED,
    "there is no object for a request to the worker",
    "name a data set with an index: hapi doctor swift://CONTAINER/PREFIX",
)
_WORKER_REMEDIES: Mapping[str | int, str] = {
    "worker_unavailable": "ask the operator to start hapi-worker on the "
    "proxy's host and to check worker_socket and allowed_users; jobs fall "
    "back to raw reads",
    "too_slow": "the worker hangs or is overloaded: ask the operator to run "
    "'hapi worker status'; jobs fall back to raw reads",
    "draining": "the worker is about to stop; try again",
    "compute_not_allowed": "ask the operator to add your account to "
    "allowed_accounts of the filter; jobs fall back to raw reads",
    "": "ask the operator to search the logs of proxy and worker for the "
    "transaction",
}


def findings(
    find_credentials: Callable[[], Credentials],
    data: Location | None = None,
    models_container: str = DEFAULT_MODELS_CONTAINER,
    seconds: float = DEFAULT_SECONDS,
) -> Iterator[Finding]:
    """Runs the checks and yields each finding once it is known.

    Args:
        find_credentials: returns the credentials, or raises a HapiError.
        data: data set to check; None for the account alone.
        models_container: container of packages.
        seconds: timeout of one request.
    """
    account = AccountChecks(find_credentials, seconds)
    push_down = PushDownChecks(account.connection, models_container, data)
    checks = [*checks_of(account), *checks_of(push_down)]
    if data is not None:
        checks += checks_of(
            DataSetChecks(account.connection, data, push_down.max_object_bytes)
        )
    try:
        yield from run_checks(checks, REQUESTS_PER_CHECK * seconds)
    finally:
        account.close()


class PushDownChecks:
    """The checks of filter, container of packages and worker.

    Args:
        get_connection: returns the connection of the earlier checks.
        container: container of packages.
        data: data set whose index is read if ``container`` is not writable.
    """

    def __init__(
        self,
        get_connection: Callable[[], Connection],
        container: str,
        data: Location | None,
    ) -> None:
        self._connection = get_connection
        self.container = container
        self._data = data
        self._hapi: dict[str, Any] = {}
        self._may_write = False

    def max_object_bytes(self) -> int | None:
        """Returns the filter's limit of an object; None if unknown."""
        return self._hapi.get("max_object_bytes")

    @check(
        "account",
        remedies={
            "no_hapi": "ask the operator to add the filter to the pipeline, "
            "and to let /info through (docs, Operating); jobs fall back to "
            "raw reads",
            "": "ask the operator to check /info (expose_info)",
        },
    )
    def _filter(self) -> str:
        self._hapi = self._connection().require_hapi(any_version=True)
        return "/info of the proxy has a hapi section"

    @check(
        "filter",
        remedies={
            "": "install client and filter of one release; jobs fall back to "
            "raw reads"
        },
    )
    def _versions(self) -> str:
        release = version("swift-hapi")
        common = common_version(self._hapi, "the proxy", release)
        return f"client {release}; both support version {common}"

    @check("filter")
    def _limits(self) -> str:
        return (
            f"objects of {size_text(self.max_object_bytes())} and packages "
            f"of {size_text(self._hapi.get('max_package_bytes'))} at most; "
            f"features in {', '.join(dtypes(self._hapi))}"
        )

    @check("filter")
    def _cache(self) -> str:
        return cache_text(self._hapi)

    @check("filter")
    def _places(self) -> str:
        return places_text(self._hapi)

    @check("filter")
    def _library(self) -> Finding | str:
        """Looks for a package that does not exist: only rights can fail."""
        library = model_library(self._hapi)
        if library is None:
            return "none: jobs upload packages to their own account"
        account, container = library
        try:
            self._connection().head(
                container, package_name("0" * 64), account=account
            )
        except HapiError as error:
            return Finding(
                WARNING,
                f"{account}/{container} cannot be read: {error.message}",
                "ask the operator to check its read ACL; jobs upload packages "
                "to their own account",
                error.trans_id,
            )
        return f"{account}/{container} can be read"

    @check(
        "account",
        remedies={
            "": "jobs store packages in {self.container!r}: ask for the right "
            "to write there, or name another container"
        },
    )
    def _models(self) -> str:
        """Stores and deletes an object, as a job stores its package."""
        with _probe(self._connection(), self.container):
            self._may_write = True
        return f"{self.container!r} can be written"

    @check("filter", remedies=_WORKER_REMEDIES)
    def _worker(self) -> Finding | str:
        if not self._may_write and self._data is None:
            return _NO_PROBE
        started = time.monotonic()
        try:
            text = self._ask_worker()
        except HapiError as error:
            if not self._may_write and error.code in _NOT_READABLE:
                return _NO_PROBE
            if error.code not in ("queue_full", "share_exceeded"):
                raise
            return Finding(
                WARNING,
                f"it is running but busy: {error.message}",
                "try again; jobs fall back to raw reads meanwhile",
                error.trans_id,
            )
        return f"{text} in {since(started)}"

    def _ask_worker(self) -> str:
        """Sends the worker a request and describes its response."""
        # Imported here to keep pyarrow out of the command line's start-up.
        from hapi_protocol.feature_reader import read_features

        if not self._may_write:
            assert self._data is not None, "skipped otherwise"
            self._connection().ask_worker(
                self._data.container, self._data.index_name
            )
            return "it responded"
        with (
            _probe(self._connection(), self.container) as name,
            self._connection().get_features(
                self.container,
                name,
                Annotation(model=None, cut=0, index=True),
                retry=False,
            ) as body,
        ):
            rows = sum(len(batch.rows) for batch in read_features(body))
            return f"it read a shard of {rows} sample"


@contextlib.contextmanager
def _probe(connection: Connection, container: str) -> Iterator[str]:
    """Stores an object in the container of packages during the block."""
    name = f"hapi-doctor-{uuid.uuid4().hex}.tar"
    data = _shard_of_one_sample()

    def put() -> None:
        connection.put(
            container,
            name,
            io.BytesIO(data),
            len(data),
            headers={"X-Delete-After": str(EXPIRES_SECONDS)},
        )

    try:
        put()
    except RightsError as error:
        if error.status != 404:
            raise
        connection.put_container(container)
        put()
    try:
        yield name
    finally:
        connection.delete(container, name)


def _shard_of_one_sample() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name in ("sample.cls", "sample.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"0"))
    return sink.getvalue()
