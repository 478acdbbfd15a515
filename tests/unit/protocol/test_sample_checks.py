"""Samples of a range against the checksums of the index."""

import io
import random
import zlib

import pytest

from hapi_protocol.errors import UnavailableError, UnsupportedError
from hapi_protocol.sample_checks import check_samples
from hapi_protocol.shards import iter_samples
from photos import tar_of

MEMBERS = [
    (
        f"folder/{'long' * n}{n}.{extension}",
        bytes(random.Random(n).randbytes(700)),
    )
    for n in (1, 2, 60)
    for extension in ("jpg", "cls")
]
SHARD = tar_of(MEMBERS)


def samples_of(data):
    return iter_samples(io.BytesIO(data), name="s.tar")


WHOLE = list(samples_of(SHARD))
CRC32S = tuple(sample.crc32 for sample in WHOLE)


def test_checksum_is_that_of_the_bytes_at_offset_and_length():
    assert len(WHOLE) == 3
    for sample in WHOLE:
        part = SHARD[sample.offset : sample.offset + sample.length]
        assert sample.crc32 == zlib.crc32(part)


def test_each_damaged_byte_is_found_before_its_sample():
    end = WHOLE[-1].offset + WHOLE[-1].length
    assert list(check_samples(samples_of(SHARD[:end]), CRC32S, "s")) == WHOLE
    for place in random.Random(7).sample(range(end), 300):
        damaged = bytearray(SHARD[:end])
        damaged[place] ^= 1 << place % 8
        found = []
        with pytest.raises(UnavailableError, match=r"s is damaged: .*upload"):  # noqa: PT012
            for sample in check_samples(samples_of(damaged), CRC32S, "s"):
                found.append(sample)
        assert found == WHOLE[: len(found)]
        assert all(s.offset + s.length <= place for s in found)


@pytest.mark.parametrize("first", [0, 1])
def test_zeroed_blocks_are_not_the_end(first):
    end = WHOLE[-1].offset + WHOLE[-1].length
    start = WHOLE[first].offset
    damaged = SHARD[:start] + bytes(512) + SHARD[start + 512 : end]
    with pytest.raises(UnavailableError, match=r"s is damaged: .* bytes foll"):
        list(check_samples(samples_of(damaged), CRC32S, "s"))


def test_without_checksums_a_sample_passes_and_a_broken_header_does_not():
    damaged = bytearray(SHARD)
    damaged[600] ^= 1
    assert len(list(check_samples(samples_of(damaged), (), "s"))) == 3
    damaged[100] ^= 1
    with pytest.raises(UnsupportedError):
        list(check_samples(samples_of(damaged), (), "s"))
