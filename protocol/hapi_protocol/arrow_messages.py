"""The messages of an Arrow stream, read before a body is unpacked."""

from __future__ import annotations

import itertools
import struct


def check_uncompressed(data: bytes) -> None:
    """Refuses compressed batches, of which 18 kB can be gigabytes of rows.

    Without compression the bodies are as long as what is read from them.

    Raises:
        ValueError: naming the batch.
        struct.error: if the metadata are damaged.
    """
    import pyarrow as pa

    reader = pa.ipc.MessageReader.open_stream(data)
    for number in itertools.count():
        try:
            message = reader.read_next_message()
        except (EOFError, StopIteration):
            return
        metadata = message.metadata.to_pybytes()
        header = _Table(metadata, struct.unpack_from("<I", metadata)[0])
        batch = header.table(2)
        if message.type == "dictionary":
            batch = batch.table(1)
        if message.type != "schema" and batch.offset(3):
            raise ValueError(f"batch {number} is compressed")


class _Table:
    """A table of a FlatBuffer, in which Arrow writes what its batches are.

    Fields by number, as in Arrow's ``Message.fbs``: of a ``Message`` 2 is the
    batch, of a ``DictionaryBatch`` 1 is that of its values, and of a
    ``RecordBatch`` 3 states the compression.

    Args:
        data: the buffer.
        place: byte at which the table begins.
    """

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = place
        self._fields = place - struct.unpack_from("<i", data, place)[0]

    def offset(self, field: int) -> int:
        """Byte of a field, counted from the table; 0 without it."""
        end = struct.unpack_from("<H", self._data, self._fields)[0]
        at = 4 + 2 * field
        if at + 2 > end:
            return 0
        start: int = struct.unpack_from("<H", self._data, self._fields + at)[0]
        return start

    def table(self, field: int) -> _Table:
        """The table of a field."""
        at = self._place + self.offset(field)
        return _Table(
            self._data, at + struct.unpack_from("<I", self._data, at)[0]
        )
