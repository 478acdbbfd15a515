"""Options of the filter, parsed into typed values at start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from swift.common.storage_policy import POLICIES

from hapi_protocol.job_messages import UNAUTHENTICATED_ACCOUNT
from hapi_protocol.signatures import address_text

DEFAULT_WORKER_SOCKET = "/run/hapi/worker.sock"
PLACE_PROXY = "proxy"
PLACE_OBJECT = "object"
PLACES = (PLACE_OBJECT, PLACE_PROXY)
DEFAULT_KEY_FILE = "/etc/swift/hapi-backend.key"
MIB = 1024**2
GIB = 1024**3

_MAX_SOCKET_PATH_BYTES = 107
_PASTE_KEYS = ("use", "name", "here", "__file__", "__name__")
_LOG_PREFIXES = ("log_", "access_log_", "statsd_")


@dataclass(frozen=True)
class FilterConfig:
    """Options of ``[filter:hapi]``; see ``proxy-server.conf-sample``."""

    worker_socket: str = DEFAULT_WORKER_SOCKET
    """Path of the worker's unix socket on this host."""

    worker_connect_timeout: float = 1.0
    """Timeout of a connection to the worker, in seconds."""

    worker_timeout: float = 120.0
    """Timeout of each step of the worker, in seconds: granting a job,
    beginning its answer, continuing it."""

    max_object_bytes: int = 5 * GIB
    """Maximum length of an object, or of its ``X-Hapi-Range``."""

    max_package_bytes: int = 4 * GIB
    """Maximum length of a model package."""

    max_multi_objects: int = 1000
    """Maximum number of objects in one request."""

    max_multi_object_bytes: int = 16 * MIB
    """Maximum length of one object of a request for many."""

    multi_concurrency: int = 8
    """Objects of one request that are read, and held in memory, at a time."""

    reseller_prefix: str = "AUTH_"
    """First reseller prefix of the auth middleware.  With it the charged
    account has the same name as in URLs."""

    allow_unauthenticated_compute: bool = False
    """Callers without a project (anonymous, TempURL) may compute."""

    allowed_accounts: frozenset[str] = frozenset()
    """Charged accounts that may compute; empty: all of them."""

    model_library: str = ""
    """``ACCOUNT/CONTAINER`` of packages that clients look for before they
    upload their own; empty: none.  It is published in ``/info``."""

    cache: bool = False
    """Features are cached if a request's ``X-Hapi-Cache`` asks for it."""

    cache_ttl_seconds: int = 14 * 24 * 3600
    """Age at which Swift's object expirer deletes an entry."""

    cache_max_entry_bytes: int = 16 * MIB
    """Maximum length of the features in one entry."""

    cache_max_account_bytes: int = 100 * GIB
    """Maximum length of all entries in one account, by container listings."""

    cache_buffer_bytes: int = 256 * MIB
    """Memory of one proxy process for entries not yet stored."""

    cache_timeout: float = 5.0
    """Timeout of reading an entry, in seconds; then features are computed."""

    cache_policy: str = ""
    """Storage policy of new cache containers; empty: the default policy."""

    places: tuple[str, ...] = (PLACE_PROXY,)
    """Places that compute features, first choice first: ``proxy``, by this
    host's worker, or ``object``, on an object server that has the object."""

    backend_key_file: str = DEFAULT_KEY_FILE
    """File of mode 0600 with the key that signs requests to object
    servers."""

    object_connect_timeout: float = 0.5
    """Timeout of a connection to an object server, in seconds."""

    object_silence_seconds: float = 4.0
    """Silence of an object server after which another one is asked; more
    than twice their ``beat_seconds``."""

    object_suppress_seconds: float = 60.0
    """Time for which an object server that did not answer, or that has no
    filter, is not asked again."""

    swift_dir: str = "/etc/swift"
    """Folder of the rings; usually set in ``[DEFAULT]``."""

    @classmethod
    def from_conf(
        cls, global_conf: Mapping[str, str], local_conf: Mapping[str, str]
    ) -> FilterConfig:
        """Parses the configuration that paste hands to a filter factory.

        Args:
            global_conf: the [DEFAULT] section and ``set`` values; other
                keys than our options are ignored.
            local_conf: the filter's section; every key must be known.

        Raises:
            ValueError: names the key, the value and what is allowed.
        """
        config = cls(
            **read_options("filter:hapi", OPTIONS, global_conf, local_conf)
        )
        _check_accounts(config)
        return config


@dataclass(frozen=True)
class ObjectFilterConfig:
    """Options of ``[filter:hapi_object]``; see
    ``object-server.conf-sample``."""

    backend_key_file: str = DEFAULT_KEY_FILE
    """File of mode 0600 with the key that signs requests of proxies."""

    worker_socket: str = DEFAULT_WORKER_SOCKET
    """Path of the worker's unix socket on this host."""

    worker_connect_timeout: float = 1.0
    """Timeout of a connection to the worker, in seconds."""

    worker_timeout: float = 120.0
    """Timeout of each step of the worker, in seconds."""

    addresses: frozenset[str] = frozenset()
    """``HOST:PORT`` of this server in the rings, if proxies reach it by a host
    name or a translated address; separated by commas."""

    beat_seconds: float = 1.0
    """Silence after which a beat shows the proxy that the answer goes on."""

    @classmethod
    def from_conf(
        cls, global_conf: Mapping[str, str], local_conf: Mapping[str, str]
    ) -> ObjectFilterConfig:
        """Parses the configuration, as :meth:`FilterConfig.from_conf`.

        Raises:
            ValueError: names the key, the value and what is allowed.
        """
        return cls(
            **read_options(
                "filter:hapi_object", OBJECT_OPTIONS, global_conf, local_conf
            )
        )


def read_options(
    section: str,
    parsers: Mapping[str, Callable[[str], Any]],
    global_conf: Mapping[str, str],
    local_conf: Mapping[str, str],
) -> dict[str, Any]:
    """Parses the options that a filter's section or ``[DEFAULT]`` has.

    Args:
        section: name of the section, for messages.
        parsers: parser of each option, by name.
        global_conf: the [DEFAULT] section; other keys are ignored.
        local_conf: the filter's section; every key must be known.

    Raises:
        ValueError: names the key, the value and what is allowed.
    """
    for key, value in local_conf.items():
        if key in parsers or key in _PASTE_KEYS:
            continue
        if not key.startswith(_LOG_PREFIXES):
            raise ValueError(
                f"[{section}] has the unknown option {key} = {value}; "
                f"allowed are {', '.join(sorted(parsers))}"
            )
    conf = {**global_conf, **local_conf}
    found = {}
    for name, parse in parsers.items():
        if name in conf:
            try:
                found[name] = parse(str(conf[name]).strip())
            except ValueError as error:
                raise ValueError(
                    f"[{section}] {name} = {conf[name]}: it must be {error}"
                ) from None
    return found


def _check_accounts(config: FilterConfig) -> None:
    prefix = config.reseller_prefix
    for account in sorted(config.allowed_accounts):
        if not account.startswith(prefix):
            raise ValueError(
                f"[filter:hapi] allowed_accounts has {account}, which no "
                f"caller is charged as: names begin with the reseller_prefix "
                f"{prefix}, for instance {prefix}{account}"
            )
    library = config.model_library
    if library and not library.startswith(prefix):
        raise ValueError(
            f"[filter:hapi] model_library = {library}: names of accounts "
            f"begin with the reseller_prefix {prefix}, for instance "
            f"{prefix}{library}"
        )


def _socket_path(value: str) -> str:
    length = len(value.encode())
    if not value.startswith("/") or length > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"an absolute path of at most {_MAX_SOCKET_PATH_BYTES} bytes"
        )
    return value


def _file_path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("an absolute path")
    return value


def _places(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    if len(set(names)) != len(names) or not {*names} <= {*PLACES}:
        raise ValueError(f"{', '.join(PLACES)}, or one of them")
    return names


def _seconds(value: str) -> float:
    expected = "a number of seconds above 0"
    try:
        seconds = float(value)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 < seconds < float("inf"):
        raise ValueError(expected)
    return seconds


def _bytes(value: str) -> int:
    return _count(value, "a number of bytes above 0")


def _whole_seconds(value: str) -> int:
    return _count(value, "a whole number of seconds above 0")


def _count(value: str, expected: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise ValueError(expected)
    return int(value)


def _number(smallest: int, largest: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        digits = value.isascii() and value.isdigit() and len(value) < 10
        if not (digits and smallest <= int(value) <= largest):
            raise ValueError(f"a whole number from {smallest} to {largest}")
        return int(value)

    return parse


def _policy(value: str) -> str:
    policy = POLICIES.get_by_name(value) if value else None
    if value and (policy is None or policy.is_deprecated):
        known = [each.name for each in POLICIES if not each.is_deprecated]
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
    found = set()
    for name in value.split(",") if value else []:
        host, _, port = name.strip().rpartition(":")
        if not (host and port.isascii() and port.isdigit()):
            raise ValueError("HOST:PORT, separated by commas")
        found.add(address_text(host, port))
    return frozenset(found)


def _container(value: str) -> str:
    parts = value.split("/")
    if value and (len(parts) != 2 or not all(map(_is_word, parts))):
        raise ValueError("ACCOUNT/CONTAINER, as AUTH_library/models, or empty")
    return value


def _is_word(text: str) -> bool:
    return bool(text) and not any(map(str.isspace, text))


OPTIONS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "worker_socket": _socket_path,
        "worker_connect_timeout": _seconds,
        "worker_timeout": _seconds,
        "max_object_bytes": _bytes,
        "max_package_bytes": _bytes,
        "max_multi_objects": _number(1, 100_000),
        "max_multi_object_bytes": _bytes,
        "multi_concurrency": _number(1, 64),
        "reseller_prefix": _prefix,
        "allow_unauthenticated_compute": _flag,
        "allowed_accounts": _accounts,
        "model_library": _container,
        "cache": _flag,
        "cache_ttl_seconds": _whole_seconds,
        "cache_max_entry_bytes": _bytes,
        "cache_max_account_bytes": _bytes,
        "cache_buffer_bytes": _bytes,
        "cache_timeout": _seconds,
        "cache_policy": _policy,
        "places": _places,
        "backend_key_file": _file_path,
        "object_connect_timeout": _seconds,
        "object_silence_seconds": _seconds,
        "object_suppress_seconds": _seconds,
        "swift_dir": _file_path,
    }
)
"""Parser of each option, by name."""

OBJECT_OPTIONS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "backend_key_file": _file_path,
        "worker_socket": _socket_path,
        "worker_connect_timeout": _seconds,
        "worker_timeout": _seconds,
        "addresses": _addresses,
        "beat_seconds": _seconds,
    }
)
"""Parser of each option of the object server's filter, by name."""

for _parsers, _kind in (
    (OPTIONS, FilterConfig),
    (OBJECT_OPTIONS, ObjectFilterConfig),
):
    if set(_parsers) != {field.name for field in fields(_kind)}:
        raise AssertionError(f"{_kind.__name__} and its parsers disagree")
