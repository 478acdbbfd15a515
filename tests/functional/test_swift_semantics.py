"""Other features of Swift together with an annotation."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest
import requests

from access_methods import (
    TEMPURL_KEY,
    Answer,
    s3_client,
    signature,
    with_headers,
)
from caller import SECONDS, Caller
from hapi_cluster import Cluster
from hapi_protocol.headers import CONTENT_TYPE_STREAM
from local_rows import received_rows
from networks import small_parts
from photos import shard
from second_swift import ASKED, put_model, second_swift
from waiting import until

OWNER, READER, STRANGER = "test:tester", "test:tester3", "test2:tester2"
CONTENT = shard(3, seed=9)
NUM_ROWS = 3
PLACE = "/AUTH_test/semantics"
SOURCE = f"{PLACE}/data.tar"
PRIVATE = "/AUTH_test/sem-private"
S3_FROM = {"Bucket": "semantics", "Key": "data.tar"}
HOME = {"X-Hapi-Model": f"{PRIVATE}/a.hapi", "X-Hapi-Cut": "1"}
"""Asks by a model that its owner alone may read."""


@dataclass
class Swift:
    """A cluster, its owner, and what the owner has put there.

    SOURCE may be read by READER and by everybody, what lies in PRIVATE by
    the owner only.
    """

    cluster: Cluster
    callers: dict[str | None, Caller]

    @property
    def owner(self):
        return self.callers[OWNER]

    def get(self, user, path, headers=None):
        return self.callers[user].get(path, headers or {})

    def allow(self, container, acl):
        headers = {"X-Container-Read": acl}
        self.owner.request("POST", container, headers).raise_for_status()


@pytest.fixture(scope="module")
def swift(open_cluster):
    users = (OWNER, READER, STRANGER, "admin:admin", None)
    found = Swift(
        open_cluster, {user: Caller(open_cluster, user) for user in users}
    )
    owner = found.owner
    key = {"X-Account-Meta-Temp-URL-Key": TEMPURL_KEY}
    owner.request("POST", "/AUTH_test", key).raise_for_status()
    put_model(owner, small_parts().frozen)
    for container in (PLACE, PRIVATE):
        owner.put(container)
        owner.put(f"{container}/data.tar", CONTENT)
    owner.put(f"{PLACE}/old.tar", CONTENT, {"X-Delete-After": "1"})
    package = owner.get("/AUTH_test/public-models/net.hapi").content
    owner.put(f"{PRIVATE}/a.hapi", package)
    owner.put(f"{PLACE}/old.hapi", package, {"X-Delete-After": "1"})
    found.allow(PLACE, f"{READER},{STRANGER},.r:*")
    yield found
    for caller in found.callers.values():
        caller.close()


def assert_computed(answer):
    assert answer.status_code == 200, answer.text[:500]
    assert answer.headers["Content-Type"] == CONTENT_TYPE_STREAM
    assert len(received_rows(answer.content).facts) == NUM_ROWS


def told(answer, *hidden):
    """All that an answer says, but for what no two requests share.

    Args:
        hidden: names of the request, of one length, that may come back.
    """
    text = re.sub(r'"trans_id": "[^"]*"', "", answer.text)
    headers = str(sorted(Answer.of(answer).headers.items()))
    for name in hidden:
        text = text.replace(name, "…")
        headers = headers.replace(name, "…")
    return answer.status_code, headers, text


@pytest.mark.parametrize("user", [READER, STRANGER, None])
def test_slo_with_segments_that_cannot_be_read_is_its_plain_get(swift, user):
    manifest = json.dumps([{"path": "/sem-private/data.tar"}]).encode()
    swift.owner.put(f"{PLACE}/slo.tar?multipart-manifest=put", manifest)
    plain = swift.get(user, f"{PLACE}/slo.tar")
    answer = swift.get(user, f"{PLACE}/slo.tar", ASKED)

    assert plain.status_code == 409
    assert told(answer) == told(plain)
    assert_computed(swift.get(OWNER, f"{PLACE}/slo.tar", ASKED))


def test_expired_object_is_its_plain_get(swift):
    until(lambda: swift.get(OWNER, f"{PLACE}/old.hapi").status_code != 200)
    plain = swift.get(OWNER, f"{PLACE}/old.tar")
    answer = swift.get(OWNER, f"{PLACE}/old.tar", ASKED)

    assert plain.status_code == 404
    assert told(answer) == told(plain)
    by_old_model = {**ASKED, "X-Hapi-Model": f"{PLACE}/old.hapi"}
    answer = swift.get(OWNER, SOURCE, by_old_model)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_reader_by_an_acl_of_the_account_computes(swift):
    acl = "X-Account-Access-Control"
    readers = json.dumps({"read-only": [STRANGER]})
    swift.owner.request("POST", "/AUTH_test", {acl: readers})
    path = f"{PRIVATE}/data.tar"
    try:
        assert_computed(swift.get(STRANGER, path, HOME))
    finally:
        swift.owner.request("POST", "/AUTH_test", {acl: ""})
    answer = swift.get(STRANGER, path, HOME)
    assert told(answer) == told(swift.get(STRANGER, path))
    assert answer.status_code == 403


def test_quotas_are_kept(swift):
    """A container's and an account's; objects there are computed."""
    caller = swift.callers[STRANGER]
    place, account = "/AUTH_test2/sem-quota", "/AUTH_test2"
    caller.put(place)
    caller.put(f"{place}/data.tar", CONTENT)
    for user, path, name in (
        (STRANGER, place, "X-Container-Meta-Quota-Bytes"),
        ("admin:admin", account, "X-Account-Meta-Quota-Bytes"),
    ):
        setter = swift.callers[user]
        setter.request("POST", path, {name: "1"}).raise_for_status()
        try:
            refused = caller.request(
                "PUT", f"{place}/more", dict(ASKED), b"too much"
            )
            assert refused.status_code == 413, path
            assert_computed(caller.get(f"{place}/data.tar", ASKED))
        finally:
            setter.request("POST", path, {name: ""}).raise_for_status()


@pytest.mark.parametrize(
    ("name", "path", "headers", "body"),
    [
        ("link", "link", {"X-Symlink-Target": "sem-private/a.hapi"}, b""),
        ("dlo", "dlo", {"X-Object-Manifest": "sem-private/a"}, b""),
        (
            "slo",
            "slo?multipart-manifest=put",
            {},
            b'[{"path": "/sem-private/a.hapi"}]',
        ),
    ],
)
def test_link_to_a_model_needs_the_right_on_it_and_manifests_are_refused(
    swift, name, path, headers, body
):
    swift.owner.put(f"{PLACE}/{path}", body, headers)
    asked = {**ASKED, "X-Hapi-Model": f"{PLACE}/{name}"}
    answer = swift.get(OWNER, SOURCE, asked)

    if name == "link":
        assert_computed(answer)
        assert swift.get(READER, SOURCE, asked).status_code == 403
    else:
        assert answer.status_code == 422
        assert answer.json()["code"] == "package_is_manifest"


@pytest.fixture(scope="module")
def alone(open_cluster):
    """Callers of a Swift without the filter, with the same object."""
    with second_swift(open_cluster, hapi_filter=False) as cluster:
        callers = {user: Caller(cluster, user) for user in (OWNER, READER)}
        callers["admin:admin"] = Caller(cluster, "admin:admin")
        callers[None] = Caller(cluster, None)
        for container in (PLACE, PRIVATE):
            callers[OWNER].put(container)
        callers[OWNER].put(f"{PRIVATE}/data.tar", CONTENT)
        yield Swift(cluster, callers)
        for caller in callers.values():
            caller.close()


def test_deletion_of_the_cache_is_none_of_the_account_to_swift_alone(alone):
    path = "/AUTH_test?hapi-cache"
    answer = alone.callers["admin:admin"].request("DELETE", path)

    assert answer.status_code == 400
    assert "semantics" in alone.get(OWNER, "/AUTH_test").text.split()


@pytest.mark.parametrize(
    ("method", "name", "headers", "user"),
    [
        ("GET", "data.tar", {}, OWNER),
        ("HEAD", "data.tar", {}, OWNER),
        ("GET", "data.tar", {"Range": "bytes=3-9"}, OWNER),
        ("GET", "data.tar", {"If-None-Match": "*"}, OWNER),
        ("GET", "data.tar", {}, READER),
        ("GET", "data.tar", {}, None),
        ("GET", "none", {}, OWNER),
        ("OPTIONS", "data.tar", {}, None),
        ("POST", "data.tar", {"X-Object-Meta-Colour": "blue"}, OWNER),
    ],
)
def test_plain_request_is_answered_as_without_the_filter(
    swift, alone, method, name, headers, user
):
    answers = []
    for each in (swift, alone):
        caller = each.callers[user]
        path = f"{PRIVATE}/{name}"
        answer = Answer.of(caller.request(method, path, headers))
        fields = dict(answer.headers)
        for changing in ("last-modified", "x-timestamp"):
            fields.pop(changing, None)
        # Swift writes a set, in any order.
        fields["allow"] = sorted(fields.get("allow", "").split(", "))
        answers.append(replace(answer, headers=fields))

    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def s3(swift):
    pytest.importorskip("boto3", reason="S3 clients use boto3")
    return s3_client(swift.cluster, OWNER)


def test_s3_copy_and_head_with_an_annotation_are_the_plain_ones(swift, s3):
    copy = {"Bucket": "semantics", "Key": "s3-copy.tar"}
    with_headers(s3, ASKED, lambda: s3.copy_object(**copy, CopySource=S3_FROM))
    head = with_headers(s3, ASKED, lambda: s3.head_object(**S3_FROM))

    assert head["ContentLength"] == len(CONTENT)
    assert swift.get(OWNER, f"{PLACE}/s3-copy.tar").content == CONTENT


def test_s3_parts_with_an_annotation_are_copied_listed_and_deleted(swift, s3):
    """Also the deletion needs a HEAD that says: multipart."""
    where = {"Bucket": "semantics", "Key": "s3-parts.tar"}
    upload = s3.create_multipart_upload(**where)["UploadId"]
    upload = {**where, "UploadId": upload}

    def calls():
        copied = s3.upload_part_copy(
            **upload, PartNumber=1, CopySource=S3_FROM
        )
        [listed] = s3.list_parts(**upload)["Parts"]
        assert (listed["PartNumber"], listed["Size"]) == (1, len(CONTENT))
        tag = copied["CopyPartResult"]["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        s3.complete_multipart_upload(**upload, MultipartUpload=parts)

    with_headers(s3, ASKED, calls)
    assert swift.get(OWNER, f"{PLACE}/s3-parts.tar").content == CONTENT
    with_headers(s3, ASKED, lambda: s3.delete_object(**where))
    left = swift.get(OWNER, f"{PLACE}+segments?prefix=s3-parts")
    assert (left.status_code, left.text) == (204, "")


def test_s3_client_is_told_that_nothing_changed(swift, s3):
    from botocore.exceptions import ClientError

    found = with_headers(s3, ASKED, lambda: s3.get_object(**S3_FROM))
    assert len(received_rows(found["Body"].read()).facts) == NUM_ROWS
    again = {**S3_FROM, "IfNoneMatch": found["ETag"]}
    with pytest.raises(ClientError, match="304"):
        with_headers(s3, ASKED, lambda: s3.get_object(**again))


ORIGIN = "https://app.example.com"


@pytest.fixture(scope="module")
def shared(swift):
    """A path in a container that admits ORIGIN."""
    meta = "X-Container-Meta-Access-Control"
    headers = {
        f"{meta}-Allow-Origin": ORIGIN,
        f"{meta}-Expose-Headers": "X-Of-The-Owner",
        "X-Container-Read": ".r:*",
    }
    swift.owner.put("/AUTH_test/sem-cors", headers=headers)
    path = "/AUTH_test/sem-cors/data.tar"
    swift.owner.put(path, CONTENT, {"X-Object-Meta-Colour": "blue"})
    return path


def test_allowed_origin_sees_our_headers_and_swifts(swift, shared):
    plain = swift.get(None, shared, {"Origin": ORIGIN})
    answer = swift.get(None, shared, {**ASKED, "Origin": ORIGIN})
    allow, expose = (
        f"Access-Control-{name}" for name in ("Allow-Origin", "Expose-Headers")
    )

    assert_computed(answer)
    assert answer.headers[allow] == plain.headers[allow] == ORIGIN
    exposed = [
        set(each.headers[expose].lower().split(", "))
        for each in (plain, answer)
    ]
    assert {"x-of-the-owner", "x-of-the-operator", "etag"} <= exposed[1]
    assert exposed[1] - exposed[0] == {
        "x-hapi-source-etag",
        "x-hapi-cache",
        "x-hapi-worker",
        "retry-after",
    }
    assert exposed[0] - exposed[1] == {"x-object-meta-colour"}
    assert answer.headers["Vary"].endswith("Origin")


@pytest.mark.parametrize("path", [SOURCE, "/AUTH_test/sem-cors/data.tar"])
def test_other_origins_see_nothing(swift, shared, path):
    headers = {**ASKED, "Origin": "https://elsewhere.example.com"}
    answer = swift.get(OWNER, path, headers)

    assert_computed(answer)
    assert not [k for k in answer.headers if k.startswith("Access-Control")]


def test_preflight_is_swifts(swift, shared):
    asked = {"x-hapi-model", "x-hapi-cut"}
    headers = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "GET",
        "Access-Control-Request-Headers": ", ".join(asked),
    }
    caller = swift.callers[None]
    plain = caller.request("OPTIONS", shared, headers)
    answer = caller.request("OPTIONS", shared, {**headers, **ASKED})

    assert plain.status_code == answer.status_code == 200
    for each in (plain, answer):
        allowed = each.headers["Access-Control-Allow-Headers"]
        assert set(allowed.split(", ")) == asked
        assert each.headers["Access-Control-Allow-Origin"] == ORIGIN


PLACES = (
    "/AUTH_test/sem-private/a.hapi",
    "/AUTH_test/sem-private/b.hapi",
    "/AUTH_test/sem-missing/a.hapi",
    "/AUTH_none/sem-private/a.hapi",
)
"""An object; none; one in no container; one in no account."""


INDEX, PROFILE = ({f"X-Hapi-{n}": "true"} for n in ("Index", "Profile"))


@pytest.mark.parametrize("asked", [ASKED, INDEX, PROFILE])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("user", [READER, STRANGER, None])
def test_source_that_cannot_be_read_may_as_well_not_exist(
    swift, user, method, asked
):
    caller = swift.callers[user]
    answers = [
        (
            told(caller.request(method, path, asked), "AUTH_test"),
            told(caller.request(method, path), "AUTH_test"),
        )
        for path in PLACES[:3]
    ]

    assert answers[0][0][0] == (403 if user else 401)
    assert set(answers) == {(answers[0][1], answers[0][1])}
    nowhere = caller.request(method, PLACES[3], asked)
    assert told(nowhere, "AUTH_none") == answers[0][0]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("user", [READER, STRANGER, None])
def test_model_that_cannot_be_read_may_as_well_not_exist(swift, user, method):
    answers = {
        told(
            swift.callers[user].request(
                method, SOURCE, {**ASKED, "X-Hapi-Model": model}
            ),
            model,
        )
        for model in PLACES
    }

    assert len(answers) == 1
    assert answers.pop()[0] == (403 if user else 401)


def test_temporary_url_tells_nothing_of_models(swift):
    path = f"{PRIVATE}/data.tar"
    signed = f"{path}?{signature(path)}"
    answers = {
        told(swift.get(None, signed, {**ASKED, "X-Hapi-Model": model}), model)
        for model in PLACES
    }

    same = {**ASKED, "X-Hapi-Model": path}
    assert_computed(swift.get(None, signed, ASKED))
    assert len(answers) == 1
    assert answers.pop()[0] == 401
    assert swift.get(None, signed, same).status_code == 401


@pytest.mark.parametrize(
    ("version", "more"),
    [
        ("s3v4", {}),
        ("s3v4", {"Authorization": "AWS4-HMAC-SHA256 Credential=x"}),
        ("s3", {}),
    ],
)
def test_presigned_url_opens_no_model_of_its_signer(swift, version, more):
    """Whoever holds it may add headers, Authorization among them."""
    client = s3_client(swift.cluster, OWNER, signature_version=version)
    where = {"Bucket": "sem-private", "Key": "data.tar"}
    url = client.generate_presigned_url("get_object", Params=where)
    statuses = {
        model: requests.get(
            url,
            headers={**ASKED, **more, "X-Hapi-Model": model},
            timeout=SECONDS,
        ).status_code
        for model in (*PLACES, "/AUTH_test/public-models/net.hapi")
    }
    plain = requests.get(url, headers=more, timeout=SECONDS)

    assert plain.content == CONTENT
    assert list(statuses.values()) == [403, 403, 403, 403, 200]
    asked = {**ASKED, "X-Hapi-Model": PLACES[0]}
    found = with_headers(client, asked, lambda: client.get_object(**where))
    assert len(received_rows(found["Body"].read()).facts) == NUM_ROWS


@pytest.mark.parametrize("user", [READER, STRANGER])
def test_s3_tells_nothing_of_models(swift, user):
    from botocore.exceptions import ClientError

    client = s3_client(swift.cluster, user)
    bucket = "semantics"
    if user == STRANGER:
        bucket = "sem-s3"
        swift.callers[user].put(f"/AUTH_test2/{bucket}")
        swift.callers[user].put(f"/AUTH_test2/{bucket}/data.tar", CONTENT)
    where = {"Bucket": bucket, "Key": "data.tar"}
    answers = set()
    for model in PLACES:
        headers = {**ASKED, "X-Hapi-Model": model}
        with pytest.raises(ClientError) as caught:
            with_headers(client, headers, lambda: client.get_object(**where))
        error = caught.value.response
        status = error["ResponseMetadata"]["HTTPStatusCode"]
        answers.add(
            (status, error["Error"]["Code"], error["Error"]["Message"])
        )

    assert len(answers) == 1
    assert answers.pop()[:2] == (403, "AccessDenied")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("user", [READER, STRANGER, None])
def test_cache_of_an_account_is_its_owners(swift, user, method):
    caller = swift.callers[user]
    answers = {
        told(caller.request(method, f"/{account}?hapi-cache"), account)
        for account in ("AUTH_test", "AUTH_none")
    }

    assert len(answers) == 1
    assert answers.pop()[0] == (403 if user else 401)
    assert swift.get(OWNER, "/AUTH_test?hapi-cache").status_code == 200


@pytest.mark.parametrize("tag", ["*", "own"])
def test_not_modified_is_said_after_both_authorisations(swift, tag):
    if tag == "own":
        tag = swift.get(OWNER, SOURCE, HOME).headers["ETag"]
    conditional = {**HOME, "If-None-Match": tag}
    private = f"{PRIVATE}/data.tar"

    assert swift.get(OWNER, SOURCE, conditional).status_code == 304
    for user, status in ((READER, 403), (STRANGER, 403), (None, 401)):
        for path in (SOURCE, private):
            answer = swift.get(user, path, conditional)
            assert answer.status_code == status, (user, path)


RULES = {"X-Container-Read": ".r:.example.com,.r:-bad.example.com"}
REFERRERS = (
    (None, 401),
    ("http://www.example.com/page", 200),
    ("http://bad.example.com/", 401),
    ("http://elsewhere.org/", 401),
)


@pytest.mark.parametrize(("referrer", "status"), REFERRERS)
def test_rule_about_referrers_holds_for_the_source(swift, referrer, status):
    swift.owner.put("/AUTH_test/sem-referrer", headers=RULES)
    path = "/AUTH_test/sem-referrer/data.tar"
    swift.owner.put(path, CONTENT)
    headers = {"Referer": referrer} if referrer else {}
    plain = swift.get(None, path, headers)
    answer = swift.get(None, path, {**ASKED, **headers})

    assert plain.status_code == answer.status_code == status
    if status == 200:
        assert_computed(answer)
    else:
        assert told(answer) == told(plain)


@pytest.mark.parametrize(("referrer", "status"), REFERRERS)
@pytest.mark.parametrize("is_signed", [False, True])
def test_rule_about_referrers_holds_for_the_model(
    swift, referrer, status, is_signed
):
    """Also where a temporary URL opens the source."""
    swift.owner.put("/AUTH_test/sem-ref-models", headers=RULES)
    model = "/AUTH_test/sem-ref-models/net.hapi"
    package = swift.get(OWNER, f"{PRIVATE}/a.hapi").content
    swift.owner.put(model, package)
    path = f"{PRIVATE}/data.tar"
    path = f"{path}?{signature(path)}" if is_signed else SOURCE
    headers = {"Referer": referrer} if referrer else {}
    asked = {**ASKED, **headers, "X-Hapi-Model": model}

    assert swift.get(None, path, asked).status_code == status
