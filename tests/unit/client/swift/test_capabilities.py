"""What ``/info`` says, in words."""

from __future__ import annotations

from hapi_client.swift.capabilities import hapi_rows, swift_rows


def test_a_store_that_says_little_is_told_of_as_far_as_it_goes():
    assert dict(swift_rows({})) == {
        "Swift": "of an unknown version",
        "largest object": "any size",
    }
    found = dict(hapi_rows({"version": 9}))
    assert found["protocol"] == "9; this client's 1"
    assert found["largest model package"] == "any size"
    assert found["feature cache"].startswith("off")
    assert found["profiles of packages"] == "no"
    assert "objects of one request" not in found


def test_what_swift_has_is_named():
    policies = [{"name": "gold", "default": True}, {"name": "ec"}]
    swift = {"version": "2.36", "max_file_size": 5, "policies": policies}
    assert dict(swift_rows({"swift": swift, "slo": {}, "x": {}})) == {
        "Swift": "2.36",
        "largest object": "5 B",
        "storage policies": "gold (default), ec",
        "it also has": "slo",
    }
