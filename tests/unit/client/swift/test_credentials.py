"""Who asks, and whom: environment, clouds.yaml, endpoints, TLS."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.http_client import ConnectionOptions
from hapi_client.swift.retry import Backoff
from hapi_protocol.errors import ClientError, RightsError
from identity_service import IdentityService, Secret, User
from scripted_swift import Answer, ScriptedSwift, scripted_swift

certificates = pytest.importorskip(
    "certificates", reason="needs cryptography (extra: dev)"
)

FAST = ConnectionOptions(
    connect_seconds=5,
    read_seconds=5,
    body_seconds=10,
    backoff=Backoff(attempts=2, first_seconds=0.01, max_seconds=0.02),
)
V1 = {"ST_AUTH": "http://v1/auth", "ST_USER": "u", "ST_KEY": "k"}
V3 = {
    "OS_AUTH_URL": "http://v3/v3",
    "OS_USERNAME": "ann",
    "OS_PASSWORD": "of-ann",
    "OS_PROJECT_NAME": "physics",
}
USERS = {"ann": User("ann", "of-ann", {"physics": ("member",)})}
INFO = Answer(200, json.dumps({"hapi": {"version": 1}}).encode())


@pytest.fixture
def authority(tmp_path):
    return certificates.Authority(tmp_path)


@contextmanager
def clients_of(
    environ: Mapping[str, str], options: ConnectionOptions = FAST
) -> Iterator[Connection]:
    with Connection(Credentials.from_environment(environ), options) as made:
        yield made


# --- which credentials ------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "plugin", "source"),
    [
        (V1, "v1", "ST_AUTH"),
        (V3, "v3password", "OS_AUTH_URL"),
        ({**V3, **V1}, "v1", "ST_AUTH"),
        (
            {
                **V3,
                "OS_APPLICATION_CREDENTIAL_ID": "i",
                "OS_APPLICATION_CREDENTIAL_SECRET": "s",
            },
            "v3applicationcredential",
            "OS_AUTH_URL",
        ),
    ],
)
def test_the_first_that_is_set_is_taken(environ, plugin, source):
    found = Credentials.from_environment(environ)
    assert (found.plugin, found.source) == (plugin, source)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no credentials; set ST_AUTH"),
        ({"ST_AUTH": "x"}, "ST_USER is not set"),
        ({**V3, "OS_PASSWORD": ""}, "OS_PASSWORD is not set"),
        ({**V1, "OS_INTERFACE": "inside"}, "OS_INTERFACE is 'inside'; one of"),
        ({**V1, "OS_INSECURE": "perhaps"}, "OS_INSECURE is 'perhaps'"),
        ({**V1, "OS_CACERT": "/no/ca"}, "OS_CACERT. '/no/ca' is not there"),
        ({**V1, "OS_CERT": "/no/crt"}, "OS_CERT. '/no/crt' is not there"),
        ({**V1, "OS_KEY": __file__}, "needs its certificate, OS_CERT"),
    ],
)
def test_what_is_wrong_is_named(environ, message):
    with pytest.raises(ClientError, match=message) as caught:
        Credentials.from_environment(environ)
    assert caught.value.code == "bad_configuration"


@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        ({}, "public"),
        ({"OS_INTERFACE": "internal"}, "internal"),
        ({"OS_ENDPOINT_TYPE": "adminURL"}, "admin"),
        ({"OS_INTERFACE": "public", "OS_ENDPOINT_TYPE": "admin"}, "public"),
    ],
)
def test_interface_has_the_names_of_both_commands(environ, interface):
    assert Credentials.from_environment({**V3, **environ}).interface == (
        interface
    )


def test_secrets_are_not_shown():
    for environ, secret in ((V1, "'k'"), (V3, "of-ann")):
        assert secret not in repr(Credentials.from_environment(environ))


# --- clouds.yaml ------------------------------------------------------------


@pytest.fixture
def clouds(tmp_path):
    """A file and what has to be kept secret; the environment for both."""
    pytest.importorskip("openstack", reason="needs openstacksdk")
    (tmp_path / "clouds.yaml").write_text(
        """
clouds:
  lab:
    auth:
      auth_url: http://127.0.0.1:9/v3
      username: ann
      project_name: physics
      user_domain_id: default
      project_domain_id: default
    region_name: here
    interface: internal
    verify: false
  old:
    auth_type: v1password
    auth: {auth_url: http://127.0.0.1:9/auth, username: u, password: k}
  nothing:
    auth: {auth_url: http://127.0.0.1:9/v3}
    auth_type: v3applicationcredential
"""
    )
    (tmp_path / "secure.yaml").write_text(
        "clouds: {lab: {auth: {password: of-ann}}}"
    )
    return {
        "OS_CLOUD": "lab",
        "OS_CLIENT_CONFIG_FILE": str(tmp_path / "clouds.yaml"),
        "OS_CLIENT_SECURE_FILE": str(tmp_path / "secure.yaml"),
    }


def test_a_cloud_says_all_and_its_secrets_are_merged(clouds):
    found = Credentials.from_environment({**V3, **clouds})
    assert found.plugin == "password"
    assert found.options["password"] == "of-ann"
    assert found.options["auth_url"] == "http://127.0.0.1:9/v3"
    assert (found.region_name, found.interface) == ("here", "internal")
    assert found.tls.verify is False
    assert found.source == f"cloud 'lab' of {clouds['OS_CLIENT_CONFIG_FILE']}"
    assert "of-ann" not in repr(found)
    assert pickle.loads(pickle.dumps(found)) == found


def test_the_environment_says_more_than_the_cloud(clouds):
    found = Credentials.from_environment(
        {
            **clouds,
            "OS_INTERFACE": "admin",
            "OS_INSECURE": "false",
            "OS_STORAGE_URL": "http://store/v1/A",
        }
    )
    assert found.interface == "admin"
    assert found.tls.verify is True
    assert found.storage_url == "http://store/v1/A"


def test_v1_of_the_environment_comes_before_a_cloud(clouds):
    assert Credentials.from_environment({**clouds, **V1}).source == "ST_AUTH"


def test_files_are_looked_for_where_openstacksdk_does(clouds, monkeypatch):
    from openstack.config import loader

    path = clouds.pop("OS_CLIENT_CONFIG_FILE")
    monkeypatch.setattr(loader, "CONFIG_FILES", ["/no/clouds.yaml", path])
    assert Credentials.from_environment(clouds).region_name == "here"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "cloud 'nowhere': .*not found"),
        ("nothing", "cloud 'nothing': .*application credential"),
    ],
)
def test_a_cloud_that_cannot_be_used_is_named(clouds, name, message):
    with pytest.raises(ClientError, match=message):
        Credentials.from_environment({**clouds, "OS_CLOUD": name})


def test_without_openstacksdk_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openstack", None)
    with pytest.raises(ClientError, match=r"swift-hapi\[clouds\]"):
        Credentials.from_environment({"OS_CLOUD": "lab"})


def test_clouds_of_either_auth_log_in(clouds, tmp_path):
    path = Path(clouds["OS_CLIENT_CONFIG_FILE"])
    with scripted_swift() as swift:
        swift.script(INFO)
        service = IdentityService(USERS)
        service.object_store_url = f"{swift.url}/v1/%i"
        with service.running():
            text = path.read_text()
            text = text.replace("http://127.0.0.1:9/v3", service.url)
            path.write_text(
                text.replace("http://127.0.0.1:9/auth", swift.auth_url)
            )
            for name, account in (("lab", "internal"), ("old", "AUTH_test")):
                with clients_of({**clouds, "OS_CLOUD": name}) as connection:
                    assert connection.account == account
                    assert connection.require_hapi()


# --- endpoints and TLS ------------------------------------------------------


@pytest.mark.parametrize("interface", ["public", "internal", "admin"])
def test_the_endpoint_of_the_interface_is_used(interface):
    service = IdentityService(USERS)
    service.object_store_url = "http://127.0.0.1:9/v1/%i"
    with service.running():
        environ = {**V3, "OS_AUTH_URL": service.url}
        with clients_of({**environ, "OS_INTERFACE": interface}) as connection:
            assert connection.account == interface


def test_a_region_without_an_endpoint_is_named():
    service = IdentityService(USERS)
    with service.running():
        environ = {**V3, "OS_AUTH_URL": service.url, "OS_REGION_NAME": "off"}
        with (
            clients_of(environ) as connection,
            pytest.raises(ClientError, match=r"off region .*OS_REGION"),
        ):
            connection.head("c", "o")


@contextmanager
def tls_places(
    authority, *, asks_clients: bool = False
) -> Iterator[tuple[dict[str, str], dict[str, str], ScriptedSwift]]:
    """Environments for v1 and Keystone, of servers that speak TLS."""
    context = authority.server_context(asks_clients=asks_clients)
    service = IdentityService(
        USERS, {"of-a-job": Secret("hush", "ann", "physics")}
    )
    with scripted_swift(context) as swift, service.running(context):
        swift.script(INFO)
        service.object_store_url = f"{swift.url}/v1/AUTH_%s"
        v1 = {"ST_AUTH": swift.auth_url, "ST_USER": "u", "ST_KEY": "k"}
        yield v1, {**V3, "OS_AUTH_URL": service.url}, swift


def test_the_ca_bundle_is_that_of_both_services(authority):
    trust = {"OS_CACERT": authority.ca_file}
    with tls_places(authority) as (v1, v3, swift):
        for environ in (v1, v3):
            with clients_of({**environ, **trust}) as connection:
                assert connection.require_hapi()
    assert len(swift.requests) == 2


def test_the_ca_bundle_comes_before_that_of_requests(
    authority, tmp_path, monkeypatch
):
    other = certificates.Authority(tmp_path, "other")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", other.ca_file)
    trust = {"OS_CACERT": authority.ca_file}
    with (
        tls_places(authority) as (v1, _, _),
        clients_of({**v1, **trust}) as connection,
    ):
        assert connection.require_hapi()


def test_an_unknown_authority_is_refused_at_once(authority, tmp_path):
    """By the auth service, and by Swift where that one is known."""
    other = certificates.Authority(tmp_path, "other")
    with tls_places(authority) as (v1, v3, swift):
        for environ in (v1, v3):
            with (
                clients_of(
                    {**environ, "OS_CACERT": other.ca_file}
                ) as connection,
                pytest.raises(ClientError, match=r"(?i)certificate.verify"),
            ):
                connection.require_hapi()
        assert not swift.requests
        with scripted_swift(other.server_context()) as elsewhere:
            environ = {
                **v1,
                "OS_CACERT": authority.ca_file,
                "OS_STORAGE_URL": f"{elsewhere.url}/v1/AUTH_test",
            }
            with (
                clients_of(environ) as connection,
                pytest.raises(ClientError, match="OS_CACERT") as caught,
            ):
                connection.require_hapi()
            assert caught.value.code == "bad_configuration"
            assert connection.traffic.count().retries == 0


def test_insecure_is_warned_of_and_is_that_of_both(
    authority, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.ca_file)
    with tls_places(certificates.Authority(tmp_path, "other")) as places:
        for environ in places[:2]:
            caplog.clear()
            with (
                pytest.warns(match="Unverified HTTPS"),
                clients_of({**environ, "OS_INSECURE": "1"}) as client,
            ):
                assert client.require_hapi()
            assert "not checked (insecure)" in caplog.text


def test_our_certificate_is_shown_to_both_services(authority):
    trust = {"OS_CACERT": authority.ca_file}
    crt, key = authority.certify("client")
    one = Path(crt).with_suffix(".pem")
    one.write_text(Path(crt).read_text() + Path(key).read_text())
    with tls_places(authority, asks_clients=True) as (v1, v3, _):
        for environ in (v1, v3):
            for shown in (
                {"OS_CERT": crt, "OS_KEY": key},
                {"OS_CERT": str(one)},
            ):
                with clients_of({**environ, **trust, **shown}) as connection:
                    assert connection.require_hapi()
            with (
                clients_of({**environ, **trust}) as connection,
                pytest.raises(ClientError),
            ):
                connection.require_hapi()


# --- tokens -----------------------------------------------------------------


def test_a_token_that_is_refused_twice_is_a_named_error():
    refused = Answer(401, b"no", {"X-Trans-Id": "tx401"})
    with scripted_swift() as swift:
        swift.script(refused)
        environ = {**V1, "ST_AUTH": swift.auth_url}
        with (
            clients_of(environ) as connection,
            pytest.raises(RightsError, match="with a new token too") as caught,
        ):
            connection.open("c", "o")
        assert swift.num_tokens == 2
        assert len(swift.requests) == 2
        assert caught.value.trans_id == "tx401"
        assert caught.value.status == 401
