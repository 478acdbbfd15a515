"""Samples that a job leaves out."""

from hapi_client.data.splits import DataSet
from hapi_client.loading.skipped_samples import SkippedSamples
from hapi_protocol.data_index import IndexRow, Span

ROWS = tuple(IndexRow(n, f"k{n}", 512 * n, 512, None) for n in range(3))


def test_equal_names_in_other_containers_are_other_samples():
    here, there = (Span("a.tar", "e", ROWS, name) for name in ("c", "d"))
    skipped = SkippedSamples()
    skipped.add(there, 1)
    assert skipped.numbers(DataSet([here, there], [])) == [4]
