"""Every kind of object x every kind of caller, on a real Swift and worker.

A caller that Swift refuses the plain GET is refused with the same status;
one that may GET gets rows with the same bits as a local computation's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from access_methods import (
    TEMPURL_KEY,
    AccessMethod,
    Answer,
    Target,
    by_presigned_url,
    by_s3,
    by_temporary_url,
    by_token,
    s3_client,
    signature,
)
from caller import Caller
from hapi_splitter.cuts import FrozenGraph
from local_rows import Rows, local_rows, place_of, received_rows
from networks import small_parts
from objects_of_kinds import KINDS, make_containers, store
from photos import jpegs, shard
from second_swift import ASKED, CUT, put_model, second_swift
from waiting import until

pytest.importorskip("boto3", reason="S3 clients use boto3")

OWNER, READER, STRANGER = "test:tester", "test:tester3", "test2:tester2"

VERBS = {"shard": "tar", "part": "tar", "kept": "tar", "image": "jpg"}
"""A kind of request and its objects.  A part is a range of bytes; kept
features have been kept for the owner before."""
SUFFIXES = ("tar", "jpg")
PART = range(1, 3)
"""Samples."""

YES = dict.fromkeys(KINDS, 200)
EXPECTED = {
    # Status of the plain GET, and so of the annotated one.
    "owner": YES,
    # Old versions lie in a container that no read ACL opens.
    "reader": {**YES, "version": 403},
    "stranger": dict.fromkeys(KINDS, 403),
    "anonymous": dict.fromkeys(KINDS, 401),
    "public": {**YES, "version": 401},
    "tempurl": YES,
    "s3": YES,
    "s3-reader": {**YES, "version": 403},
    # Another account's buckets cannot be named in S3.
    "s3-stranger": dict.fromkeys(KINDS, 404),
    "presigned": YES,
}
# What Swift made has no owner in S3, and is nobody's; links are followed.
GRANTED = {**YES, "dlo": 403}
UNDER_S3_ACL = {
    "s3": GRANTED,
    "s3-granted": GRANTED,
    "s3-reader": dict.fromkeys(KINDS, 403),
    "s3-stranger": dict.fromkeys(KINDS, 404),
    "presigned": GRANTED,
}


def cases(table):
    """Caller, kind, verb and status; a part is asked for where it is had."""
    return [
        (caller, kind, verb, status)
        for caller, statuses in table.items()
        for kind, status in statuses.items()
        for verb in VERBS
        if status == 200 or verb != "part"
    ]


@dataclass
class World:
    """A cluster with the objects of the matrix.

    Attributes:
        targets: by container, suffix and kind.
        contents: by suffix and age: what the objects hold, or held.
        computed: rows by verb, name and content.
        plain: answers to plain GETs by caller and target.
        kept: cached features that the owner sees.
    """

    frozen: FrozenGraph
    owner: Caller
    access_methods: dict[str, AccessMethod]
    contents: dict[tuple[str, str], bytes]
    callers: dict[str, Caller] = field(default_factory=dict)
    targets: dict[tuple[str, str, str], Target] = field(default_factory=dict)
    computed: dict[tuple[str, str, bytes], Rows] = field(default_factory=dict)
    plain: dict[tuple[str, Target], Answer] = field(default_factory=dict)
    kept: dict[Target, str] = field(default_factory=dict)

    def get(self, caller, target):
        """The plain GET, once."""
        known = self.plain
        if (caller, target) not in known:
            known[caller, target] = self.access_methods[caller](target, {})
        return known[caller, target]

    def rows(self, verb, target, content):
        """Computed here, once."""
        known, key = self.computed, (verb, target.name, content)
        if key not in known:
            wanted = PART if verb == "part" else None
            known[key] = local_rows(
                self.frozen, CUT, content, target.name, wanted
            )
        return known[key]

    def asked(self, verb, target, content):
        """The annotation, for a target that has this content."""
        if verb == "kept":
            self.keep(target)
            return {**ASKED, "X-Hapi-Cache": "read"}
        if verb != "part":
            return ASKED
        version = f"?version-id={target.version}" if target.version else ""
        head = self.owner.request("HEAD", target.path + version)
        first, last = place_of(content, PART)
        return {
            **ASKED,
            "X-Hapi-Samples": f"{PART.start}-{PART.stop - 1}",
            "X-Hapi-Range": f"bytes={first}-{last}",
            "X-Hapi-If-Source-Etag": head.headers["ETag"].strip('"'),
        }

    def keep(self, target):
        """The owner finds the features kept; those of manifests never are."""
        headers = {**ASKED, "X-Hapi-Cache": "readwrite"}

        def is_known():
            answer = by_token(self.owner)(target, headers)
            self.kept[target] = answer.headers["x-hapi-cache"]
            return self.kept[target] in ("hit", "off")

        if target not in self.kept:
            until(is_known)


@pytest.fixture(scope="module")
def frozen():
    return small_parts().frozen


def contents():
    (first, _), (second, _) = jpegs(2, seed=5)
    return {
        ("tar", "now"): shard(9, seed=5),
        ("tar", "later"): shard(3, seed=6),
        ("jpg", "now"): first,
        ("jpg", "later"): second,
    }


@pytest.fixture(scope="module")
def ec_encrypted_cluster(cluster):
    with second_swift(cluster, layout="ec", encryption=True) as running:
        yield running


@pytest.fixture(
    scope="module", params=["open_cluster", "ec_encrypted_cluster"]
)
def world(request, frozen):
    running = request.getfixturevalue(request.param)
    owner = Caller(running)
    key = {"X-Account-Meta-Temp-URL-Key": TEMPURL_KEY}
    owner.request("POST", "/AUTH_test", key).raise_for_status()
    put_model(owner, frozen)
    callers = {
        "owner": owner,
        "reader": Caller(running, READER),
        "stranger": Caller(running, STRANGER),
        "anonymous": Caller(running, None),
        "public": Caller(running, None),
    }
    s3 = s3_client(running, OWNER)
    access_methods = {
        **{name: by_token(caller) for name, caller in callers.items()},
        "tempurl": by_temporary_url(running),
        "s3": by_s3(s3),
        "s3-reader": by_s3(s3_client(running, READER)),
        "s3-stranger": by_s3(s3_client(running, STRANGER)),
        "presigned": by_presigned_url(s3),
    }
    found = World(frozen, owner, access_methods, contents(), callers)
    for container, acl in (
        ("matrix", READER),
        ("matrix-public", ".r:*,.rlistings"),
    ):
        make_containers(owner, container, acl)
        for suffix in SUFFIXES:
            ages = (found.contents[suffix, age] for age in ("now", "later"))
            made = store(owner, container, suffix, *ages)
            for kind, target in made.items():
                found.targets[container, suffix, kind] = target
    return found


@pytest.mark.parametrize(("caller", "kind", "verb", "status"), cases(EXPECTED))
def test_annotated_get_is_the_plain_get_with_rows(
    world, caller, kind, verb, status
):
    container = "matrix-public" if caller == "public" else "matrix"
    target = world.targets[container, VERBS[verb], kind]
    check(world, caller, verb, target, status)


def check(world, caller, verb, target, status):
    """Plain and annotated GET have the status, and the content's rows."""
    age, seen = "now", target
    if caller == "tempurl" and target.version:
        # TempURL drops the query and so names the present version.
        age, seen = "later", replace(target, version=None)
    content = world.contents[VERBS[verb], age]
    plain = world.get(caller, target)
    found = world.access_methods[caller](
        target, world.asked(verb, seen, content)
    )
    assert (plain.status, found.status) == (status, status), found.body[:500]
    if status != 200:
        assert found == plain
        return
    assert plain.body == content
    rows = world.rows(verb, target, content)
    received_rows(found.body).assert_equal(rows)
    if verb == "kept" and found.headers:
        is_manifest = target.name.startswith(("slo", "dlo"))
        assert world.kept[seen] == ("off" if is_manifest else "hit")
        assert found.headers["x-hapi-cache"] == world.kept[seen]


MANY = ("owner", "reader", "stranger", "anonymous", "public")
"""Callers that may POST; S3 has no such request."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", MANY)
def test_post_for_objects_is_their_plain_gets_with_rows(world, caller, kind):
    """Reads current versions: names have no query."""
    container = "matrix-public" if caller == "public" else "matrix"
    named = replace(world.targets[container, "jpg", kind], version=None)
    age = "later" if kind == "version" else "now"
    status = EXPECTED[caller]["plain"]
    plain = world.get(caller, named)
    path = f"/{named.account}/{named.container}?hapi"
    answer = world.callers[caller].request(
        "POST", path, ASKED, named.name.encode()
    )

    assert (plain.status, answer.status_code) == (status, status), answer.text
    if status != 200:
        assert Answer.of(answer) == plain
        return
    wanted = world.rows("image", named, world.contents["jpg", age])
    found = received_rows(answer.content)
    assert found.facts == [(0, named.name, None)]
    replace(found, facts=wanted.facts).assert_equal(wanted)


def test_temporary_url_opens_no_request_for_many(world):
    path = "/AUTH_test/matrix"
    for signed in (path, f"{path}/plain.jpg"):
        query = f"hapi&{signature(signed, 'POST')}"
        answer = world.callers["anonymous"].request(
            "POST", f"{path}?{query}", ASKED, b"plain.jpg"
        )
        assert answer.status_code == 401


@pytest.fixture(scope="module")
def acl_world(cluster, frozen):
    s3api = {"s3_acl": "true", "min_segment_size": "1"}
    options = {"proxy-server.conf": {"filter:s3api": s3api}}
    with second_swift(cluster, swift_options=options) as running:
        owner = Caller(running)
        put_model(owner, frozen)
        s3 = s3_client(running, OWNER)
        reader = by_s3(s3_client(running, READER))
        access_methods = {
            "s3": by_s3(s3),
            "s3-granted": reader,
            "s3-reader": reader,
            "s3-stranger": by_s3(s3_client(running, STRANGER)),
            "presigned": by_presigned_url(s3),
        }
        found = World(frozen, owner, access_methods, contents())
        for bucket, grant in (
            ("matrix", {}),
            ("matrix-granted", {"GrantRead": f'id="{READER}"'}),
        ):
            store_by_s3(s3, owner, found, bucket, grant)
        yield found


def store_by_s3(s3, owner, world, bucket, grant):
    """The kinds that S3 has, and two that Swift makes in its bucket."""
    versioned, enabled = f"{bucket}-old", {"Status": "Enabled"}
    s3.create_bucket(Bucket=bucket)
    s3.create_bucket(Bucket=versioned)
    s3.put_bucket_versioning(Bucket=versioned, VersioningConfiguration=enabled)
    for suffix in SUFFIXES:
        content = world.contents[suffix, "now"]
        plain = {"Bucket": bucket, "Key": f"plain.{suffix}"}
        s3.put_object(**plain, Body=content, **grant)
        put_in_parts(s3, bucket, f"slo.{suffix}", content, grant)
        base, first = f"/AUTH_test/{bucket}", f"{bucket}/plain.{suffix}"
        for kind, header in (
            ("symlink", "X-Symlink-Target"),
            ("dlo", "X-Object-Manifest"),
        ):
            owner.put(f"{base}/{kind}.{suffix}", headers={header: first})
        old = {"Bucket": versioned, "Key": f"version.{suffix}"}
        version = s3.put_object(**old, Body=content, **grant)["VersionId"]
        s3.put_object(**old, Body=world.contents[suffix, "later"], **grant)
        for kind in KINDS:
            target = Target("AUTH_test", bucket, f"{kind}.{suffix}")
            if kind == "version":
                target = replace(target, container=versioned, version=version)
            world.targets[bucket, suffix, kind] = target


def put_in_parts(s3, bucket, key, content, grant):
    """A multipart upload of two parts."""
    where = {"Bucket": bucket, "Key": key}
    upload = s3.create_multipart_upload(**where, **grant)["UploadId"]
    where["UploadId"] = upload
    middle = len(content) // 2
    parts = []
    for number, part in enumerate((content[:middle], content[middle:]), 1):
        made = s3.upload_part(**where, PartNumber=number, Body=part)
        parts.append({"PartNumber": number, "ETag": made["ETag"]})
    s3.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})


@pytest.mark.parametrize(
    ("caller", "kind", "verb", "status"), cases(UNDER_S3_ACL)
)
def test_annotated_get_under_s3_acl_is_the_plain_get_with_rows(
    acl_world, caller, kind, verb, status
):
    bucket = "matrix-granted" if caller == "s3-granted" else "matrix"
    target = acl_world.targets[bucket, VERBS[verb], kind]
    check(acl_world, caller, verb, target, status)
