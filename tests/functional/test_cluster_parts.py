"""Parts of hapi_cluster that need no cluster."""

import configparser
from pathlib import Path
from unittest.mock import Mock

import pytest

from hapi_cluster.configs import Deployment, Secrets, pipeline, render_all
from hapi_cluster.errors import ClusterError
from hapi_cluster.launch import choose_layout, worker_sockets
from hapi_cluster.memory_cache import MemoryCache, filter_factory
from hapi_cluster.paths import ClusterPaths
from hapi_cluster.settings import ClusterSettings


def files(**settings):
    """The rendered configuration files, parsed again."""
    made = ClusterSettings(**settings)
    ports = {
        name: number for number, name in enumerate(made.backends, start=2)
    }
    deployment = Deployment(
        settings=made,
        layout="single",
        secrets=Secrets("suffix", "key=", "root="),
        ports={"proxy": 1, **ports},
        user="me",
        paths=ClusterPaths(Path("/d")),
        worker_sockets=worker_sockets(made, Path("/d/run")),
    )
    parsed = {}
    for name, text in render_all(deployment).items():
        if name.endswith(".conf"):
            parser = configparser.RawConfigParser(default_section="")
            parser.read_string(text)
            parsed[name] = parser
    return parsed


def test_the_filter_has_its_place_in_the_pipeline():
    names = pipeline(ClusterSettings())
    at = names.index("hapi")
    assert names[at - 1 : at + 2] == ["tempauth", "hapi", "copy"]
    assert "hapi" not in pipeline(ClusterSettings(hapi_filter=False))
    # Encryption is right of all but the last logging.
    assert pipeline(ClusterSettings(encryption=True))[-4:] == [
        *("keymaster", "encryption", "proxy-logging", "proxy-server")
    ]


@pytest.mark.parametrize("url", [None, "http://k/v3"])
def test_every_filter_of_the_pipeline_has_a_section(url):
    proxy = files(encryption=True, keystone_url=url)["proxy-server.conf"]
    names = proxy["pipeline:main"]["pipeline"].split()
    for name in names[:-1]:
        assert proxy.has_section(f"filter:{name}"), name


def test_only_the_proxy_listens_on_another_address():
    made = files(host="0.0.0.0")
    assert made["proxy-server.conf"]["DEFAULT"]["bind_ip"] == "0.0.0.0"
    for server in ("account", "container", "object"):
        section = made[f"{server}-server.conf"]["DEFAULT"]
        assert section["bind_ip"] == "127.0.0.1"


def test_first_object_servers_have_filter_and_worker():
    made = files(object_servers=3, object_workers=2, worker=False)
    hapi = made["proxy-server.conf"]["filter:hapi"]
    assert hapi["places"] == "object"
    sockets = []
    for name in ("object", "object-2"):
        server = made[f"{name}-server.conf"]
        near = server["filter:hapi_object"]
        assert near["backend_key_file"] == hapi["backend_key_file"]
        names = server["pipeline:main"]["pipeline"].split()
        assert names[-2:] == ["hapi_object", "object-server"]
        worker = made[f"hapi-{name}-worker.conf"]["hapi-worker"]
        assert worker["socket"] == near["worker_socket"]
        sockets.append(near["worker_socket"])
    assert len(set(sockets)) == 2
    assert not made["object-3-server.conf"].has_section("filter:hapi_object")
    assert "places" not in files()["proxy-server.conf"]["filter:hapi"]
    ports = {
        made[f"{n}-server.conf"]["DEFAULT"]["bind_port"]
        for n in ("object", "object-2", "object-3")
    }
    assert len(ports) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"object_servers": 0},
        {"object_servers": 17},
        {"object_workers": 2},
        {"object_servers": 3, "object_workers": -1},
    ],
)
def test_impossible_numbers_of_object_servers_are_refused(settings):
    with pytest.raises(ClusterError, match="object_"):
        ClusterSettings(**settings)


def test_each_object_server_has_a_device():
    settings = ClusterSettings(object_servers=2)
    with pytest.raises(ClusterError, match="'single' has 1 devices for 2"):
        choose_layout(settings, None)
    assert choose_layout(settings, "replicated") == "replicated"


def test_cached_values_pass_through_json():
    cache = MemoryCache()
    cache.set("k", ("a", 1))
    assert cache.get("k") == ["a", 1]
    cache.set("x", b"bytes")
    cache.set("y", None)
    assert [cache.get(key) for key in "xyz"] == ["bytes", None, None]


def test_cached_values_expire():
    clock = Mock(return_value=1000.0)
    cache = MemoryCache(clock=clock)
    cache.set("short", 1, time=10)
    cache.set("long", 3)
    clock.return_value += 10
    assert (cache.get("short"), cache.get("long")) == (None, 3)


def test_counts_start_at_the_increment_and_end_at_zero():
    clock = Mock(return_value=1000.0)
    cache = MemoryCache(clock=clock)
    assert cache.incr("n", 5, time=10) == 5
    assert cache.incr("n", 2, time=1000) == 7
    assert cache.decr("n", 100) == 0
    assert cache.decr("new", 3) == 0
    # An increment does not lengthen a count's life.
    clock.return_value += 10
    assert cache.get("n") is None


def test_the_least_recently_used_entry_goes_first():
    cache = MemoryCache(max_entries=2)
    cache.set("a", 1)
    cache.set("b", 2)
    assert cache.get("a") == 1
    cache.set("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    cache.delete("a")
    assert cache.get("a") is None


def test_the_cache_is_where_swift_looks_for_it():
    seen = []

    def app(environ, start_response):
        seen.append(environ["swift.cache"])
        return []

    wrapped = filter_factory({})(app)
    for _ in range(2):
        wrapped({}, lambda *_: None)
    assert isinstance(seen[0], MemoryCache)
    assert seen[0] is seen[1]


@pytest.mark.parametrize("value", ["50% off", "key=a=b", "#1"])
def test_awkward_values_survive_the_ini_format(value):
    made = files(worker_options={"note": value})
    assert made["hapi-worker.conf"]["hapi-worker"]["note"] == value
