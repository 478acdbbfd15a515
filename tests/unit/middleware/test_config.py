"""Options of the filter: read, documented, and strict."""

import configparser
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from swift.common.storage_policy import StoragePolicy, StoragePolicyCollection
from swift.common.utils import config_read_reseller_options

from hapi_middleware.config import FilterConfig, ObjectFilterConfig
from hapi_middleware.filter import filter_factory
from hapi_middleware.object_server import object_filter

OBJECT_SAMPLE = (
    Path(__file__).parents[3] / "deploy" / "object-server.conf-sample"
)
SAMPLE = Path(__file__).parents[3] / "deploy" / "proxy-server.conf-sample"
OPTIONS = {option.name for option in fields(FilterConfig)}


def _documented():
    """Options of the sample's filter section, commented or not."""
    return _options(SAMPLE.read_text().partition("[filter:hapi]")[2])


def _options(section):
    line = r"^#? ?([a-z_]+) =(?: (.*))?$"
    return dict(re.findall(line, section, re.MULTILINE))


def test_options_and_their_defaults_are_documented():
    documented = _documented()
    documented.pop("use")
    values = {k: v for k, v in documented.items() if k in OPTIONS}

    assert set(values) == OPTIONS
    assert all("log_" in name for name in set(documented) - OPTIONS)
    assert FilterConfig.from_conf({}, values) == FilterConfig()


def test_object_servers_options_and_their_defaults_are_documented():
    text = OBJECT_SAMPLE.read_text()
    section = text.partition("[filter:hapi_object]")[2]
    values = _options(section)
    assert values.pop("use") == "egg:swift-hapi#hapi_object"
    assert set(values) == {o.name for o in fields(ObjectFilterConfig)}
    found = ObjectFilterConfig.from_conf({}, values)
    assert found == ObjectFilterConfig()
    assert "hapi_object object-server" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beat_seconds", "0"),
        ("backend_key_file", "key"),
        ("worker_socket", "relative.sock"),
    ],
)
def test_bad_value_of_an_object_server_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=r"it must be") as caught:
        object_filter.filter_factory({}, **{name: value})
    assert f"[filter:hapi_object] {name} = {value}" in str(caught.value)


def test_object_server_does_not_start_without_a_key(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ValueError, match=r"key of proxies and object servers"):
        object_filter.filter_factory({}, backend_key_file=str(path))
    path.write_bytes(b"k" * 40)
    path.chmod(0o600)
    factory = object_filter.filter_factory({}, backend_key_file=str(path))
    with pytest.raises(ValueError, match=r"must be the last filter"):
        factory(SimpleNamespace(app=object()))
    with pytest.raises(ValueError, match=r"key of proxies and object servers"):
        filter_factory({}, places="object", backend_key_file=f"{path}2")(
            object()
        )


def test_sample_has_our_entry_point_and_a_correct_pipeline():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(SAMPLE.read_text())
    pipeline = parser["pipeline:main"]["pipeline"].split()

    assert parser["filter:hapi"]["use"] == "egg:swift-hapi#hapi"
    position = pipeline.index("hapi")
    assert pipeline.index("tempauth") < position
    for name in ("copy", "slo", "dlo", "versioned_writes", "symlink"):
        assert position < pipeline.index(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_socket", "relative.sock"),
        ("worker_socket", "/" + "x" * 107),
        ("worker_connect_timeout", "0"),
        ("worker_connect_timeout", "soon"),
        ("worker_timeout", "inf"),
        ("worker_timeout", "nan"),
        ("max_object_bytes", "-1"),
        ("max_object_bytes", "5G"),
        ("max_package_bytes", "0"),
        ("max_multi_objects", "0"),
        ("max_multi_objects", "many"),
        ("max_multi_object_bytes", "16MiB"),
        ("multi_concurrency", "0"),
        ("multi_concurrency", "65"),
        ("multi_concurrency", "-8"),
        ("reseller_prefix", "AUTH_, SERVICE_"),
        ("allow_unauthenticated_compute", "ture"),
        ("allowed_accounts", "AUTH_a,,AUTH_b"),
        ("allowed_accounts", "AUTH_a AUTH_b"),
        ("allowed_accounts", "/v1/AUTH_a"),
        ("allowed_accounts", "AUTH_a,.unauthenticated"),
        ("model_library", "AUTH_library"),
        ("model_library", "/AUTH_library/models"),
        ("model_library", "AUTH_library/"),
        ("model_library", "AUTH_library/models/resnet"),
        ("model_library", "AUTH_library/my models"),
        ("cache_policy", "nosuch"),
        ("places", "disk"),
        ("places", ""),
        ("places", "object, object"),
        ("backend_key_file", "key"),
        ("object_silence_seconds", "0"),
    ],
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match="it must be") as caught:
        filter_factory({}, **{name: value})

    assert name in str(caught.value)
    assert value in str(caught.value)


def _read(**options):
    return FilterConfig.from_conf({}, options)


def test_allowed_accounts_are_separated_by_commas_and_have_the_prefix():
    found = _read(allowed_accounts="AUTH_a, AUTH_b").allowed_accounts
    assert found == {"AUTH_a", "AUTH_b"}
    assert _read().allowed_accounts == frozenset()
    with pytest.raises(ValueError, match="AUTH_physics"):
        _read(allowed_accounts="physics")
    config = _read(allowed_accounts="physics", reseller_prefix="")
    assert config.allowed_accounts == {"physics"}


def test_model_library_is_a_container_of_an_account():
    config = _read(model_library="AUTH_library/models")
    assert config.model_library == "AUTH_library/models"
    with pytest.raises(ValueError, match="instance AUTH_library/models"):
        _read(model_library="library/models")
    config = _read(model_library="library/models", reseller_prefix="")
    assert config.model_library == "library/models"


@pytest.mark.parametrize(
    ("written", "prefix"),
    [("AUTH", "AUTH_"), ("AUTH_", "AUTH_"), ("", ""), ("''", "")],
)
def test_reseller_prefix_is_read_as_swift_reads_its_own(written, prefix):
    conf = {"reseller_prefix": written or "''"}
    swifts, _ = config_read_reseller_options(conf, {})

    assert [_read(reseller_prefix=written).reseller_prefix] == swifts
    assert swifts == [prefix]


def test_unknown_option_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="worker_sock = /x") as caught:
        filter_factory({}, worker_sock="/x")

    assert all(name in str(caught.value) for name in OPTIONS)
    # Those of paste and of the log are not ours.
    options = {"log_level": "DEBUG", "name": "hapi", "log_name": "hapi"}
    assert filter_factory({"user": "swift", "workers": "8"}, **options)


@pytest.mark.parametrize(
    ("own_section", "expected"), [({}, 7.0), ({"worker_timeout": "8"}, 8.0)]
)
def test_own_section_overrides_the_defaults(own_section, expected):
    config = FilterConfig.from_conf({"worker_timeout": "7"}, own_section)

    assert config.worker_timeout == expected


def test_cache_policy_is_one_of_swifts_policies(monkeypatch):
    gold = StoragePolicy(0, "gold", is_default=True, aliases="or")
    brass = StoragePolicy(1, "brass", is_deprecated=True)
    policies = StoragePolicyCollection([gold, brass])
    monkeypatch.setattr("hapi_middleware.config.POLICIES", policies)

    for name in ("gold", "or", ""):
        assert _read(cache_policy=name).cache_policy == name
    for name in ("brass", "silver"):
        with pytest.raises(ValueError, match=r"swift\.conf: gold; or"):
            _read(cache_policy=name)
