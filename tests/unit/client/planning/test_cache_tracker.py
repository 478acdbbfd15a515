"""What a job knows of the features that the store has kept."""

from __future__ import annotations

import pytest

from hapi_client.planning.cache_tracker import KeptFeatures
from hapi_protocol.data_index import IndexRow, Span
from hapi_protocol.transforms import Training
from hapi_splitter.planner.cache_plan import Keeping

WAY = (9, "float32")
OTHER = (3, "float32")


def span(shard: str, first: int, etag: str = "e") -> Span:
    rows = tuple(
        IndexRow(first + n, f"k{first + n}", 0, 512, None) for n in range(10)
    )
    return Span(shard, etag, rows)


SPANS = [span("a.tar", 0), span("a.tar", 10), span("b.tar", 0)]
LAST = span("b.tar", 10)
OTHERS = [span("val.tar", 0)]


def kept_of(mode: str = "readwrite", variants: int | None = 1) -> KeptFeatures:
    """Of a job that plans, which asks for the first way."""
    kept = KeptFeatures(mode, variants)
    kept.follow([*SPANS, LAST], OTHERS)
    kept.use([WAY])
    kept.begin(0)
    return kept


def keeping_of(kept: KeptFeatures) -> Keeping:
    keeping = kept.keeping()
    assert keeping is not None
    return keeping


def share(kept: KeptFeatures) -> float:
    return keeping_of(kept).shares.get(WAY, 0.0)


def test_what_was_stored_is_asked_for_again() -> None:
    kept = kept_of()
    assert kept.way_of(SPANS[0], None) is None
    kept.note(WAY, SPANS[0], None, "store")
    assert kept.way_of(SPANS[0], None) == WAY
    assert kept.way_of(SPANS[1], None) is None
    assert kept.way_of(span("a.tar", 0, "new"), None) is None
    assert share(kept) == 0.25


def test_other_splits_are_found_and_not_counted() -> None:
    kept = kept_of()
    kept.note(WAY, OTHERS[0], None, "store")
    assert kept.way_of(OTHERS[0], None) == WAY
    assert share(kept) == 0.0


def test_pieces_of_spans_are_no_part_of_what_is_kept() -> None:
    kept = kept_of()
    piece = SPANS[0].part(0, 4)
    kept.note(WAY, piece, None, "store")
    kept.dealt(piece)
    assert kept.way_of(piece, None) is None
    assert share(kept) == 0.0
    assert keeping_of(kept).whole < 1


def test_only_ways_in_use_are_asked_for_the_best_first() -> None:
    kept = kept_of()
    for way in (WAY, OTHER):
        kept.note(way, SPANS[0], None, "store")
    kept.use([])
    assert kept.way_of(SPANS[0], None) is None
    kept.use([OTHER, WAY])
    assert kept.way_of(SPANS[0], None) == OTHER


def test_hits_are_counted_once() -> None:
    kept = kept_of()
    kept.note(WAY, SPANS[0], None, "store")
    for _ in range(3):
        kept.note(WAY, SPANS[0], None, "hit")
    assert share(kept) == 0.25


def test_what_this_epoch_has_kept_is_for_the_next_one() -> None:
    kept = kept_of()
    for each in SPANS[:2]:
        kept.dealt(each)
        kept.note(WAY, each, None, "store")
    keeping = keeping_of(kept)
    assert (keeping.shares[WAY], keeping.before[WAY]) == (0.5, 0.0)
    assert keeping.rest == 0.5
    kept.begin(1)
    keeping = keeping_of(kept)
    assert (keeping.shares[WAY], keeping.before[WAY]) == (0.5, 0.5)
    assert keeping.rest == 1.0


def test_ranks_share_an_epoch() -> None:
    kept = kept_of()
    kept.begin(1, ranks=2)
    kept.dealt(SPANS[0])
    assert keeping_of(kept).rest == 0.5


def test_an_entry_that_went_is_dealt_again() -> None:
    kept = kept_of()
    for each in SPANS:
        kept.note(WAY, each, None, "store")
    kept.note(WAY, SPANS[0], None, "miss")
    assert kept.way_of(SPANS[0], None) is None
    assert kept.way_of(SPANS[1], None) == WAY
    assert share(kept) == 0.5


def test_a_span_whose_promises_are_broken_is_not_asked_for_any_more() -> None:
    kept = kept_of()
    asked = 0
    for _ in range(9):
        kept.note(WAY, SPANS[1], None, "hit")
        asked += kept.way_of(SPANS[0], None) is not None
        kept.note(WAY, SPANS[0], None, "store")
    assert asked == 2
    assert kept.way_of(SPANS[1], None) == WAY
    # It is there after all.
    kept.note(WAY, SPANS[0], None, "hit")
    assert kept.way_of(SPANS[0], None) == WAY


def test_a_store_that_only_promises_is_not_planned_on() -> None:
    kept = kept_of()
    for _ in range(20):
        for each in SPANS:
            kept.note(WAY, each, None, "store")
    assert kept.way_of(SPANS[0], None) is None
    assert share(kept) == 0.0
    assert keeping_of(kept).chances[WAY] < 0.6
    kept.note(OTHER, SPANS[0], None, "store")
    assert keeping_of(kept).chance == 1.0


def test_all_is_forgotten_when_all_has_gone() -> None:
    kept = KeptFeatures("readwrite")
    spans = [span("a.tar", 10 * n) for n in range(20)]
    kept.follow(spans)
    kept.use([WAY])
    for each in spans:
        kept.note(WAY, each, None, "store")
        kept.note(WAY, each, None, "hit")
    asked = 0
    for each in spans:
        if kept.way_of(each, None):
            asked += 1
            kept.note(WAY, each, None, "store")
    assert asked < 10
    # Those that were asked for are there again.
    assert share(kept) == pytest.approx(1 / 20)
    assert kept.way_of(spans[asked - 1], None) == WAY


def test_what_others_have_kept_is_found_by_asking() -> None:
    kept = KeptFeatures("read")
    spans = [span("a.tar", 10 * n) for n in range(20)]
    kept.follow(spans)
    kept.use([WAY])
    kept.note(WAY, spans[0], None, "hit")
    assert kept.way_of(spans[9], None) is None
    assert share(kept) == pytest.approx(1 / 20)
    for each in spans[1:5]:
        kept.note(WAY, each, None, "hit")
    # All five were there: those not asked for yet will be, too.
    assert kept.way_of(spans[9], None) == WAY
    assert 0.8 < share(kept) < 1
    kept.note(WAY, spans[9], None, "miss")
    assert kept.way_of(spans[10], None) is None


@pytest.mark.parametrize(
    ("mode", "states", "chance"),
    [
        ("readwrite", [], 1.0),
        ("readwrite", ["hit"] * 30, 1.0),
        ("readwrite", ["off"] * 30, 0.0),
        ("readwrite", ["miss"] * 30, 0.0),
        ("read", ["miss"] * 30, 0.0),
    ],
)
def test_chance_of_being_kept_is_what_answers_say(
    mode: str, states: list[str], chance: float
) -> None:
    kept = kept_of(mode)
    for state in states:
        kept.note(WAY, SPANS[0], None, state)
    assert keeping_of(kept).chance == pytest.approx(chance, abs=0.05)


def test_random_changes_that_repeat_are_features_of_their_own() -> None:
    kept = kept_of(variants=2)
    first, second = Training(7, 0), Training(7, 1)
    kept.note(WAY, SPANS[0], first, "store")
    assert kept.way_of(SPANS[0], first) == WAY
    assert kept.way_of(SPANS[0], second) is None
    kept.begin(1)
    keeping = keeping_of(kept)
    assert keeping.variants == 2
    assert keeping.shares[WAY] == 0.125
    # The round of both goes on, in which it is not asked for again.
    assert keeping.before[WAY] == 0.0
    assert keeping.rest == 0.5
    kept.begin(2)
    assert keeping_of(kept).before[WAY] == 0.125


def test_random_changes_that_never_repeat_are_not_remembered() -> None:
    kept = kept_of(variants=None)
    for epoch in range(3):
        kept.note(WAY, SPANS[0], Training(7, epoch), "store")
        assert kept.way_of(SPANS[0], Training(7, epoch)) is None
    assert kept.keeping() is None
    # Evaluation is the same each time.
    kept.note(WAY, SPANS[1], None, "store")
    assert kept.way_of(SPANS[1], None) == WAY


def test_who_does_not_plan_or_has_no_cache_notes_nothing() -> None:
    off, alone = kept_of("off"), KeptFeatures("readwrite")
    without = kept_of()
    without.turn_off()
    alone.use([WAY])
    for kept in (off, alone, without):
        kept.note(WAY, SPANS[0], None, "hit")
        assert kept.way_of(SPANS[0], None) is None
        assert kept.keeping() is None
        assert not kept._known
