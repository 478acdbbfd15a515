"""What a job knows of the features that the store has kept."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hapi_client.kept import KeptFeatures
from hapi_protocol.index import IndexRow, Span
from hapi_protocol.transforms import Training

WAY = (9, "float32")
OTHER = (3, "float32")
NUM_SAMPLES = 40


def span(shard: str, first: int, etag: str = "e") -> Span:
    rows = tuple(
        IndexRow(first + n, f"k{first + n}", 0, 512, None) for n in range(10)
    )
    return Span(shard, etag, rows)


SPANS = [span("a.tar", 0), span("a.tar", 10), span("b.tar", 0)]


def share(kept: KeptFeatures, *shards: str) -> float:
    keeping = kept.keeping(NUM_SAMPLES, shards or ("a.tar", "b.tar"))
    assert keeping is not None
    return keeping.shares.get(WAY, 0.0)


def test_what_was_stored_is_asked_for_again() -> None:
    kept = KeptFeatures("readwrite")
    kept.use([WAY])
    assert kept.way_of(SPANS[0], None) is None
    kept.note(WAY, SPANS[0], None, "store")
    assert kept.way_of(SPANS[0], None) == WAY
    assert kept.way_of(SPANS[1], None) is None
    assert kept.way_of(span("a.tar", 0, "new"), None) is None
    assert share(kept) == 0.25
    # Other data is no part of the training data.
    assert share(kept, "b.tar") == 0.0


def test_only_ways_in_use_are_asked_for_the_best_first() -> None:
    kept = KeptFeatures("readwrite")
    for way in (WAY, OTHER):
        kept.note(way, SPANS[0], None, "store")
    assert kept.way_of(SPANS[0], None) is None
    kept.use([OTHER, WAY])
    assert kept.way_of(SPANS[0], None) == OTHER
    kept.use([])
    assert kept.way_of(SPANS[0], None) is None


def test_hits_are_counted_once() -> None:
    kept = KeptFeatures("readwrite")
    kept.note(WAY, SPANS[0], None, "store")
    for _ in range(3):
        kept.note(WAY, SPANS[0], None, "hit")
    assert share(kept) == 0.25


def test_an_entry_that_went_is_dealt_again() -> None:
    kept = KeptFeatures("readwrite")
    kept.use([WAY])
    for each in SPANS:
        kept.note(WAY, each, None, "store")
    kept.note(WAY, SPANS[0], None, "miss")
    assert kept.way_of(SPANS[0], None) is None
    assert kept.way_of(SPANS[1], None) == WAY


def test_a_store_that_forgets_is_not_believed_until_it_remembers() -> None:
    kept = KeptFeatures("readwrite")
    kept.use([WAY])
    for state in ("store", "store", "store"):
        for each in SPANS:
            kept.note(WAY, each, None, state)
    # All that was asked for again had to be computed again.
    assert kept.way_of(SPANS[0], None) is None
    assert share(kept) < 0.25
    for each in SPANS:
        kept.note(WAY, each, None, "hit")
    assert kept.way_of(SPANS[0], None) == WAY


def test_what_others_have_kept_is_found_by_asking() -> None:
    kept = KeptFeatures("read")
    kept.use([WAY])
    kept.note(WAY, SPANS[0], None, "hit")
    assert kept.way_of(SPANS[2], None) is None
    kept.note(WAY, SPANS[1], None, "hit")
    # Two of two were there: those not asked for yet will be, too.
    assert kept.way_of(SPANS[2], None) == WAY
    assert 0.5 < share(kept) < 1
    for _ in range(3):
        kept.note(WAY, SPANS[2], None, "miss")
    assert kept.way_of(SPANS[2], None) is None


@pytest.mark.parametrize(
    ("mode", "states", "chance"),
    [
        ("readwrite", [], 1.0),
        ("readwrite", ["store"] * 5, 1.0),
        ("readwrite", ["off"] * 9, 0.0),
        ("readwrite", ["miss"] * 9, 0.0),
        ("read", ["miss"] * 9, 0.0),
    ],
)
def test_chance_of_being_kept_is_what_answers_say(
    mode: str, states: list[str], chance: float
) -> None:
    kept = KeptFeatures(mode)
    for state in states:
        kept.note(WAY, SPANS[0], None, state)
    keeping = kept.keeping(NUM_SAMPLES, ["a.tar"])
    assert keeping is not None
    assert keeping.chance == pytest.approx(chance, abs=0.05)


def test_random_changes_that_repeat_are_features_of_their_own() -> None:
    kept = KeptFeatures("readwrite", 2)
    kept.use([WAY])
    first, second = Training(7, 0), Training(7, 1)
    kept.note(WAY, SPANS[0], first, "store")
    assert kept.way_of(SPANS[0], first) == WAY
    assert kept.way_of(SPANS[0], second) is None
    assert share(kept) == 0.125
    keeping = kept.keeping(NUM_SAMPLES, ["a.tar"])
    assert keeping is not None
    assert keeping.variants == 2


def test_random_changes_that_never_repeat_are_not_remembered() -> None:
    kept = KeptFeatures("readwrite", None)
    kept.use([WAY])
    for epoch in range(3):
        kept.note(WAY, SPANS[0], Training(7, epoch), "store")
        assert kept.way_of(SPANS[0], Training(7, epoch)) is None
    assert kept.keeping(NUM_SAMPLES, ["a.tar"]) is None
    # Evaluation is the same each time.
    kept.note(WAY, SPANS[1], None, "store")
    assert kept.way_of(SPANS[1], None) == WAY


def test_a_job_or_a_store_without_a_cache_keeps_nothing() -> None:
    off, without = KeptFeatures("off"), KeptFeatures("readwrite")
    without.turn_off()
    for kept in (off, without):
        kept.use([WAY])
        kept.note(WAY, SPANS[0], None, "hit")
        assert kept.way_of(SPANS[0], None) is None
        assert kept.keeping(NUM_SAMPLES, ["a.tar"]) is None


def test_more_that_is_kept_never_looks_like_less() -> None:
    kept = KeptFeatures("readwrite")
    found = [share(kept)]
    for each in SPANS:
        kept.note(WAY, each, None, "store")
        found.append(share(kept))
    assert all(a < b for a, b in pairwise(found))
