"""Packages in the store: listing, reading and selection."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from hapi_client.model import package_store
from hapi_client.model.package_store import (
    StoredPackage,
    find_package,
    list_packages,
    older_than,
    read_all_metadata,
    select_packages,
)
from hapi_client.swift.account import ObjectInfo
from hapi_protocol.errors import ClientError, PackageError, RightsError
from hapi_protocol.headers import ModelPath
from hapi_splitter.freezing.split_model import split
from hapi_splitter.package.header import encode_header, parse_header
from hapi_splitter.package.metadata import PackageMetadata
from hapi_splitter.package.writer import package_bytes
from networks import small_network, small_transform
from scripted_swift import Answer

MIDNIGHT = "T00:00:00.000000"
NOW = datetime(2026, 3, 31, 12, tzinfo=timezone.utc)
HEAD = {
    "sample": [3, 8, 8],
    "cuts": [{"call": 2, "shape": [4, 2]}],
    "names": ["a", "b"],
    "producer": {"torch": "2"},
    "transform": None,
}


def package_start(document):
    return encode_header({"hapi.json": document, "graph.json": {}}, {})


def stored(start, days=0, length_bytes=7):
    digest = start.ljust(64, "0")
    when = (NOW - timedelta(days=days)).replace(tzinfo=None)
    info = ObjectInfo(f"{digest}.hapi", "e", length_bytes, when.isoformat())
    return StoredPackage(digest, info)


@pytest.fixture(scope="module")
def frozen():
    return split(small_network(), "body", transform=small_transform()).frozen


def test_metadata_are_those_of_the_region(frozen):
    data = package_bytes(frozen)
    metadata = PackageMetadata.from_bytes(data[: parse_header(data).end])
    assert metadata.sample_shape == frozen.input_shape
    assert set(metadata.producer) == {"torch", "torchvision"}
    assert [
        (cut.index, cut.module, cut.shape, cut.sample_bytes)
        for cut in metadata.cuts
    ] == [
        (cut.index, cut.name, cut.shape, cut.bytes_per_sample)
        for cut in frozen.cuts
    ]
    assert metadata.transform == frozen.transform.to_json()
    weights = frozen.weights.values()
    assert metadata.num_values == sum(weight.numel() for weight in weights)
    assert metadata.weight_bytes == sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"graph.json"', b'"Graph.json"'),
        (b'"shape":[', b'"shade":['),
        (b'\\"call\\":', b'\\"cell\\":'),
        (b'"dtype":"F32"', b'"dtype":"F32'),
    ],
)
def test_metadata_of_a_damaged_package_are_refused(frozen, old, new):
    damaged = package_bytes(frozen).replace(old, new)
    assert damaged != package_bytes(frozen)
    with pytest.raises(PackageError):
        PackageMetadata.from_bytes(damaged)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"no package" * 20,
        package_start(HEAD)[:-1],
        package_start([]),
        package_start({**HEAD, "cuts": []}),
        package_start({**HEAD, "cuts": [{"call": 9, "shape": [4]}]}),
        package_start({**HEAD, "sample": None}),
        package_start({**HEAD, "producer": 1}),
        package_start({}),
        b"\xff" * 64,
    ],
)
def test_damaged_header_is_refused(data):
    with pytest.raises(PackageError):
        PackageMetadata.from_bytes(data)


def test_only_packages_are_listed_with_the_newest_first(swift, connection):
    digests = ("a" * 64, "b" * 64, "c" * 63, "D" * 64)
    names = (*(f"{digest}.hapi" for digest in digests), "README")
    entry = {"hash": "e", "bytes": 1}
    entries = [
        entry | {"name": name, "last_modified": f"2026-01-0{day}{MIDNIGHT}"}
        for day, name in enumerate(names, 1)
    ]
    swift.script(Answer(200, json.dumps(entries).encode()))
    packages = list_packages(connection, "m")
    assert [stored.digest for stored in packages] == ["b" * 64, "a" * 64]
    assert packages[0].stored == datetime(2026, 1, 2, tzinfo=timezone.utc)


def test_long_header_is_read_to_its_end(swift, connection):
    data = package_start({**HEAD, "names": ["a", "n" * 70_000]})
    package = stored("a", length_bytes=len(data) + 1000)
    swift.script(Answer(206, data[: 64 * 1024]), Answer(206, data))
    [metadata] = read_all_metadata(connection, "m", [package])
    assert metadata.cuts[-1].module == "n" * 70_000
    ranges = [request.headers["Range"] for request in swift.requests]
    assert ranges == ["bytes=0-65535", f"bytes=0-{len(data) - 1}"]


@pytest.mark.parametrize(
    ("answer", "length_bytes", "kind"),
    [
        (Answer(206, b"nothing"), 7, PackageError),
        (Answer(206, b""), 0, PackageError),
        (Answer(403), 7, RightsError),
        (Answer(404), 7, RightsError),
        (Answer(412), 7, RightsError),
    ],
)
def test_unreadable_package_gives_an_error_in_its_place(
    swift, connection, answer, length_bytes, kind
):
    swift.script(answer)
    package = stored("a", length_bytes=length_bytes)
    [outcome] = read_all_metadata(connection, "m", [package])
    assert isinstance(outcome, kind)


def test_packages_are_selected_by_prefix():
    first, _, third = packages = [stored(d) for d in ("a1", "a2", "b")]
    assert select_packages(packages, ["A1", "b", "b0"]) == [first, third]
    with pytest.raises(ClientError) as caught:
        select_packages(packages, ["b", "a", "ff", "ee"])
    for words in ("'a' is ambiguous: a100000000000000, a2", "'ff'", "'ee'"):
        assert words in caught.value.message


def test_age_is_counted_from_the_time_of_storage():
    packages = [stored("a", 1), stored("b", 29.9), stored("c", 30.1)]
    assert older_than(packages, timedelta(days=30), NOW) == [packages[2]]


NAME = f"{'d' * 64}.hapi"
THE_PACKAGE = Answer(headers={"ETag": '"md5"'})
OTHER_BYTES = Answer(headers={"ETag": "other"})
INFO = Answer(
    body=json.dumps(
        {"hapi": {"version": 1, "model_library": "AUTH_lib/m"}}
    ).encode()
)


def find(connection):
    return find_package(connection, "own", "d" * 64, lambda: "md5")


def test_own_package_needs_no_library(swift, connection):
    swift.script(THE_PACKAGE)
    assert find(connection) == ModelPath("AUTH_test", "own", NAME)
    assert len(swift.requests) == 1


@pytest.mark.parametrize("own", [Answer(404), OTHER_BYTES])
def test_package_is_found_in_the_library_by_one_request(
    swift, connection, own
):
    swift.script(own, INFO, THE_PACKAGE)
    assert find(connection) == ModelPath("AUTH_lib", "m", NAME)
    assert [(request.method, request.path) for request in swift.requests] == [
        ("HEAD", f"/v1/AUTH_test/own/{NAME}"),
        ("GET", "/info"),
        ("HEAD", f"/v1/AUTH_lib/m/{NAME}"),
    ]
    assert swift.requests[-1].headers["X-Auth-Token"] == "token1"


@pytest.mark.parametrize(
    "answers",
    [
        (INFO, Answer(403)),
        (INFO, Answer(404)),
        (INFO, Answer(503)),
        (INFO, Answer(401), Answer(401)),
        (INFO, OTHER_BYTES),
        (INFO, Answer()),
        (INFO, Answer(headers=THE_PACKAGE.headers, hang_seconds=30)),
        (Answer(404),),
        (Answer(body=b"{}"),),
        (Answer(body=b'{"hapi": {"version": 1}}'),),
    ],
)
def test_library_that_fails_counts_as_one_without_the_package(
    swift, connection, answers, monkeypatch
):
    monkeypatch.setattr(package_store, "LIBRARY_SECONDS", 0.3)
    swift.script(Answer(404), *answers, Answer(500))
    assert find(connection) is None
    # The library is asked once, without retries.
    assert len(swift.requests) == 1 + len(answers)


def test_unreadable_container_of_ones_own_is_an_error(swift, connection):
    swift.script(Answer(403))
    with pytest.raises(RightsError):
        find(connection)
