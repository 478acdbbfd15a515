"""Places that compute: their order, and which errors lead to the next."""

from collections import Counter

import pytest
from scipy.stats import chisquare

from hapi_middleware.metrics import FilterMetrics
from hapi_middleware.places.places import Computers, spread
from hapi_protocol.errors import HapiError, UnavailableError, make_error


class Log:
    """Counts what the filter reports."""

    def __init__(self):
        self.counts = Counter()

    def update_stats(self, name, amount):
        self.counts[name] += amount


class Place:
    """Answers each question with a value or an error."""

    KIND = "object"

    def __init__(self, answer):
        self.answer = answer
        self.asked = 0

    def find_model(self, identity, trans_id):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def error(code, retry_after=None):
    return make_error(code, code, retry_after=retry_after)


def ask(*answers):
    """Asks places in turn; returns the answer, and who was asked."""
    places = [Place(answer) for answer in answers]
    computers = Computers(places, FilterMetrics(Log()))
    try:
        found = computers.find_model(None, "")
    except HapiError as raised:
        found = raised.code
    return found, [place.asked for place in places]


@pytest.mark.parametrize(
    ("answers", "found", "asked"),
    [
        (["a", "b"], "a", [1, 0]),
        ([error("worker_unavailable"), "b"], "b", [1, 1]),
        ([error("does_not_fit"), error("queue_full"), "c"], "c", [1, 1, 1]),
        # A refusal is the same everywhere.
        ([error("cut_out_of_range"), "b"], "cut_out_of_range", [1, 0]),
        ([error("bad_package"), "b"], "bad_package", [1, 0]),
        # Damaged data: one more replica.
        ([error("damaged_shard"), "b"], "b", [1, 1]),
        (
            [error("damaged_shard"), error("damaged_shard"), "c"],
            "damaged_shard",
            [1, 1, 0],
        ),
        (
            [error("damaged_shard"), error("queue_full")],
            "damaged_shard",
            [1, 1],
        ),
        # All are busy: the one that will be free first.
        (
            [error("queue_full", 9.0), error("draining", 2.0)],
            "draining",
            [1, 1],
        ),
        ([], "worker_unavailable", []),
    ],
)
def test_places_are_asked_in_turn(answers, found, asked):
    assert ask(*answers) == (found, asked)


def test_nobody_to_ask_is_told_when_to_retry():
    with pytest.raises(UnavailableError, match="object server") as caught:
        Computers([], FilterMetrics(Log())).find_model(None, "")
    assert caught.value.retry_after


def test_only_one_queue_is_waited_for(monkeypatch):
    """Each place has a queue of 20 s; three took a minute."""
    monkeypatch.setattr("hapi_middleware.places.places.QUEUED_SECONDS", 0.0)
    full = error("queue_full", 5.0)
    assert ask(full, full, "c") == ("queue_full", [1, 0, 0])
    # What fails at once does not count.
    assert ask(error("worker_unavailable"), "b") == ("b", [1, 1])


def test_spans_are_spread_evenly_and_stay_where_they_are():
    devices = range(3)
    spans = [
        (f"/a/c/shard-{n}.tar", 7_000_000 * m)
        for n in range(40)
        for m in range(5)
    ]

    def first(span, present):
        return min(present, key=lambda each: spread(*span, each))

    chosen = Counter(first(span, devices) for span in spans)
    assert chisquare([chosen[each] for each in devices]).pvalue > 0.01
    # Spans of one shard use all replicas.
    one_shard = [("/a/c/shard.tar", 7_000_000 * m) for m in range(30)]
    assert {first(span, devices) for span in one_shard} == {*devices}
    # Without a device, only its own spans move.
    for span in spans:
        if first(span, devices) != 2:
            assert first(span, (0, 1)) == first(span, devices)
