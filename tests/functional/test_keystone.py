"""Tokens of Keystone: who may compute, who pays, and our own client.

The identity service is a small one of ours; keystonemiddleware,
keystoneauth and keystoneauth1 are the real ones.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from access_lines import used
from access_methods import s3_client, with_headers
from caller import Caller
from hapi_client import Connection, Credentials
from hapi_client.doctor.pushdown_checks import findings
from hapi_client.swift.swift_url import Location
from hapi_cluster import Cluster
from hapi_protocol.errors import RightsError
from hapi_protocol.headers import CONTENT_TYPE_STREAM, Annotation, ModelPath
from hapi_splitter.package.writer import package_pieces
from hapi_training.loop import train_tail
from hapi_training.recipe import Recipe
from identity_service import (
    IdentityService,
    Secret,
    User,
    id_of,
)
from jobs import small_job, upload_shards
from local_rows import received_rows
from networks import small_parts
from photos import shard
from second_swift import second_swift

pytest.importorskip(
    "keystonemiddleware", reason="needs keystonemiddleware (extra: dev)"
)

NUM_ROWS = 3
USERS = {
    user.name: user
    for user in (
        User("swift", "of-swift", {"service": ("service",)}),
        User("glance", "of-glance", {"service": ("service",)}),
        User("ann", "of-ann", {"physics": ("member", "swiftoperator")}),
        User("ben", "of-ben", {"physics": ("member",)}),
        User("cat", "of-cat", {"biology": ("member", "swiftoperator")}),
        User("dan", "of-dan", {"biology": ("member",)}),
        User("eve", "of-eve", {"history": ("member", "swiftoperator")}),
    )
}
PHYSICS, BIOLOGY, HISTORY = (
    f"AUTH_{id_of(project)}" for project in ("physics", "biology", "history")
)
PLACE, MODELS = f"/{PHYSICS}/data", f"/{PHYSICS}/models"
SOURCE, MODEL = f"{PLACE}/data.tar", f"{MODELS}/net.hapi"
ASKED = {"X-Hapi-Model": MODEL, "X-Hapi-Cut": "1"}
READERS = ",".join(
    f"{id_of(project)}:{id_of(user)}"
    for user, project in (("dan", "biology"), ("eve", "history"))
)


@dataclass
class Place:
    """A Swift that asks the identity service who its callers are."""

    cluster: Cluster
    keystone: IdentityService

    def caller(self, user, project, lifetime_seconds=600.0):
        token = self.keystone.token(user, project, lifetime_seconds)
        return Caller(self.cluster, token=token)

    def account(self, answer):
        """The one that pays for the features."""
        assert computed(answer), answer.text
        return used(self.cluster, answer.headers["X-Trans-Id"])["account"]


def credentials(keystone, user, project, **changes):
    """Those of the user's password at an identity service."""
    return Credentials.from_environment(
        {
            "OS_AUTH_URL": keystone.url,
            "OS_USERNAME": user,
            "OS_PASSWORD": USERS[user].password,
            "OS_PROJECT_NAME": project,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def keystone():
    service = IdentityService(
        USERS,
        {"of-a-job": Secret("hush", "ann", "physics")},
        {"s3-ann": Secret("hush", "ann", "physics")},
    )
    with service.running():
        yield service


@pytest.fixture(scope="module")
def place(cluster, keystone):
    """Physics has shared its objects with ``dan`` and ``eve``."""
    options = {
        "filter:authtoken": {
            "username": "swift",
            "password": USERS["swift"].password,
            "project_name": "service",
        },
        "filter:keystoneauth": {
            "reseller_prefix": "AUTH, SERVICE",
            "SERVICE_service_roles": "service",
        },
    }
    with second_swift(
        cluster,
        filter_options={"allowed_accounts": f"{PHYSICS}, {BIOLOGY}"},
        keystone_url=keystone.url,
        swift_options={"proxy-server.conf": options},
    ) as running:
        keystone.object_store_url = f"{running.proxy_url}/v1/AUTH_%s"
        found = Place(running, keystone)
        ann = found.caller("ann", "physics")
        acl = {"X-Container-Read": READERS}
        for container in (PLACE, MODELS):
            ann.put(container, headers=acl)
        ann.put(SOURCE, shard(NUM_ROWS))
        ann.put(MODEL, b"".join(package_pieces(small_parts().frozen)))
        yield found


def computed(answer):
    is_stream = answer.headers["Content-Type"] == CONTENT_TYPE_STREAM
    return answer.status_code == 200 and is_stream


@pytest.mark.parametrize(
    ("user", "project", "account"),
    [("ann", "physics", PHYSICS), ("dan", "biology", BIOLOGY)],
)
def test_operator_and_reader_compute_and_their_project_pays(
    place, user, project, account
):
    answer = place.caller(user, project).get(SOURCE, ASKED)

    assert place.account(answer) == account
    assert len(received_rows(answer.content).facts) == NUM_ROWS


@pytest.mark.parametrize(
    ("token", "status"),
    [
        (lambda keystone: keystone.token("ben", "physics"), 403),
        (lambda keystone: keystone.token("cat", "biology"), 403),
        (lambda keystone: keystone.token("ann", "physics", -1.0), 401),
        (lambda keystone: "nonsense", 401),
        (lambda keystone: None, 401),
    ],
    ids=["no operator", "reader's project", "expired", "nonsense", "none"],
)
def test_others_get_the_plain_refusal(place, token, status):
    caller = Caller(place.cluster, None, token=token(place.keystone))
    plain, answer = caller.get(SOURCE), caller.get(SOURCE, ASKED)

    assert plain.status_code == answer.status_code == status
    assert answer.content == plain.content


def test_unreadable_model_has_its_plain_status(place):
    cat = place.caller("cat", "biology")
    cat.put(f"/{BIOLOGY}/own")
    cat.put(f"/{BIOLOGY}/own/data.tar", shard(NUM_ROWS))
    answer = cat.get(f"/{BIOLOGY}/own/data.tar", ASKED)

    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize(("acl", "anonymous"), [("*:*", 401), (".r:*", 200)])
def test_library_for_all_projects_is_used_at_the_callers_cost(
    place, acl, anonymous
):
    ann, library = place.caller("ann", "physics"), f"/{PHYSICS}/library"
    ann.put(library, headers={"X-Container-Read": acl})
    ann.put(f"{library}/net.hapi", ann.get(MODEL).content)
    cat = place.caller("cat", "biology")
    cat.put(f"/{BIOLOGY}/own")
    cat.put(f"/{BIOLOGY}/own/data.tar", shard(NUM_ROWS))
    asked = {**ASKED, "X-Hapi-Model": f"{library}/net.hapi"}
    answer = cat.get(f"/{BIOLOGY}/own/data.tar", asked)

    assert place.account(answer) == BIOLOGY
    assert cat.get(library).status_code == (200 if acl == "*:*" else 403)
    nobody = Caller(place.cluster, None)
    assert nobody.get(f"{library}/net.hapi").status_code == anonymous


def test_project_that_is_not_listed_may_read_and_not_compute(place):
    eve = place.caller("eve", "history")
    answer = eve.get(SOURCE, ASKED)

    assert eve.get(SOURCE).status_code == 200
    assert answer.status_code == 403
    assert answer.json()["code"] == "compute_not_allowed"
    assert HISTORY in answer.json()["message"]


@pytest.mark.parametrize("lifetime_seconds", [600.0, -1.0])
def test_service_that_acts_for_a_user_does_not_pay(place, lifetime_seconds):
    """Its token may even lengthen the life of the user's."""
    dan = place.caller("dan", "biology", lifetime_seconds)
    service = {"X-Service-Token": place.keystone.token("glance", "service")}
    answer = dan.get(SOURCE, {**ASKED, **service})

    assert dan.get(SOURCE, service).status_code == 200
    assert place.account(answer) == BIOLOGY


def test_accounts_of_other_prefixes_have_the_same_payer(place):
    ann = place.caller("ann", "physics")
    service = {"X-Service-Token": place.keystone.token("glance", "service")}
    path = f"/SERVICE_{id_of('physics')}/images"
    ann.put(path, headers=service)
    ann.put(f"{path}/data.tar", shard(NUM_ROWS), service)
    alone = ann.get(f"{path}/data.tar", ASKED)
    answer = ann.get(f"{path}/data.tar", {**ASKED, **service})

    assert alone.status_code == 403
    assert place.account(answer) == PHYSICS


def test_s3_callers_project_pays(place):
    pytest.importorskip("boto3", reason="S3 clients use boto3")
    client = s3_client(place.cluster, "s3-ann", "hush")
    where = {"Bucket": "data", "Key": "data.tar"}
    answer = with_headers(client, ASKED, lambda: client.get_object(**where))

    assert len(received_rows(answer["Body"].read()).facts) == NUM_ROWS
    trans_id = answer["ResponseMetadata"]["RequestId"]
    log = place.cluster.log("swift").read_text()
    [line] = [
        each
        for each in log.splitlines()
        if "hapi:model=" in each and trans_id in each
    ]
    assert f";account={PHYSICS};" in line


def test_headers_of_authtoken_in_a_request_are_worth_nothing(place):
    forged = {
        **ASKED,
        "X-Identity-Status": "Confirmed",
        "X-Project-Id": id_of("physics"),
        "X-Tenant-Id": id_of("physics"),
        "X-Roles": "swiftoperator",
        "X-User-Id": id_of("ann"),
    }
    anonymous = Caller(place.cluster, None).get(SOURCE, forged)
    dan = place.caller("dan", "biology").get(SOURCE, forged)

    assert anonymous.status_code == 401
    assert place.account(dan) == BIOLOGY


def test_client_uploads_and_trains_with_a_password(place):
    data = Location("photos", "train")
    with Connection(
        credentials(place.keystone, "ann", "physics")
    ) as connection:
        assert connection.account == PHYSICS
        upload_shards(connection, data, {"a.tar": shard(12)})
        with small_job(
            data, connection=connection, cut="freeze", batch_size=4
        ) as job:
            found = train_tail(job, epochs=1, recipe=Recipe(0.01))
            assert job.stats.fallbacks == 0
    assert len(found.losses) == 3


def features(environ):
    """Facts about the rows that our client gets with this environment."""
    annotation = Annotation(ModelPath(*MODEL[1:].split("/")), 1)
    with (
        Connection(Credentials.from_environment(environ)) as connection,
        connection.get_features("data", "data.tar", annotation) as body,
    ):
        return received_rows(body.read()).facts


def test_client_gets_features_with_an_application_credential(place):
    environ = {
        "OS_AUTH_URL": place.keystone.url,
        "OS_APPLICATION_CREDENTIAL_ID": "of-a-job",
        "OS_APPLICATION_CREDENTIAL_SECRET": "hush",
        "OS_REGION_NAME": "here",
    }
    assert len(features(environ)) == NUM_ROWS


def test_client_renews_a_token_that_swift_does_not_take(place):
    """Once, however many threads had it."""
    tokens = place.keystone.tokens
    with Connection(
        credentials(place.keystone, "ann", "physics")
    ) as connection:
        before = set(tokens)
        assert connection.account == PHYSICS
        [first] = set(tokens) - before
        del tokens[first]
        with ThreadPoolExecutor(8) as pool:
            heads = pool.map(
                lambda _: connection.head("data", "data.tar"), range(16)
            )
            assert None not in heads
        assert len(set(tokens) - before) == 1


def test_token_of_another_keystone_is_a_named_error(place):
    """One that Swift does not ask gives tokens that it never takes."""
    stranger = IdentityService(USERS)
    with stranger.running():
        stranger.object_store_url = place.keystone.object_store_url
        login = credentials(stranger, "ann", "physics")
        with (
            Connection(login) as connection,
            pytest.raises(RightsError, match="with a new token too") as caught,
        ):
            connection.head("data", "data.tar")
    assert len(stranger.tokens) == 2
    assert caught.value.trans_id in place.cluster.log("swift").read_text()


def test_wrong_password_is_named(place):
    login = credentials(place.keystone, "ann", "physics", OS_PASSWORD="wrong")
    with (
        Connection(login) as connection,
        pytest.raises(RightsError, match="refuses the credentials"),
    ):
        connection.head("data", "data.tar")


def test_doctor_finds_a_project_that_may_not_compute(place):
    for user, project, state in (
        ("ann", "physics", "ok"),
        ("eve", "history", "failure"),
    ):
        login = credentials(place.keystone, user, project)
        container = f"models-of-{user}"
        checked = findings(
            lambda login=login: login, models_container=container
        )
        found = {finding.check: finding for finding in checked}
        assert found["worker"].state == state
        others = {finding.state for finding in found.values()} - {state}
        assert others <= {"ok"}
    assert "allowed_accounts" in found["worker"].remedy
    assert "v3password, eve at" in found["credentials"].found
