"""Cached features of slices that overlap, and of bad samples."""

import torch

from hapi_client.loading.memory_cache import MemoryCache
from hapi_client.sampling.partition import SpanSlice

FEATURES = torch.arange(20.0).reshape(10, 2)


def test_slices_of_two_epochs_may_overlap():
    cache = MemoryCache([10], (2,), torch.float32, 10)
    parts = [SpanSlice(0, 0, 6), SpanSlice(0, 3, 10)]
    for each in parts:
        cache.put(each, FEATURES[each.first : each.stop], {})
    whole = SpanSlice(0, 0, 10)
    assert cache.holds(whole)
    assert cache.num_cached == 10
    assert torch.equal(cache.batch(cache.slots_of(whole)), FEATURES)


def test_bad_samples_take_no_room():
    cache = MemoryCache([3, 3], (2,), torch.float32, 5)
    cache.put(SpanSlice(0, 0, 3), FEATURES[:2], {1: "damaged"})
    cache.put(SpanSlice(1, 0, 3), FEATURES[3:6], {})
    found = cache.get(SpanSlice(0, 0, 3))
    assert found.failures == {1: "damaged"}
    assert [*found.features] == [0, 2]
    assert cache.holds(SpanSlice(1, 0, 3))
    assert cache.num_cached == 5


def test_slice_without_room_is_left_out():
    cache = MemoryCache([4, 2], (2,), torch.float32, 3)
    cache.put(SpanSlice(0, 0, 4), FEATURES[:4], {})
    assert not cache.holds(SpanSlice(0, 0, 4))
    cache.put(SpanSlice(1, 0, 2), FEATURES[4:6], {})
    assert cache.holds(SpanSlice(1, 0, 2))
