"""Summary at the end of a feature stream, with the worker's load."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hapi_protocol.json_messages import PossiblyEmpty, read_fields


@dataclass(frozen=True)
class WorkerLoad:
    """Load of the worker, over about the last ten seconds.

    Attributes:
        share: fraction of the worker that the charged account may expect,
            above 0 to 1: its weight over those of all active accounts.
        streams: number of this account's running streams.
        device_busy: fraction of the time in which the device computed.
        cpu_busy: fraction of the cores' time that the worker used, 0 to 1.
    """

    share: float
    streams: int
    device_busy: float
    cpu_busy: float


@dataclass(frozen=True)
class Summary:
    """Contents of the closing zero-row batch of a stream.

    Attributes:
        rows: number of rows, including rows with an error.
        errors: number of rows with an error.
        source_etag: ETag of the source; empty for many objects.
        source_bytes: bytes read of the source.
        saturated: features clipped to the encoding's largest value.
        cpu_seconds: core-seconds that the worker spent on this stream,
            including the forward pass if it ran on a CPU.
        load: load of the worker; None if it does not report it.
    """

    rows: int
    errors: int
    source_etag: PossiblyEmpty
    source_bytes: int
    saturated: int = 0
    cpu_seconds: float = 0.0
    load: WorkerLoad | None = None

    @classmethod
    def from_json(cls, text: str | bytes) -> Summary:
        """Reads a summary; unknown fields are ignored.

        Raises:
            ValueError: it is not a summary.
        """
        return read_fields(cls, json.loads(text), use_defaults=True)
