"""The worker's options, and the sample configuration."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hapi_protocol.options import read_options
from hapi_worker.config import (
    SECTION,
    WorkerConfig,
    load_config,
    merged,
    option_defaults,
)
from hapi_worker.main import main

DEPLOY = Path(__file__).parents[3] / "deploy"
SAMPLE = DEPLOY / "hapi-worker.conf-sample"


def sample_options():
    """Options of the sample file, the comment signs of defaults removed."""
    text = re.sub(
        r"^# ?(\w+ =.*)$", r"\1", SAMPLE.read_text(), flags=re.MULTILINE
    )
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string(text)
    return dict(parser.items(SECTION))


def parse_config(**texts):
    return read_options(WorkerConfig, SECTION, texts)


def test_sample_file_has_each_option_with_its_default():
    assert sample_options() == option_defaults()


def test_sample_file_is_a_valid_configuration():
    assert load_config(str(SAMPLE)) == WorkerConfig()


def test_values_are_typed():
    config = parse_config(
        socket_mode="0600",
        memory_limit="3 GiB",
        allowed_users=f"root, {os.getuid()}",
        device="cuda:1, cuda:2",
        account_weights="AUTH_a=4, .unauthenticated = 0.25",
        drain_seconds="2.5",
        log_level="debug",
    )
    assert config.socket_mode == 0o600
    assert config.memory_limit == 3 << 30
    assert config.allowed_users == {0, os.getuid()}
    assert config.device == "cuda:1,cuda:2"
    assert dict(config.account_weights) == {
        "AUTH_a": 4.0,
        ".unauthenticated": 0.25,
    }
    assert config.drain_seconds == 2.5
    assert config.log_level == "DEBUG"
    assert WorkerConfig().memory_limit is None


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("socket", "worker.sock", "absolute"),
        ("socket", "/" + "x" * 101, "at most 101 bytes"),
        ("socket_mode", "rw", "octal"),
        ("allowed_users", "no-such-user", "no-such-user"),
        ("device", "tpu", "cuda"),
        ("device", "cpu,", "separated by commas"),
        ("device", "auto,cpu", "separated by commas"),
        ("account_weights", "AUTH_a", "AUTH_a=4"),
        ("account_weights", "=2", "AUTH_a=4"),
        ("account_weights", "AUTH_a=-1", "AUTH_a=4"),
        ("account_weights", "AUTH_a=0", "from 0.001"),
        ("account_weights", "AUTH_a=2000", "to 1000"),
        ("account_weights", "AUTH_a=1, AUTH_a=2", "each account once"),
        ("torch_threads", "0", "from 1"),
        ("memory_limit", "lots", "auto"),
        ("memory_limit", "0", "auto"),
        ("max_streams", "0", "from 1"),
        ("max_streams", "2.5", "from 1"),
        ("decode_threads", "-1", "from 0"),
        ("buffer_bytes", "64 parsecs", "64MiB"),
        ("idle_seconds", "0", "positive"),
        ("idle_seconds", "nan", "positive"),
        ("log_level", "LOUD", "WARNING"),
    ],
)
def test_bad_value_is_refused_with_name_value_and_what_is_allowed(
    name, value, allowed
):
    with pytest.raises(ValueError, match=re.escape(allowed)) as caught:
        parse_config(**{name: value})
    assert f"[hapi-worker] {name} = {value}: it must be" in str(caught.value)


def test_running_worker_takes_over_limits_and_names_the_rest():
    running = parse_config(max_streams_per_account="3")
    changed = parse_config(
        max_streams_per_account="5",
        account_weights="AUTH_a=2",
        max_batch="4",
        socket="/other.sock",
    )
    config, unchanged = merged(running, changed)
    assert config.max_streams_per_account == 5
    assert config.account_weights == (("AUTH_a", 2.0),)
    assert config.max_batch == running.max_batch
    assert unchanged == ["socket", "max_batch"]
    assert merged(config, config) == (config, [])


@pytest.mark.parametrize(
    "text",
    [
        "[hapi-worker]\nmax_stream = 3\n",
        "[worker]\nmax_streams = 3\n",
        "[hapi-worker]\n[other]\n",
        "max_streams = 3\n",
        "[hapi-worker]\nmax_streams = 3\nmax_streams = 4\n",
        "",
    ],
)
def test_file_with_unknown_names_is_refused(tmp_path, text):
    path = tmp_path / "worker.conf"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"unknown option|section|cannot"):
        load_config(str(path))


def test_check_reports_all_mistakes_of_a_file(tmp_path, capsys):
    path = tmp_path / "worker.conf"
    path.write_text(
        "[hapi-worker]\ndevice = abacus\nmax_stream = 3\nmax_batch = none\n"
    )
    assert main(["--config", str(path), "--check"]) == 2
    output = capsys.readouterr().err
    for text in ("= abacus", "unknown option max_stream =", "max_batch ="):
        assert text in output
    assert main(["--config", str(SAMPLE), "--check"]) == 0


def test_check_does_not_load_torch():
    program = "import sys, hapi_worker.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_service_unit_is_confined_and_never_required():
    unit = (DEPLOY / "hapi-worker.service").read_text()
    for line in (
        "Type=notify",
        "NoNewPrivileges=yes",
        "PrivateNetwork=yes",
        "ProtectSystem=strict",
        "Restart=on-failure",
        "OOMPolicy=continue",
        "Group=swift",
    ):
        assert f"\n{line}\n" in unit
    assert "\nMemoryMax=" in unit
    assert "RequiredBy=" not in unit


def test_sockets_of_systemd_stay_while_the_worker_restarts():
    unit = (DEPLOY / "hapi-worker.service").read_text()
    sockets = (DEPLOY / "hapi-worker.socket").read_text()
    folder = re.search(r"^RuntimeDirectory=(\w+)$", unit, re.M)
    assert folder
    paths = re.findall(r"^ListenStream=(.+)$", sockets, re.M)
    expected = option_defaults()["socket"]
    assert paths == [expected, f"{expected}.admin"]
    assert all(path.startswith(f"/run/{folder[1]}/") for path in paths)
    # systemd removes the folder, and the sockets with it, otherwise.
    assert "\nRuntimeDirectoryPreserve=yes\n" in unit
