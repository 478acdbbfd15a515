"""Samples that a job leaves out because they cannot be decoded."""

from __future__ import annotations

import logging

import torch

from hapi_client.data.splits import DataSet
from hapi_protocol.data_index import Span

logger = logging.getLogger(__name__)


class SkippedSamples:
    """The left-out samples of a job, and the one message about them.

    Loader workers have copies, which share whether the message was logged.
    """

    def __init__(self) -> None:
        self._places: set[tuple[str, int]] = set()
        self._is_told = torch.zeros(1, dtype=torch.bool)
        self._is_told.share_memory_()  # type: ignore[no-untyped-call]

    def add(self, span: Span, row: int) -> None:
        self._places.add((span.path, span.rows[row].sample))

    def tell(self, message: str) -> None:
        """Logs the first message of a job."""
        if not self._is_told:
            self._is_told[0] = True
            logger.warning("%s", message)

    def numbers(self, data: DataSet) -> list[int]:
        """Returns the numbers of these samples in a data set."""
        places = (
            (span.path, row.sample) for span in data.spans for row in span.rows
        )
        return [n for n, place in enumerate(places) if place in self._places]
