"""The proxy starts only if the filter has its place in the pipeline."""

import re

import pytest
from swift.common import registry
from swift.common.storage_policy import BaseStoragePolicy
from swift.common.wsgi import loadapp
from swift.proxy import server

from hapi_cluster.configs import pipeline
from hapi_cluster.settings import ClusterSettings

GOOD = (
    "catch_errors gatekeeper healthcheck proxy-logging cache listing_formats "
    "tempurl formpost s3api tempauth staticweb hapi copy container-quotas "
    "slo dlo versioned_writes symlink keymaster encryption proxy-logging"
)
_SPECIAL = {
    "hapi": "use = egg:swift-hapi#hapi",
    "cache": "use = egg:swift#memcache",
    "keymaster": (
        "use = egg:swift#keymaster\n"
        f"encryption_root_secret = {'MDEyMzQ1Njc4OWFi' * 4}"
    ),
    "authtoken": (
        "paste.filter_factory = keystonemiddleware.auth_token:filter_factory"
    ),
    "tempauth": "use = egg:swift#tempauth\nuser_test_tester = testing",
    "versioned_writes": (
        "use = egg:swift#versioned_writes\nallow_versioned_writes = true"
    ),
    "s3token": "use = egg:swift#s3token\nauth_uri = http://127.0.0.1:1/",
}


@pytest.fixture(autouse=True)
def no_rings(monkeypatch):
    """The proxy starts without rings, with an empty registry."""
    monkeypatch.setattr(server, "Ring", lambda *_, **__: None)
    monkeypatch.setattr(BaseStoragePolicy, "load_ring", lambda *_: None)
    monkeypatch.setattr(registry, "_swift_info", {})
    monkeypatch.setattr(registry, "_swift_admin_info", {})


def load(directory, names):
    path = directory / "proxy-server.conf"
    sections = [
        f"[pipeline:main]\npipeline = {names} proxy-server\n",
        "[app:proxy-server]\nuse = egg:swift#proxy\n",
    ]
    for name in sorted(set(names.split())):
        default = f"use = egg:swift#{name.replace('-', '_')}"
        sections.append(f"[filter:{name}]\n{_SPECIAL.get(name, default)}\n")
    path.write_text("\n".join(sections))
    return loadapp(str(path))


def swapped(name):
    """The correct pipeline with one filter on the other side of hapi."""
    names = GOOD.split()
    is_left = names.index(name) < names.index("hapi")
    names.remove(name)
    names.insert(names.index("hapi") + is_left, name)
    return " ".join(names)


@pytest.mark.parametrize(
    "names",
    [
        GOOD,
        "catch_errors gatekeeper cache tempauth hapi copy",
        "catch_errors authtoken keystoneauth hapi copy slo dlo",
        "hapi copy",
        *(
            " ".join(pipeline(ClusterSettings(encryption=is_encrypted))[:-1])
            for is_encrypted in (False, True)
        ),
    ],
)
def test_proxy_starts_with_the_filter_in_its_place(tmp_path, names):
    assert load(tmp_path, names)


LEFT = ("tempauth", "s3api", "tempurl", "formpost", "staticweb")
RIGHT = ("slo", "symlink", "encryption")
INSERTED = ("copy", "dlo", "versioned_writes")
"""Filters that Swift inserts, perhaps on the wrong side."""


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        *((swapped(name), f"{name} is right of hapi") for name in LEFT),
        *((swapped(name), f"{name} is left of hapi") for name in RIGHT),
        *((swapped(name), f"name {name} there") for name in INSERTED),
        (
            "catch_errors cache tempauth hapi",
            "name copy, dlo, versioned_writes",
        ),
        (GOOD.replace(" hapi ", " hapi hapi "), "hapi is listed twice"),
    ],
)
def test_filter_in_the_wrong_place_is_refused(tmp_path, names, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        load(tmp_path, names)
    assert "[filter:hapi]" in str(caught.value)


def test_keystones_filters_must_be_left_of_the_filter(tmp_path):
    names = "hapi authtoken s3token keystoneauth copy"
    with pytest.raises(ValueError, match="right of hapi") as caught:
        load(tmp_path, names)
    found = re.findall(r"(\S+) is right of hapi", str(caught.value))
    assert found == ["keystoneauth", "authtoken", "s3token"]
