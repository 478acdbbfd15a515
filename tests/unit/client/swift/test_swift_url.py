"""Where data lies and who asks: parsing with readable refusals."""

from __future__ import annotations

import pytest

from hapi_client.swift.credentials import Credentials
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.errors import ClientError


@pytest.mark.parametrize(
    ("text", "container", "prefix"),
    [
        ("swift://photos", "photos", ""),
        ("swift://photos/", "photos", ""),
        ("photos/train", "photos", "train"),
        ("swift://photos/a/b/", "photos", "a/b"),
        ("swift://für uns/größe", "für uns", "größe"),
    ],
)
def test_a_place_is_container_and_prefix(text, container, prefix):
    assert parse_location(text) == Location(container, prefix)
    assert parse_location(str(parse_location(text))) == parse_location(text)


@pytest.mark.parametrize(
    "text",
    ["", "/", "swift://", "swift:///x", "s3://bucket/x", "..", "a//b/c//d"],
)
def test_what_names_no_place_is_refused_by_its_value(text):
    if text == "a//b/c//d":
        text = "a/b//c"
    with pytest.raises(ClientError) as caught:
        parse_location(text)
    assert caught.value.code == "bad_configuration"
    assert repr(text) in caught.value.message
    assert "swift://CONTAINER" in caught.value.message


def test_objects_of_a_data_set_lie_under_its_prefix():
    assert Location("c").index_name == "hapi-index.arrow"
    assert Location("c", "a/b").object_name("x.tar") == "a/b/x.tar"


V1 = {"ST_AUTH": "http://h/auth", "ST_USER": "a:b", "ST_KEY": "secret"}
V3 = {
    "OS_AUTH_URL": "http://h/v3",
    "OS_USERNAME": "u",
    "OS_PASSWORD": "secret",
    "OS_PROJECT_NAME": "p",
    "OS_REGION_NAME": "west",
}
SECRET = {
    "OS_AUTH_URL": "http://h/v3",
    "OS_APPLICATION_CREDENTIAL_ID": "ac1",
    "OS_APPLICATION_CREDENTIAL_SECRET": "secret",
}


def test_v1_is_read_from_the_environment():
    credentials = Credentials.from_environment(V1)
    assert credentials == Credentials.v1("http://h/auth", "a:b", "secret")


def test_keystone_is_read_from_the_environment_with_default_domains():
    credentials = Credentials.from_environment(V3)
    assert credentials.plugin == "v3password"
    assert credentials.region_name == "west"
    assert credentials.options["user_domain_id"] == "default"
    assert credentials.options["project_domain_id"] == "default"


def test_given_domains_are_kept():
    credentials = Credentials.from_environment(
        {**V3, "OS_USER_DOMAIN_NAME": "people"}
    )
    assert credentials.options["user_domain_name"] == "people"
    assert "user_domain_id" not in credentials.options


def test_an_application_credential_needs_no_user_or_project():
    credentials = Credentials.from_environment({**V3, **SECRET})
    assert credentials.plugin == "v3applicationcredential"
    assert credentials.region_name == "west"
    assert credentials.options == {
        "auth_url": "http://h/v3",
        "application_credential_id": "ac1",
        "application_credential_secret": "secret",
    }


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        (V1, "ST_USER"),
        (V1, "ST_KEY"),
        (SECRET, "OS_APPLICATION_CREDENTIAL_SECRET"),
    ],
)
def test_a_missing_variable_is_named(given, variable):
    environ = {k: v for k, v in given.items() if k != variable}
    with pytest.raises(ClientError, match=variable):
        Credentials.from_environment(environ)


def test_no_credentials_at_all_says_which_variables_to_set():
    with pytest.raises(ClientError, match="ST_AUTH, ST_USER and ST_KEY"):
        Credentials.from_environment({})


@pytest.mark.parametrize("environ", [V1, V3, SECRET])
def test_the_password_is_not_in_the_repr(environ):
    assert "secret" not in repr(Credentials.from_environment(environ))


@pytest.mark.parametrize("environ", [V1, V3, SECRET])
def test_a_plugin_is_made_of_the_options(environ):
    plugin = Credentials.from_environment(environ).make_plugin()
    assert plugin.auth_url == next(iter(environ.values()))
