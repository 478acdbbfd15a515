"""Options of the filter, parsed into typed values at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from swift.common.storage_policy import POLICIES

from hapi_protocol.job_messages import UNAUTHENTICATED_ACCOUNT
from hapi_protocol.options import (
    MAX_SOCKET_PATH_BYTES,
    absolute_path,
    count,
    option,
    read_options,
    seconds,
)
from hapi_protocol.signatures import address_text

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_WORKER_SOCKET = "/run/hapi/worker.sock"
PLACE_PROXY = "proxy"
PLACE_OBJECT = "object"
PLACES = (PLACE_OBJECT, PLACE_PROXY)
DEFAULT_KEY_FILE = "/etc/swift/hapi-backend.key"
MIB = 1024**2
GIB = 1024**3

_PASTE_KEYS = ("use", "name", "here", "__file__", "__name__")
_LOG_PREFIXES = ("log_", "access_log_", "statsd_")


def _places(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    if len(set(names)) != len(names) or not {*names} <= {*PLACES}:
        raise ValueError(f"{', '.join(PLACES)}, or one of them")
    return names


def _policy(value: str) -> str:
    policy = POLICIES.get_by_name(value) if value else None
    if value and (policy is None or policy.is_deprecated):
        known = [
            policy.name for policy in POLICIES if not policy.is_deprecated
        ]
        raise ValueError(
            f"a storage policy of swift.conf: {', '.join(known)}; or empty"
        )
    return value


def _prefix(value: str) -> str:
    if "/" in value or "," in value:
        raise ValueError("one reseller prefix, as AUTH_, or empty")
    # Swift's auth middleware reads its option of this name the same way.
    prefix = "" if value in ("''", '""') else value
    return prefix if prefix.endswith("_") or not prefix else f"{prefix}_"


def _flag(value: str) -> bool:
    # Swift's config_true_value() reads a misspelt "ture" as false.
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}
    if value.lower() not in words:
        raise ValueError(f"one of {', '.join(words)}")
    return words[value.lower()]


def _accounts(value: str) -> frozenset[str]:
    names = [name.strip() for name in value.split(",")] if value else []
    for name in names:
        if name == UNAUTHENTICATED_ACCOUNT:
            raise ValueError(
                "names of accounts; callers without one are admitted by "
                "allow_unauthenticated_compute"
            )
        if not name or "/" in name or any(map(str.isspace, name)):
            raise ValueError("names of accounts, separated by commas")
    return frozenset(names)


def _addresses(value: str) -> frozenset[str]:
    addresses = set()
    for name in value.split(",") if value else []:
        host, _, port = name.strip().rpartition(":")
        if not (host and port.isascii() and port.isdigit()):
            raise ValueError("HOST:PORT, separated by commas")
        addresses.add(address_text(host, port))
    return frozenset(addresses)


def _container(value: str) -> str:
    parts = value.split("/")
    if value and (len(parts) != 2 or not all(map(_is_word, parts))):
        raise ValueError("ACCOUNT/CONTAINER, as AUTH_library/models, or empty")
    return value


def _is_word(text: str) -> bool:
    return bool(text) and not any(map(str.isspace, text))


@dataclass(frozen=True)
class WorkerOptions:
    """Options that both filters have."""

    SECTION: ClassVar[str]

    worker_socket: str = option(
        DEFAULT_WORKER_SOCKET, absolute_path(MAX_SOCKET_PATH_BYTES)
    )
    """Path of the worker's unix socket on this host."""

    worker_connect_timeout: float = option("1", seconds)
    """Timeout of a connection to the worker, in seconds."""

    worker_timeout: float = option("120", seconds)
    """Timeout of each step of the worker, in seconds: granting a job,
    beginning its answer, continuing it."""

    backend_key_file: str = option(DEFAULT_KEY_FILE, absolute_path())
    """File of mode 0600 with the key that signs requests of proxies to object
    servers."""

    @classmethod
    def from_conf(
        cls, global_conf: Mapping[str, str], local_conf: Mapping[str, str]
    ) -> Self:
        """Parses the configuration that paste hands to a filter factory.

        Args:
            global_conf: the [DEFAULT] section and ``set`` values; other
                keys than our options are ignored.
            local_conf: the filter's section; every key must be known.

        Raises:
            ValueError: names the key, the value and what is allowed.
        """
        config = read_options(
            cls,
            cls.SECTION,
            local_conf,
            inherited=global_conf,
            is_foreign=lambda name: (
                name in _PASTE_KEYS or name.startswith(_LOG_PREFIXES)
            ),
        )
        config.check()
        return config

    def check(self) -> None:
        """Raises ValueError if options contradict each other."""


@dataclass(frozen=True)
class FilterConfig(WorkerOptions):
    """Options of ``[filter:hapi]``; see ``proxy-server.conf-sample``."""

    SECTION = "filter:hapi"

    max_object_bytes: int = option(str(5 * GIB), count(1))
    """Maximum length of an object, or of its ``X-Hapi-Range``."""

    max_package_bytes: int = option(str(4 * GIB), count(1))
    """Maximum length of a model package."""

    max_multi_objects: int = option("1000", count(1, 100_000))
    """Maximum number of objects in one request."""

    max_multi_object_bytes: int = option(str(16 * MIB), count(1))
    """Maximum length of one object of a request for many."""

    multi_concurrency: int = option("8", count(1, 64))
    """Objects of one request that are read, and held in memory, at a time."""

    reseller_prefix: str = option("AUTH_", _prefix)
    """First reseller prefix of the auth middleware.  With it the charged
    account has the same name as in URLs."""

    allow_unauthenticated_compute: bool = option("false", _flag)
    """Callers without a project (anonymous, TempURL) may compute."""

    allowed_accounts: frozenset[str] = option("", _accounts)
    """Charged accounts that may compute; empty: all of them."""

    model_library: str = option("", _container)
    """``ACCOUNT/CONTAINER`` of packages that clients look for before they
    upload their own; empty: none.  It is published in ``/info``."""

    cache: bool = option("false", _flag)
    """Features are cached if a request's ``X-Hapi-Cache`` asks for it."""

    cache_ttl_seconds: int = option(str(14 * 24 * 3600), count(1))
    """Age at which Swift's object expirer deletes an entry."""

    cache_max_entry_bytes: int = option(str(16 * MIB), count(1))
    """Maximum length of the features in one entry."""

    cache_max_account_bytes: int = option(str(100 * GIB), count(1))
    """Maximum length of all entries in one account, by container listings."""

    cache_buffer_bytes: int = option(str(256 * MIB), count(1))
    """Memory of one proxy process for entries not yet stored."""

    cache_timeout: float = option("5", seconds)
    """Timeout of reading an entry, in seconds; then features are computed."""

    cache_policy: str = option("", _policy)
    """Storage policy of new cache containers; empty: the default policy."""

    places: tuple[str, ...] = option(PLACE_PROXY, _places)
    """Places that compute features, first choice first: ``proxy``, by this
    host's worker, or ``object``, on an object server that has the object."""

    object_connect_timeout: float = option("0.5", seconds)
    """Timeout of a connection to an object server, in seconds."""

    object_silence_seconds: float = option("4", seconds)
    """Silence of an object server after which another one is asked; more
    than twice their ``beat_seconds``."""

    object_suppress_seconds: float = option("60", seconds)
    """Time for which an object server that did not answer, or that has no
    filter, is not asked again."""

    swift_dir: str = option("/etc/swift", absolute_path())
    """Folder of the rings; usually set in ``[DEFAULT]``."""

    def check(self) -> None:
        """Raises ValueError for accounts without the reseller prefix."""
        prefix = self.reseller_prefix
        names = [
            ("allowed_accounts", n) for n in sorted(self.allowed_accounts)
        ]
        if self.model_library:
            names.append(("model_library", self.model_library))
        for option_name, name in names:
            if not name.startswith(prefix):
                raise ValueError(
                    f"[{self.SECTION}] {option_name} has {name}: names of "
                    f"accounts begin with the reseller_prefix {prefix}, for "
                    f"instance {prefix}{name}"
                )


@dataclass(frozen=True)
class ObjectFilterConfig(WorkerOptions):
    """Options of ``[filter:hapi_object]``; see
    ``object-server.conf-sample``."""

    SECTION = "filter:hapi_object"

    addresses: frozenset[str] = option("", _addresses)
    """``HOST:PORT`` of this server in the rings, if proxies reach it by a host
    name or a translated address; separated by commas."""

    beat_seconds: float = option("1", seconds)
    """Silence after which a beat shows the proxy that the answer goes on."""
