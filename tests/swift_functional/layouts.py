"""Settings of the clusters for Swift's tests, and the tests' own file."""

from __future__ import annotations

import configparser
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hapi_cluster import USERS
from hapi_cluster.configs import pipeline
from hapi_cluster.settings import ClusterSettings

STORAGE_DOMAIN = "example.net"
REGION = "us-east-1"
MAX_FILE_BYTES = 32 * 1024 * 1024 + 2
"""A test reserves four times the limit, and tmpfs takes that from memory."""

FILTER_OPTIONS: Mapping[str, str] = {
    "worker_connect_timeout": "2",
    "worker_timeout": "180",
    "max_object_bytes": str(1 << 20),
    "max_package_bytes": str(1 << 20),
    "max_multi_objects": "2",
    "max_multi_object_bytes": "1000",
    "multi_concurrency": "2",
    "reseller_prefix": "AUTH_",
    "allow_unauthenticated_compute": "true",
    "allowed_accounts": "AUTH_test,AUTH_test2",
    "cache": "true",
    "cache_ttl_seconds": "3600",
    "cache_max_entry_bytes": str(1 << 20),
    "cache_max_account_bytes": str(1 << 30),
    "cache_buffer_bytes": str(1 << 23),
    "cache_timeout": "10",
    "places": "object, proxy",
    "object_connect_timeout": "2",
    "object_silence_seconds": "10",
    "object_suppress_seconds": "5",
}
"""Other values than the defaults; limits below many objects of the tests."""

# Each filter goes right of the other one, as in Swift's sample.
_PLACES = (
    ("cache", "domain_remap"),
    ("cache", "etag-quoter"),
    ("tempurl", "ratelimit"),
    ("tempauth", "staticweb"),
)
_MORE_USERS = {
    "user_test_tester2": "testing2 .admin",
    "user_test5_tester5": "testing5 service",
}


@dataclass(frozen=True)
class TestedLayout:
    """A layout of a cluster with all of Swift's usual filters.

    Attributes:
        cluster: name of the layout in ``hapi_cluster``.
        encryption: encrypt objects at rest.
        s3_acl: "true" if s3api has ACLs of its own.
        quoted_etags: "true" if the etag-quoter is on.
    """

    cluster: str
    encryption: bool
    s3_acl: str
    quoted_etags: str


LAYOUTS: Mapping[str, TestedLayout] = {
    "plain": TestedLayout("single", False, "true", "false"),
    "ec+encryption": TestedLayout("mixed", True, "false", "true"),
}


def cluster_settings(name: str, key: Path | None) -> dict[str, Any]:
    """Settings of ``Cluster.start``; plain requests need no worker.

    Args:
        name: name of the layout.
        key: file with the key of both filters; None for no filters.
    """
    layout = LAYOUTS[name]
    has_filter = key is not None
    own_key = {"backend_key_file": str(key)} if has_filter else {}
    settings: dict[str, Any] = {
        "worker": False,
        "hapi_filter": has_filter,
        "layout": layout.cluster,
        "encryption": layout.encryption,
        "filter_options": {**FILTER_OPTIONS, **own_key},
    }
    names = pipeline(ClusterSettings(**settings))
    for left, name in _PLACES:
        names.insert(names.index(left) + 1, name)
    proxy = {
        "pipeline:main": {"pipeline": " ".join(names)},
        "app:proxy-server": {"allow_open_expired": "true"},
        "filter:tempauth": {
            **_MORE_USERS,
            "reseller_prefix": "AUTH, SERVICE",
            "SERVICE_require_group": "service",
        },
        "filter:s3api": {
            "s3_acl": layout.s3_acl,
            "check_bucket_owner": layout.s3_acl,
        },
        "filter:domain_remap": {
            "use": "egg:swift#domain_remap",
            "storage_domain": STORAGE_DOMAIN,
        },
        "filter:etag-quoter": {
            "use": "egg:swift#etag_quoter",
            "enable_by_default": layout.quoted_etags,
        },
        "filter:ratelimit": {"use": "egg:swift#ratelimit"},
        "filter:staticweb": {"use": "egg:swift#staticweb"},
    }
    constraints = {"max_file_size": str(MAX_FILE_BYTES)}
    near_disks = {
        "pipeline:main": {"pipeline": "healthcheck hapi_object object-server"},
        "filter:hapi_object": {
            "use": "egg:swift-hapi#hapi_object",
            **own_key,
        },
    }
    options = {
        "proxy-server.conf": proxy,
        "object-server.conf": near_disks if has_filter else {},
        "swift.conf": {"swift-constraints": constraints},
    }
    return {**settings, "swift_options": options}


def config_of_tests(name: str, auth_url: str) -> str:
    """Swift's ``test.conf`` for a cluster of that layout."""
    address = urlsplit(auth_url)
    endpoint = f"{address.scheme}://{address.netloc}/"
    parser = configparser.RawConfigParser()
    parser.read_dict(
        {
            "func_test": {
                "auth_uri": auth_url,
                **_account("test:tester", ""),
                **_account("test2:tester2", "2"),
                **_account("test:tester3", "3"),
                **_account("admin:admin", "6"),
                "account5": "test5",
                "username5": "tester5",
                "password5": "testing5",
                "service_prefix": "SERVICE",
                "s3_storage_url": endpoint,
                "s3_region": REGION,
                **_s3_keys("s3_", ("", "2", "3")),
                "storage_domain": STORAGE_DOMAIN,
                "collate": "C",
            },
            "s3api_test": {
                "endpoint": endpoint,
                "region": REGION,
                **_s3_keys("", ("1", "2", "3")),
                "s3_acl_tests_enabled": LAYOUTS[name].s3_acl,
            },
        }
    )
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def _account(user: str, number: str) -> dict[str, str]:
    values = (*user.split(":"), USERS[user][0])
    names = ("account", "username", "password")
    return {f"{n}{number}": v for n, v in zip(names, values, strict=True)}


def _s3_keys(prefix: str, numbers: Sequence[str]) -> dict[str, str]:
    """The keys of two owners of one account, and of its other user."""
    keys = {}
    for number, user in zip(numbers, ("", "2", "3"), strict=True):
        keys[f"{prefix}access_key{number}"] = f"test:tester{user}"
        keys[f"{prefix}secret_key{number}"] = f"testing{user}"
    return keys
