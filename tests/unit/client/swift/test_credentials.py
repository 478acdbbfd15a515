"""Credentials: environment, clouds.yaml, endpoints, TLS."""

import json
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest

from hapi_client.swift.connection import Connection
from hapi_client.swift.credentials import Credentials
from hapi_client.swift.retry import is_retryable
from hapi_protocol.errors import ClientError
from identity_service import IdentityService, Secret, User
from scripted_swift import Answer, scripted_swift

certificates = pytest.importorskip(
    "certificates", reason="needs cryptography (extra: dev)"
)

V1 = {"ST_AUTH": "http://v1/auth", "ST_USER": "u", "ST_KEY": "k"}
V3 = {
    "OS_AUTH_URL": "http://v3/v3",
    "OS_USERNAME": "ann",
    "OS_PASSWORD": "of-ann",
    "OS_PROJECT_NAME": "physics",
}
APPLICATION = {
    "OS_AUTH_URL": "http://v3/v3",
    "OS_APPLICATION_CREDENTIAL_ID": "ac1",
    "OS_APPLICATION_CREDENTIAL_SECRET": "of-ac1",
}
USER = {
    "auth_url": "http://v3/v3",
    "username": "ann",
    "password": "of-ann",
    "project_name": "physics",
    "project_domain_id": "default",
}
USERS = {"ann": User("ann", "of-ann", {"physics": ("member",)})}
INFO = Answer(200, json.dumps({"hapi": {"version": 1}}).encode())


@pytest.fixture
def authority(tmp_path):
    return certificates.Authority(tmp_path)


@pytest.fixture
def connect(fast):
    """Opens a connection with the credentials of an environment."""

    def opened(environ):
        return Connection(Credentials.from_environment(environ), fast)

    return opened


V1_USER = {"auth_url": "http://v1/auth", "username": "u", "password": "k"}
APPLICATION_USER = {
    "auth_url": "http://v3/v3",
    "application_credential_id": "ac1",
    "application_credential_secret": "of-ac1",
}


@pytest.mark.parametrize(
    ("environ", "source", "plugin", "options"),
    [
        (V1, "ST_AUTH", "v1", V1_USER),
        ({**V3, **V1}, "ST_AUTH", "v1", V1_USER),
        (
            V3,
            "OS_AUTH_URL",
            "v3password",
            {**USER, "user_domain_id": "default"},
        ),
        (
            {**V3, "OS_USER_DOMAIN_NAME": "people"},
            "OS_AUTH_URL",
            "v3password",
            {**USER, "user_domain_name": "people"},
        ),
        (
            {**V3, **APPLICATION},
            "OS_AUTH_URL",
            "v3applicationcredential",
            APPLICATION_USER,
        ),
    ],
)
def test_first_set_variable_selects_the_plugin_with_its_options(
    environ, source, plugin, options
):
    credentials = Credentials.from_environment(environ)
    assert (credentials.plugin, credentials.source) == (plugin, source)
    assert credentials.options == options
    assert credentials.make_plugin().auth_url == credentials.auth_url
    for secret in ("'k'", "of-ann", "of-ac1"):
        assert secret not in repr(credentials)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no credentials; set ST_AUTH"),
        ({"ST_AUTH": "x"}, "ST_USER is not set"),
        ({"ST_AUTH": "x", "ST_USER": "u"}, "ST_KEY is not set"),
        ({**V3, "OS_USERNAME": ""}, "OS_USERNAME is not set"),
        ({**V3, "OS_PASSWORD": ""}, "OS_PASSWORD is not set"),
        (
            {**APPLICATION, "OS_APPLICATION_CREDENTIAL_SECRET": ""},
            "OS_APPLICATION_CREDENTIAL_SECRET is not set",
        ),
        ({**V1, "OS_INTERFACE": "inside"}, "OS_INTERFACE is 'inside'"),
        ({**V1, "OS_INSECURE": "perhaps"}, "OS_INSECURE is 'perhaps'"),
        ({**V1, "OS_CACERT": "/no/ca"}, "OS_CACERT. '/no/ca' does not exist"),
        ({**V1, "OS_CERT": "/no/crt"}, "OS_CERT. '/no/crt' does not exist"),
        ({**V1, "OS_KEY": __file__}, "needs its certificate, OS_CERT"),
    ],
)
def test_missing_or_bad_variable_is_named(environ, message):
    with pytest.raises(ClientError, match=message) as caught:
        Credentials.from_environment(environ)
    assert caught.value.code == "bad_configuration"


@pytest.fixture
def clouds(tmp_path):
    """Writes clouds.yaml and secure.yaml; returns their environment."""
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


def test_cloud_gives_all_settings_and_merges_secrets(clouds):
    credentials = Credentials.from_environment({**V3, **clouds})
    assert credentials.plugin == "password"
    assert credentials.options["password"] == "of-ann"
    assert credentials.options["auth_url"] == "http://127.0.0.1:9/v3"
    assert (credentials.region_name, credentials.interface) == (
        "here",
        "internal",
    )
    assert credentials.tls.verify is False
    assert (
        credentials.source
        == f"cloud 'lab' of {clouds['OS_CLIENT_CONFIG_FILE']}"
    )
    assert "of-ann" not in repr(credentials)
    assert pickle.loads(pickle.dumps(credentials)) == credentials


def test_environment_overrides_the_cloud(clouds):
    variables = {
        "OS_INTERFACE": "admin",
        "OS_INSECURE": "false",
        "OS_STORAGE_URL": "http://store/v1/A",
    }
    credentials = Credentials.from_environment({**clouds, **variables})
    assert credentials.interface == "admin"
    assert credentials.tls.verify is True
    assert credentials.storage_url == "http://store/v1/A"
    assert Credentials.from_environment({**clouds, **V1}).source == "ST_AUTH"


def test_clouds_yaml_is_found_where_openstacksdk_looks(clouds, monkeypatch):
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
def test_unusable_cloud_is_named(clouds, name, message):
    with pytest.raises(ClientError, match=message):
        Credentials.from_environment({**clouds, "OS_CLOUD": name})


def test_missing_openstacksdk_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openstack", None)
    with pytest.raises(ClientError, match=r"swift-hapi\[clouds\]"):
        Credentials.from_environment({"OS_CLOUD": "lab"})


def test_clouds_log_in_with_either_auth(connect, clouds, tmp_path):
    path = tmp_path / "clouds.yaml"
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
                with connect({**clouds, "OS_CLOUD": name}) as connection:
                    assert connection.account == account
                    assert connection.require_hapi()


@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        ({}, "public"),
        ({"OS_INTERFACE": "internal"}, "internal"),
        ({"OS_ENDPOINT_TYPE": "adminURL"}, "admin"),
        ({"OS_INTERFACE": "public", "OS_ENDPOINT_TYPE": "admin"}, "public"),
    ],
)
def test_endpoint_of_the_interface_in_either_variable_is_used(
    connect, environ, interface
):
    service = IdentityService(USERS)
    service.object_store_url = "http://127.0.0.1:9/v1/%i"
    with service.running():
        given = {**V3, "OS_AUTH_URL": service.url, **environ}
        with connect(given) as connection:
            assert connection.account == interface


def test_region_without_an_endpoint_is_named(connect):
    service = IdentityService(USERS)
    with service.running():
        environ = {**V3, "OS_AUTH_URL": service.url, "OS_REGION_NAME": "off"}
        with (
            connect(environ) as connection,
            pytest.raises(ClientError, match=r"off region .*OS_REGION"),
        ):
            connection.head("c", "o")


@contextmanager
def tls_servers(authority, *, asks_clients=False):
    """Runs TLS servers; yields the v1 and Keystone environments."""
    context = authority.server_context(asks_clients=asks_clients)
    service = IdentityService(
        USERS, {"of-a-job": Secret("hush", "ann", "physics")}
    )
    with scripted_swift(context) as swift, service.running(context):
        swift.script(INFO)
        service.object_store_url = f"{swift.url}/v1/AUTH_%s"
        v1 = {"ST_AUTH": swift.auth_url, "ST_USER": "u", "ST_KEY": "k"}
        yield v1, {**V3, "OS_AUTH_URL": service.url}, swift


def test_ca_bundle_is_used_for_both_services_before_that_of_requests(
    connect, authority, tmp_path, monkeypatch
):
    other = certificates.Authority(tmp_path, "other")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", other.ca_file)
    trust = {"OS_CACERT": authority.ca_file}
    with tls_servers(authority) as (v1, v3, swift):
        for environ in (v1, v3):
            with connect({**environ, **trust}) as connection:
                assert connection.require_hapi()
    assert len(swift.requests) == 2


def test_unknown_authority_is_refused_without_retries(
    connect, authority, tmp_path
):
    """First that of the auth service, then that of Swift alone."""
    other = certificates.Authority(tmp_path, "other")
    with tls_servers(authority) as (v1, v3, swift):
        for environ in (v1, v3):
            with (
                connect({**environ, "OS_CACERT": other.ca_file}) as connection,
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
                connect(environ) as connection,
                pytest.raises(ClientError, match="OS_CACERT") as caught,
            ):
                connection.require_hapi()
            assert caught.value.code == "bad_configuration"
            assert connection.traffic.count().retries == 0


def test_insecure_applies_to_both_services_with_a_warning(
    connect, authority, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.ca_file)
    with tls_servers(certificates.Authority(tmp_path, "other")) as servers:
        for environ in servers[:2]:
            caplog.clear()
            with (
                pytest.warns(match="Unverified HTTPS"),
                connect({**environ, "OS_INSECURE": "1"}) as client,
            ):
                assert client.require_hapi()
            assert "not verified (insecure)" in caplog.text


def test_client_certificate_is_sent_to_both_services(connect, authority):
    trust = {"OS_CACERT": authority.ca_file}
    crt, key = authority.certify("client")
    one = Path(crt).with_suffix(".pem")
    one.write_text(Path(crt).read_text() + Path(key).read_text())
    with tls_servers(authority, asks_clients=True) as (v1, v3, _):
        for environ in (v1, v3):
            for shown in (
                {"OS_CERT": crt, "OS_KEY": key},
                {"OS_CERT": str(one)},
            ):
                with connect({**environ, **trust, **shown}) as connection:
                    assert connection.require_hapi()
            with (
                connect({**environ, **trust}) as connection,
                pytest.raises(ClientError),
            ):
                connection.require_hapi()


@pytest.mark.parametrize(
    ("status", "code"), [(503, "not_connected"), (400, "bad_configuration")]
)
def test_overloaded_auth_service_is_asked_again(status, code):
    """By the caller, as after a lost connection."""
    with scripted_swift() as swift:
        swift.script(Answer(status))
        environ = {**V1, "ST_AUTH": f"{swift.url}/v1.0"}
        with (
            pytest.raises(ClientError, match="authentication") as caught,
            Connection(Credentials.from_environment(environ)) as connection,
        ):
            connection.log_in()
    assert caught.value.code == code
    assert is_retryable(caught.value) is (status == 503)
