"""Entries of requests in the access log, which must suffice for billing."""

import dataclasses
import logging
import os
import time
from contextlib import nullcontext
from functools import partial
from typing import Any
from urllib.parse import unquote

import pytest
from swift.common.middleware import proxy_logging

from filter_under_test import (
    MODEL,
    PACKAGE,
    SHARD,
    SOURCE,
    FilterUnderTest,
    annotation,
    filter_and_worker,
    s3_env,
)
from hapi_middleware.handlers.access_log import UsageQuery
from hapi_middleware.places.computer import Granted
from hapi_protocol.errors import HapiError
from hapi_protocol.job_messages import Usage
from stub_worker import break_off, refuse_shard

USAGE = Usage(
    kind="features",
    charged_account="AUTH_test",
    model_digest="d" * 64,
    cut=3,
    encoding="float32",
    samples=64,
    errors=2,
    device_seconds=1.25,
    decode_seconds=0.5,
    cpu_seconds=3.0,
    source_bytes=260_000,
    sent_bytes=70_000,
    outcome="done",
    reason="",
)
ENTRY = f"hapi:model={MODEL};cut=3;account=AUTH_test"
QUOTED = "/AUTH_test/models/a%20b%2Cc%3Bd%3D%E2%82%AC"
USED = (
    ";samples=64;errors=2;device_seconds=1.250;decode_seconds=0.500"
    ";source_bytes=260000;sent_bytes=70000;outcome=done"
)


@dataclasses.dataclass
class Logged:
    """The filter behind Swift's proxy-logging, and the lines of both."""

    world: FilterUnderTest
    app: Any
    lines: list[str]
    own: list[str]

    def ask(self, **changes):
        request = self.world.request(**{"headers": annotation(), **changes})
        return request.get_response(self.app)

    def entries(self):
        """Returns our entries of the lines so far, and clears the lines."""
        found = [unquote(line) for line in self.lines]
        self.lines.clear()
        return found

    def ends_with(self, outcome, reason="", **usage):
        """Sets how the worker says that the next job ended."""
        self.world.worker.usage = dataclasses.replace(
            USAGE, outcome=outcome, reason=reason, **usage
        )

    def usage_requests(self):
        calls = self.world.worker.calls
        return [c for c in calls if c[0] == "GET" and "/jobs/" in c[1]]


@pytest.fixture
def logged(tmp_path, monkeypatch):
    with filter_and_worker(tmp_path, worker_timeout="2.0") as world:
        world.swift.may_be_unread = True
        world.send(headers=annotation())
        world.worker.usage = USAGE
        conf = {"log_msg_template": "{log_info}"}
        app = proxy_logging.ProxyLoggingMiddleware(world.pipeline, conf)
        found = Logged(world, app, [], [])
        monkeypatch.setattr(app.access_logger, "info", found.lines.append)
        monkeypatch.setattr(
            world.filter.logger,
            "info",
            lambda text, *values: found.own.append(text % values),
        )
        yield found
        world.swift.assert_nothing_is_open()


def test_entry_of_a_complete_stream_has_its_usage(logged):
    assert logged.ask().body == SHARD.upper()

    assert logged.entries() == [ENTRY + USED]
    num_jobs = len(logged.world.worker.jobs)
    assert logged.usage_requests() == [("GET", f"/jobs/j{num_jobs}")]
    assert logged.own == []


DATA = "/AUTH_test/data"


@pytest.mark.parametrize(
    ("request_", "entry"),
    [
        (
            {
                "method": "POST",
                "path": DATA,
                "query": "?hapi",
                "body": b"x\n" * 3,
            },
            ENTRY.replace(";account", ";objects=3;account"),
        ),
        (
            {"headers": {"X-Hapi-Index": "true"}},
            "hapi:model=-;cut=0;account=AUTH_test",
        ),
        (
            {"headers": annotation(samples="0-3")},
            ENTRY.replace(";account", ";wanted=0-3;account"),
        ),
        ({"headers": annotation(model=QUOTED)}, ENTRY.replace(MODEL, QUOTED)),
    ],
)
def test_entry_names_what_was_asked_in_one_word(logged, request_, entry):
    logged.world.swift.put(f"{DATA}/x", b"x")
    logged.world.swift.put("/AUTH_test/models/a b,c;d=€", PACKAGE)
    assert logged.ask(**request_).body

    assert logged.entries() == [entry + USED]


def test_entry_of_a_stream_closed_by_its_client_has_its_usage(logged):
    """The line is written before Swift closes the stream's iterator."""
    logged.ends_with("gone")
    # More than the sockets' buffers: the worker ends at the close.
    logged.world.swift.put(SOURCE, bytes(1 << 20) * 24)
    logged.world.worker.ended.clear()
    chunks = iter(logged.ask().app_iter)
    assert next(chunks)
    chunks.close()

    assert logged.entries() == [ENTRY + USED.replace("done", "gone")]


@pytest.mark.parametrize(
    ("answer", "reason", "end"),
    [
        (break_off, "too_slow", pytest.raises(HapiError)),
        (refuse_shard, "damaged_shard", nullcontext()),
    ],
    ids=["during the stream", "before it"],
)
def test_entry_of_a_failed_job_has_its_usage_and_the_reason(
    logged, answer, reason, end
):
    logged.ends_with("failed", reason)
    logged.world.worker.answer = answer
    with end:
        response = logged.ask()
        assert response.body
        assert response.status_int == 422

    [entry] = logged.entries()
    assert entry.endswith(f";outcome=failed;reason={reason}")


@pytest.mark.parametrize("has_ended", [False, True])
def test_entry_has_no_usage_if_the_worker_does_not_have_it(logged, has_ended):
    logged.world.worker.usage = USAGE if has_ended else None
    chunks = iter(logged.ask().app_iter)
    assert next(chunks)
    if has_ended:
        os.unlink(logged.world.worker.socket_path)
    assert list(chunks)

    assert logged.entries() == [ENTRY]


def test_wait_for_the_usage_ends_after_a_second(logged):
    logged.world.worker.usage_delay_seconds = 1.9
    before = time.monotonic()
    assert logged.ask().body == SHARD.upper()
    waited = time.monotonic() - before

    assert 0.9 < waited < 1.7
    assert logged.entries() == [ENTRY]


def test_requests_without_a_job_request_no_usage(logged):
    response = logged.ask()
    assert response.body
    etag = response.headers["ETag"]
    logged.world.worker.calls.clear()
    logged.lines.clear()
    for request in (
        {"method": "HEAD"},
        {"headers": {**annotation(), "If-None-Match": etag}},
        {"headers": annotation(cut="99"), "method": "HEAD"},
    ):
        _ = logged.ask(**request).body

    assert logged.entries() == [ENTRY, ENTRY, ENTRY.replace("cut=3", "cut=99")]
    assert logged.usage_requests() == []


def test_other_entries_of_the_line_are_not_changed(logged):
    response = logged.ask(env={"swift.log_info": ["cs:valid"]})
    response.environ["swift.log_info"].append("late:one")
    assert response.body == SHARD.upper()

    [entry] = logged.entries()
    assert entry.split(",") == ["cs:valid", ENTRY + USED, "late:one"]


@pytest.mark.parametrize("is_closed_early", [False, True])
def test_s3_callers_stream_is_in_the_filters_own_log(logged, is_closed_early):
    """s3api passes on a copy of the request, which no line would show."""
    response = logged.ask(env=s3_env())
    chunks = iter(response.app_iter)
    assert next(chunks)
    if is_closed_early:
        chunks.close()
    else:
        assert list(chunks)
    response.app_iter.close()

    assert logged.own == [f"{ENTRY}{USED} (txn: tx1)"]
    assert logged.entries() == [ENTRY]


def test_usage_is_the_sum_over_all_workers_of_a_request():
    """One that failed has used its devices, too."""
    usages = [
        dataclasses.replace(USAGE, outcome="failed", reason="internal"),
        HapiError("worker_unavailable", "no answer"),
        dataclasses.replace(USAGE, samples=6),
    ]
    query = UsageQuery(logging.getLogger())
    for usage in usages:
        query.add(Granted(None, partial(_answer, usage)))
    entry = query()
    assert ";samples=70;errors=4;device_seconds=2.500;" in entry
    assert entry.endswith(";outcome=done")


def _answer(usage, _timeout):
    if isinstance(usage, HapiError):
        raise usage
    return usage
