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
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any

from hapi_client.doctor.check_runner import (
    SKIPPED,
    WARNING,
    Check,
    Finding,
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
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
from hapi_client.swift.swift_url import Location
from hapi_protocol.errors import HapiError, RightsError
from hapi_protocol.headers import Annotation
from hapi_protocol.versions import common_version
from hapi_splitter.units import bytes_text, seconds_text

DEFAULT_SECONDS = 10.0
REQUESTS_PER_CHECK = 3
"""Deadline of a check, in timeouts of one request."""
MAX_SKEW_SECONDS = 60.0
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


@dataclass(frozen=True)
class DoctorOptions:
    """Settings of the checks.

    Attributes:
        data: data set to check; None for the account alone.
        models_container: container of packages.
        seconds: timeout of one request.
    """

    data: Location | None = None
    models_container: str = DEFAULT_MODELS_CONTAINER
    seconds: float = DEFAULT_SECONDS


class Doctor:
    """Checks the account, push-down and optionally a data set.

    Args:
        find_credentials: returns the credentials, or raises a HapiError.
        options: settings of the checks.
    """

    def __init__(
        self,
        find_credentials: Callable[[], Credentials],
        options: DoctorOptions,
    ) -> None:
        self._find_credentials = find_credentials
        self._options = options
        self._connection: Connection | None = None
        self._hapi: dict[str, Any] = {}
        self._may_write = False

    def findings(self) -> Iterator[Finding]:
        """Runs the checks and yields each finding once it is known."""
        checks = [*self._account_checks(), *self._push_down_checks()]
        if self._options.data is not None:
            checks += DataSetChecks(
                lambda: self._swift,
                self._options.data,
                self._max_object_bytes,
            ).checks()
        try:
            yield from run_checks(
                checks, REQUESTS_PER_CHECK * self._options.seconds
            )
        finally:
            if self._connection is not None:
                self._connection.close()

    @property
    def _swift(self) -> Connection:
        assert self._connection is not None, "credentials come first"
        return self._connection

    def _max_object_bytes(self) -> int | None:
        return self._hapi.get("max_object_bytes")

    # -- the account ---------------------------------------------------

    def _account_checks(self) -> list[Check]:
        return [
            Check(
                "credentials",
                self._read_credentials,
                remedies={"": "'hapi --help' lists their variables"},
            ),
            Check(
                "auth",
                self._log_in,
                ("credentials",),
                {
                    "unauthorized": "check user, key and project",
                    "not_connected": "check the auth URL, the network, and "
                    "HTTP proxies (no_proxy)",
                    "": "check the auth URL: v1's ends in /auth/v1.0, "
                    "Keystone's in /v3",
                },
            ),
            Check(
                "storage_url",
                lambda: self._swift.storage_url,
                ("auth",),
                {"": "check OS_REGION_NAME and OS_INTERFACE"},
            ),
            Check(
                "account",
                self._reach_account,
                ("storage_url",),
                {
                    "": "check the storage URL (region, interface) and the "
                    "network"
                },
            ),
        ]

    def _read_credentials(self) -> Finding | str:
        credentials = self._find_credentials()
        seconds = self._options.seconds
        self._connection = Connection(
            credentials,
            ConnectionOptions(
                connect_seconds=seconds,
                read_seconds=seconds,
                body_seconds=REQUESTS_PER_CHECK * seconds,
                # Retries would hide occasional failures.
                backoff=Backoff(attempts=1),
            ),
        )
        options = credentials.options
        user = options.get("username") or options.get(
            "application_credential_id"
        )
        text = (
            f"{credentials.source}: {credentials.plugin}, {user} at "
            f"{credentials.auth_url}"
        )
        if credentials.tls.insecure:
            return Finding(
                WARNING,
                f"{text}, insecure: TLS certificates are not checked",
                "name their authority by OS_CACERT instead",
            )
        return text

    def _log_in(self) -> str:
        started = time.monotonic()
        self._swift.log_in()
        return f"a token in {_since(started)}"

    def _reach_account(self) -> Finding | str:
        try:
            headers = self._swift.head_account()
        except HapiError as error:
            if error.status != 403:
                raise
            return Finding(
                WARNING,
                "it exists but is not yours",
                "you can read only what its owner shares",
                error.trans_id,
            )
        skew = _skew_seconds(headers.get("Date"))
        if abs(skew) > MAX_SKEW_SECONDS:
            return Finding(
                WARNING,
                f"it responds, but this machine's clock is {skew:+.0f} s "
                "from Swift's",
                "set the clock; tokens and temporary URLs expire by it",
            )
        count = headers.get("X-Account-Container-Count", "?")
        used = int(headers.get("X-Account-Bytes-Used", 0))
        return f"{count} containers, {bytes_text(used)}"

    # -- push-down -----------------------------------------------------

    def _push_down_checks(self) -> list[Check]:
        container = self._options.models_container
        return [
            Check(
                "filter",
                self._find_filter,
                ("account",),
                {
                    "no_hapi": "ask the operator to add the filter to the "
                    "pipeline, and to let /info through (docs, Operating); "
                    "jobs fall back to raw reads",
                    "": "ask the operator to check /info (expose_info)",
                },
            ),
            Check(
                "versions",
                self._compare_versions,
                ("filter",),
                {
                    "": "install client and filter of one release; jobs fall "
                    "back to raw reads"
                },
            ),
            Check("limits", self._describe_limits, ("filter",)),
            Check("cache", lambda: cache_text(self._hapi), ("filter",)),
            Check("places", lambda: places_text(self._hapi), ("filter",)),
            Check("library", self._read_library, ("filter",)),
            Check(
                "models",
                self._write_models,
                ("account",),
                {
                    "": f"jobs store packages in {container!r}: ask for the "
                    "right to write there, or name another container",
                },
            ),
            Check("worker", self._check_worker, ("filter",), _WORKER_REMEDIES),
        ]

    def _find_filter(self) -> str:
        self._hapi = self._swift.require_hapi(any_version=True)
        return "/info of the proxy has a hapi section"

    def _compare_versions(self) -> str:
        release = version("swift-hapi")
        common = common_version(self._hapi, "the proxy", release)
        return f"client {release}; both support version {common}"

    def _describe_limits(self) -> str:
        return (
            f"objects of {size_text(self._max_object_bytes())} and packages "
            f"of {size_text(self._hapi.get('max_package_bytes'))} at most; "
            f"features in {', '.join(dtypes(self._hapi))}"
        )

    def _read_library(self) -> Finding | str:
        """Looks for a package that does not exist: only rights can fail."""
        library = model_library(self._hapi)
        if library is None:
            return "none: jobs upload packages to their own account"
        account, container = library
        try:
            self._swift.head(
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

    def _write_models(self) -> str:
        """Stores and deletes an object, as a job stores its package."""
        with _probe(self._swift, self._options.models_container):
            self._may_write = True
        return f"{self._options.models_container!r} can be written"

    def _check_worker(self) -> Finding | str:
        if not self._may_write and self._options.data is None:
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
        return f"{text} in {_since(started)}"

    def _ask_worker(self) -> str:
        """Sends the worker a request and describes its response."""
        # Imported here to keep pyarrow out of the command line's start-up.
        from hapi_protocol.feature_reader import read_features

        container = self._options.models_container
        if not self._may_write:
            assert self._options.data is not None, "skipped otherwise"
            self._swift.ask_worker(
                self._options.data.container, self._options.data.index_name
            )
            return "it responded"
        with (
            _probe(self._swift, container) as name,
            self._swift.get_features(
                container,
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
            expires_seconds=EXPIRES_SECONDS,
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


def _skew_seconds(date: str | None) -> float:
    """Returns the seconds by which this machine's clock is ahead of ``date``.

    A missing or unreadable date gives 0.
    """
    now = datetime.now(timezone.utc)
    try:
        return (now - parsedate_to_datetime(date or "")).total_seconds()
    except (TypeError, ValueError):
        return 0.0


def _since(started: float) -> str:
    return seconds_text(time.monotonic() - started)
