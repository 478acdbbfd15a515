"""Alarms and dashboard use metrics that exist; alarms fire when they should.

``alarms.yml`` is the list of alarms of the documentation, which includes it.
"""

import contextlib
import json
import re
import shutil
import subprocess

import pytest
import yaml

from documentation import ROOT
from hapi_middleware import metrics as filter_metrics
from hapi_protocol.errors import CODES
from hapi_protocol.unix_http import UnixConnection
from hapi_worker.monitoring import metrics as worker_metrics

FOLDER = ROOT / "deploy" / "monitoring"
MAPPINGS = yaml.safe_load((FOLDER / "statsd-mapping.yml").read_text())
RULES = yaml.safe_load((FOLDER / "alarms.yml").read_text())["groups"][0]
OF_OBJECT_SERVERS = (
    *("jobs", "models", "worker_away", "worker_busy", "worker_degraded"),
    *("not_here", "refused", "streams.done", "source_bytes", "sent_bytes"),
    *("first_byte.timing", "stream.timing"),
)
EVERYWHERE = {"instance", "job", "le"}


def mapped(name):
    """Name and labels of a filter's metric at statsd_exporter, if kept."""
    for mapping in MAPPINGS["mappings"]:
        found = re.search(mapping["match"], name)
        if found and mapping.get("action") == "drop":
            return None
        if found:
            full = mapping["name"].replace("${1}", found[1] or "")
            labels = mapping.get("labels", {})
            return full, {k: found[int(v[1:])] for k, v in labels.items()}
    raise AssertionError(f"no mapping for {name}")


def names_of_filters():
    """Those of the table, which another test compares with the filter."""
    names = re.findall(r"^``(hapi\.\S+)``", filter_metrics.__doc__, re.M)
    assert names
    for name in names + [f"hapi_object.{n}" for n in OF_OBJECT_SERVERS]:
        name = name.replace("<node>", "10-0-0-1_6200")
        yield "swift-proxy." + re.sub("<(kind|code)>", "busy", name)


@pytest.fixture(scope="module")
def known(cluster):
    """Labels of each metric that filters send and a real worker exports."""
    found = {name: set(labels) for name, labels in kept(names_of_filters())}
    address = f"{cluster.worker_socket}.admin"
    with contextlib.closing(UnixConnection(address, 20)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    exported = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    # A counter without events has no labels yet: the table has them.
    for line in worker_metrics.__doc__.splitlines():
        if line.startswith("hapi_worker_") and line.split()[0] in exported:
            labels = re.sub(r"\(\w+\)", "", line[42:66])
            found[line.split()[0]] = set(re.findall(r"\w+", labels))
    return {**found, "up": set()}


def kept(names):
    return filter(None, map(mapped, names))


def expressions():
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    targets = [t for p in dashboard["panels"] for t in p.get("targets", [])]
    return [x["expr"] for x in (*RULES["rules"], *targets)]


def unknown(expression, known):
    """Names of metrics and labels that do not exist."""
    expression = re.sub(r"hapi:\w+:10m", "", expression)
    names = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(r"\b(?:up|hapi_\w+)\b", expression)
    }
    labels = re.findall(r'(\w+)(?==~?")', expression)
    for group in re.findall(r"by \(([^)]*)\)", expression):
        labels += re.findall(r"\w+", group)
    there = EVERYWHERE.union(*(known.get(name, set()) for name in names))
    return (names - set(known)) | (set(labels) - there if names else set())


def test_expressions_use_metrics_and_labels_that_exist(known):
    assert len(expressions()) > 30
    for expression in expressions():
        assert not unknown(expression, known), expression


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(hapi_worker_job_total[5m])",
        'hapi_filter_jobs_total{places="object"}',
        "sum by (code) (hapi_worker_jobs_total)",
        "hapi_worker_slot_second_bucket",
    ],
)
def test_misspelt_metrics_and_labels_are_found(known, wrong):
    assert unknown(wrong, known)


def test_each_metric_of_the_filters_is_mapped_once():
    names = [name for name, _ in kept(names_of_filters())]
    assert mapped("host-1.proxy-server.hapi.node.busy") is None
    assert mapped("host-1.proxy-server.hapi.node.busy.10-0-0-1_6200") == (
        "hapi_node_faults_total",
        {"kind": "busy", "node": "10-0-0-1_6200"},
    )
    for code in CODES:
        wanted = ("hapi_filter_errors_total", {"code": code})
        assert mapped(f"proxy-server.hapi.errors.{code}") == wanted
    assert all(re.fullmatch(r"hapi_\w+_(total|seconds)", n) for n in names)


def fault(kind, values):
    return {f'hapi_node_faults_total{{kind="{kind}",node="n"}}': values}


def jobs(place, values):
    return {f'hapi_filter_jobs_total{{place="{place}"}}': values}


STEADY = "100+0x60"
FIRST = "_x20 1+0x40"
"""An event that makes the series."""
CASES = {
    "HapiWorkerDown": (
        {'up{job="hapi-worker"}': "1x20 0x40"},
        {'up{job="hapi-worker"}': "1x20 0 1x40"},
    ),
    "HapiWorkerDegraded": (
        {"hapi_worker_degraded": "1x60"},
        {"hapi_worker_degraded": "0x60"},
    ),
    "HapiDeviceFailed": (
        {'hapi_worker_device_failures_total{device="cuda:0"}': "_x20 1x40"},
        {'hapi_worker_device_failures_total{device="cuda:0"}': "0x60"},
    ),
    "HapiWorkerUnavailable": (
        {'hapi_filter_errors_total{code="too_slow"}': FIRST},
        {
            'hapi_filter_errors_total{code="too_slow"}': STEADY,
            'hapi_filter_errors_total{code="not_found"}': "0+9x60",
        },
    ),
    "HapiStreamsBreak": (
        {'hapi_filter_streams_total{outcome="broken"}': FIRST},
        {
            'hapi_filter_streams_total{outcome="broken"}': STEADY,
            'hapi_filter_streams_total{outcome="gone"}': "0+9x60",
        },
    ),
    "HapiNodeFails": (
        fault("silent", "_x18 3x40") | fault("worker", "7x19 9x40"),
        fault("silent", "_x18 2x40") | fault("worker", "7x19 9x40"),
    ),
    "HapiNodeDevice": (fault("device", FIRST), fault("device", STEADY)),
    "HapiDamagedReplica": (fault("damaged", FIRST), fault("damaged", STEADY)),
    "HapiRequestsRefused": (fault("refused", FIRST), fault("refused", STEADY)),
    "HapiNodeDegraded": (fault("degraded", FIRST), fault("degraded", STEADY)),
    "HapiStaleNodes": (
        fault("stale", "0+2x200") | jobs("object", "0+100x200"),
        fault("stale", "0+1x200") | jobs("object", "0+200x200"),
    ),
    "HapiBusyNodes": (
        fault("busy", "0+20x60") | jobs("object", "0+100x60"),
        fault("busy", "0+5x60") | jobs("object", "0+100x60"),
    ),
    "HapiJobsMoveToProxies": (
        jobs("proxy", "0+1x2000 2000+9x200") | jobs("object", "0+10x2200"),
        jobs("proxy", "0+1x2200") | jobs("object", "0+10x2200"),
    ),
}
"""Series with one value a minute that make an alarm fire, and that do not."""
MINUTES = {"HapiStaleNodes": 120, "HapiJobsMoveToProxies": 2180}


def test_each_alarm_has_a_case_and_says_where_to_look():
    alarms = [rule for rule in RULES["rules"] if "alert" in rule]
    assert {alarm["alert"] for alarm in alarms} == set(CASES)
    assert all(alarm["annotations"]["look_at"] for alarm in alarms)


@pytest.mark.parametrize("alarm", CASES)
def test_alarm_fires_and_is_silent(alarm, tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here")
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": name, "values": values}
                for name, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alarm}",'
                    'alertstate="firing"})',
                    "eval_time": f"{MINUTES.get(alarm, 25)}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] * fires,
                }
            ],
        }
        for fires, series in zip((1, 0), CASES[alarm], strict=True)
    ]
    path = tmp_path / "test.yml"
    files = [str(FOLDER / "alarms.yml")]
    path.write_text(json.dumps({"rule_files": files, "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
