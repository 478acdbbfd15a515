"""Options of the filter: read, documented, and strict."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from swift.common.storage_policy import StoragePolicy, StoragePolicyCollection
from swift.common.utils.config import config_read_reseller_options

from hapi_middleware.config import OPTIONS, FilterConfig
from hapi_middleware.filter import filter_factory

SAMPLE = Path(__file__).parents[3] / "deploy" / "proxy-server.conf-sample"


def _documented():
    """Options of the sample's filter section, commented or not."""
    section = SAMPLE.read_text().partition("[filter:hapi]")[2]
    lines = re.findall(r"^#? ?([a-z_]+) =(?: (.*))?$", section, re.MULTILINE)
    return dict(lines)


def test_every_option_is_documented_and_every_documented_one_is_read():
    documented = set(_documented()) - {"use"}

    assert {name for name in documented if name in OPTIONS} == set(OPTIONS)
    assert not {
        name for name in documented - set(OPTIONS) if "log_" not in name
    }


def test_documented_values_are_the_defaults():
    values = {k: v for k, v in _documented().items() if k in OPTIONS}

    assert FilterConfig.from_conf({}, values) == FilterConfig()


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
        ("cache_policy", "nosuch"),
    ],
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match="it must be") as caught:
        filter_factory({}, **{name: value})

    assert name in str(caught.value)
    assert value in str(caught.value)


def test_allowed_accounts_are_separated_by_commas():
    config = FilterConfig.from_conf({}, {"allowed_accounts": "AUTH_a, AUTH_b"})

    assert config.allowed_accounts == {"AUTH_a", "AUTH_b"}
    assert FilterConfig.from_conf({}, {}).allowed_accounts == frozenset()


def test_allowed_account_without_the_prefix_is_refused():
    with pytest.raises(ValueError, match="AUTH_physics"):
        FilterConfig.from_conf({}, {"allowed_accounts": "physics"})
    options = {"allowed_accounts": "physics", "reseller_prefix": ""}
    assert FilterConfig.from_conf({}, options).allowed_accounts == {"physics"}


@pytest.mark.parametrize(
    ("written", "prefix"),
    [("AUTH", "AUTH_"), ("AUTH_", "AUTH_"), ("", ""), ("''", "")],
)
def test_reseller_prefix_is_read_as_swift_reads_its_own(written, prefix):
    config = FilterConfig.from_conf({}, {"reseller_prefix": written})
    swifts, _ = config_read_reseller_options(
        {"reseller_prefix": written or "''"}, {}
    )

    assert [config.reseller_prefix] == swifts == [prefix]


def test_unknown_option_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="worker_sock = /x") as caught:
        filter_factory({}, worker_sock="/x")

    for name in OPTIONS:
        assert name in str(caught.value)


def test_keys_of_paste_and_logging_are_accepted():
    options = {"log_level": "DEBUG", "name": "hapi", "log_name": "hapi"}

    assert filter_factory({"user": "swift", "workers": "8"}, **options)


@pytest.mark.parametrize(
    ("own_section", "expected"), [({}, 7.0), ({"worker_timeout": "8"}, 8.0)]
)
def test_own_section_overrides_the_defaults(own_section, expected):
    config = FilterConfig.from_conf({"worker_timeout": "7"}, own_section)

    assert config.worker_timeout == expected


def test_cache_policy_is_one_of_swifts_policies(monkeypatch):
    policies = StoragePolicyCollection(
        [
            StoragePolicy(0, "gold", is_default=True, aliases="or"),
            StoragePolicy(1, "brass", is_deprecated=True),
        ]
    )
    monkeypatch.setattr("hapi_middleware.config.POLICIES", policies)

    for name in ("gold", "or", ""):
        config = FilterConfig.from_conf({}, {"cache_policy": name})
        assert config.cache_policy == name
    for name in ("brass", "silver"):
        with pytest.raises(ValueError, match=r"swift\.conf: gold; or"):
            FilterConfig.from_conf({}, {"cache_policy": name})
