"""Capabilities of a store from its ``/info``."""

import pytest

from hapi_client.swift.capabilities import (
    hapi_rows,
    model_library,
    swift_rows,
)


def test_missing_capabilities_are_left_out_or_unlimited():
    assert dict(swift_rows({})) == {
        "Swift": "unknown version",
        "largest object": "any size",
    }
    rows = dict(hapi_rows({"version": 9}))
    assert rows["protocol"] == "9; this client's 1"
    assert rows["largest model package"] == "any size"
    assert rows["feature cache"].startswith("off")
    assert rows["profiles of packages"] == "no"
    assert rows["model library"].startswith("none")
    assert "objects of one request" not in rows


def test_capabilities_of_swift_are_named():
    policies = [{"name": "gold", "default": True}, {"name": "ec"}]
    swift = {"version": "2.36", "max_file_size": 5, "policies": policies}
    assert dict(swift_rows({"swift": swift, "slo": {}, "x": {}})) == {
        "Swift": "2.36",
        "largest object": "5 B",
        "storage policies": "gold (default), ec",
        "it also has": "slo",
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"model_library": "AUTH_a/b"}, ("AUTH_a", "b")),
        ({"model_library": ""}, None),
        ({"model_library": "AUTH_a/"}, None),
        ({"model_library": None}, None),
        ({}, None),
    ],
)
def test_model_library_is_account_and_container(section, expected):
    assert model_library(section) == expected
    rows = dict(hapi_rows({"version": 1, **section}))
    if expected:
        assert rows["model library"] == "/".join(expected)
