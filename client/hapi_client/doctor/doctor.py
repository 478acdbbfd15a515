"""What stands between a user and push-down, found out step by step.

Each look ends by a deadline and leaves nothing behind but the container of
packages, which the first job would make.
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

from hapi_client.doctor.checks import (
    SKIPPED,
    WARNING,
    Check,
    Finding,
    run_checks,
)
from hapi_client.doctor.dataset_checks import DataSetChecks
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.swift.capabilities import cache_text, dtypes, size_text
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
ANSWERS_OF_A_CHECK = 3
"""A check makes some requests: it may last so many times one's seconds."""
MAX_SKEW_SECONDS = 60.0
EXPIRES_SECONDS = 3600
"""Of an object that nobody could delete any more."""

_NOT_READ = ("unauthorized", "forbidden", "not_found")
_NOTHING_TO_ASK_ABOUT = Finding(
    SKIPPED,
    "there is no object to ask it about",
    "name a data set with an index: hapi doctor swift://CONTAINER/PREFIX",
)
_REMEDIES_OF_WORKER: Mapping[str | int, str] = {
    "worker_unavailable": "the operator starts hapi-worker on the proxy's "
    "host, and looks at worker_socket and allowed_users; jobs stream",
    "too_slow": "the worker hangs or has too much to do: the operator runs "
    "'hapi worker status'; jobs stream",
    "draining": "the worker is about to end; try again",
    "compute_not_allowed": "the operator adds your account to "
    "allowed_accounts of the filter; jobs stream",
    "": "the operator looks for the transaction in the logs of proxy and "
    "worker",
}


@dataclass(frozen=True)
class DoctorOptions:
    """What is looked at.

    Attributes:
        data: a data set; None for the account alone.
        models_container: as of jobs.
        seconds: for each answer.
    """

    data: Location | None = None
    models_container: str = DEFAULT_MODELS_CONTAINER
    seconds: float = DEFAULT_SECONDS


class Doctor:
    """Looks at one thing after the other.

    Args:
        find_credentials: finds them, or raises a HapiError.
        options: what is looked at.
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
        """One for each check, as soon as it is known."""
        checks = [*self._account_checks(), *self._push_down_checks()]
        if self._options.data is not None:
            checks += DataSetChecks(
                lambda: self._swift, self._options.data, self._most_bytes
            ).checks()
        try:
            yield from run_checks(
                checks, ANSWERS_OF_A_CHECK * self._options.seconds
            )
        finally:
            if self._connection is not None:
                self._connection.close()

    @property
    def _swift(self) -> Connection:
        assert self._connection is not None, "checks need the first one"
        return self._connection

    def _most_bytes(self) -> int | None:
        return self._hapi.get("max_object_bytes")

    # -- the account ---------------------------------------------------

    def _account_checks(self) -> list[Check]:
        return [
            Check(
                "credentials",
                self._look_for_credentials,
                remedies={"": "'hapi --help' says where they are looked for"},
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
                {"": "check the storage URL (region, interface), the network"},
            ),
        ]

    def _look_for_credentials(self) -> Finding | str:
        found = self._find_credentials()
        seconds = self._options.seconds
        self._connection = Connection(
            found,
            ConnectionOptions(
                connect_seconds=seconds,
                read_seconds=seconds,
                body_seconds=ANSWERS_OF_A_CHECK * seconds,
                # What fails now and then is to be seen.
                backoff=Backoff(attempts=1),
            ),
        )
        options = found.options
        who = options.get("username") or options.get(
            "application_credential_id"
        )
        text = f"{found.source}: {found.plugin}, {who} at {found.auth_url}"
        if found.tls.insecure:
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
                "it is there and not yours",
                "what its owner shares can be read",
                error.trans_id,
            )
        skew = _skew_seconds(headers.get("Date"))
        if abs(skew) > MAX_SKEW_SECONDS:
            return Finding(
                WARNING,
                f"it answers; this machine's clock is {skew:+.0f} s from "
                "Swift's",
                "set the clock: tokens and temporary URLs end at other times",
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
                    "no_hapi": "the operator puts the filter into the "
                    "pipeline (docs, Operating); jobs stream",
                    "": "the operator looks at /info (expose_info)",
                },
            ),
            Check(
                "versions",
                self._compare_versions,
                ("filter",),
                {"": "install client and filter of one release; jobs stream"},
            ),
            Check("limits", self._tell_limits, ("filter",)),
            Check("cache", self._tell_cache, ("filter",)),
            Check(
                "models",
                self._write_models,
                ("account",),
                {
                    "": f"jobs store packages in {container!r}: get the right "
                    "to write there, or name another container",
                },
            ),
            Check(
                "worker", self._use_worker, ("filter",), _REMEDIES_OF_WORKER
            ),
        ]

    def _find_filter(self) -> str:
        self._hapi = self._swift.require_hapi(any_version=True)
        return "/info of the proxy has a section hapi"

    def _compare_versions(self) -> str:
        release = version("swift-hapi")
        common = common_version(self._hapi, "the proxy", release)
        return f"client {release}; both speak version {common}"

    def _tell_limits(self) -> str:
        return (
            f"objects of {size_text(self._most_bytes())} and packages of "
            f"{size_text(self._hapi.get('max_package_bytes'))} at most; "
            f"features in {', '.join(dtypes(self._hapi))}"
        )

    def _tell_cache(self) -> str:
        return cache_text(self._hapi)

    def _write_models(self) -> str:
        """Stores and deletes an object, as a job stores its package."""
        with _probe(self._swift, self._options.models_container):
            self._may_write = True
        return f"{self._options.models_container!r} can be written"

    def _use_worker(self) -> Finding | str:
        if not self._may_write and self._options.data is None:
            return _NOTHING_TO_ASK_ABOUT
        started = time.monotonic()
        try:
            how = self._ask_worker()
        except HapiError as error:
            if not self._may_write and error.code in _NOT_READ:
                return _NOTHING_TO_ASK_ABOUT
            if error.code not in ("queue_full", "share_exceeded"):
                raise
            return Finding(
                WARNING,
                f"it is there, and busy: {error.message}",
                "try again; jobs stream meanwhile",
                error.trans_id,
            )
        return f"{how} in {_since(started)}"

    def _ask_worker(self) -> str:
        """How the worker has shown that it is there."""
        # The command line is there sooner without pyarrow.
        from hapi_protocol.feature_reader import read_features

        container = self._options.models_container
        if not self._may_write:
            assert self._options.data is not None, "else it is skipped"
            self._swift.ask_worker(
                self._options.data.container, self._options.data.index_name
            )
            return "it answers"
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
    """An object in the container of packages, as long as it is looked at."""
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
    """How far this machine's clock is ahead of the one that says ``date``.

    0 where no date is said, or none that can be read.
    """
    now = datetime.now(timezone.utc)
    try:
        return (now - parsedate_to_datetime(date or "")).total_seconds()
    except (TypeError, ValueError):
        return 0.0


def _since(started: float) -> str:
    return seconds_text(time.monotonic() - started)
