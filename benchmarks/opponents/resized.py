"""The tar stream, on photographs that were made smaller beforehand."""

from __future__ import annotations

from benchmarks.opponents.tar_stream import TarStream


class ResizedTarStream(TarStream):
    """Reads what :func:`benchmarks.opponents.convert.resized` wrote."""

    @property
    def container(self) -> str:
        return self.place.resized
