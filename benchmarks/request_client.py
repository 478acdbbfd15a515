"""A process that asks a worker for one small job after the other.

``python -m benchmarks.request_client`` answers the questions of
benchmarks/requests.py.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.remote import serve
from benchmarks.stream_client import PIECE_BYTES, Counter, StreamClient

from hapi_protocol.feature_reader import read_features

OWN_STAGES = ("decode", "forward", "encode")
"""What the samples themselves take, in seconds of the clock."""
OWN_CPU_STAGES = ("decode_cpu", "forward_cpu", "encode_cpu")


class RequestClient(StreamClient):
    """See :func:`serve`."""

    def measure(self, requests: int) -> dict[str, Any]:
        """Jobs one after the other.

        Returns:
            A list for each of ``grant`` (seconds of ``POST /jobs``),
            ``stream`` (of ``POST /jobs/<id>``), ``own`` and ``own_cpu`` (of
            decoding, forward pass and encoding, by the stream's timings), and
            ``cpu_seconds`` of this process.

        Raises:
            ValueError: the shard is too large to be sent at once.
        """
        if len(self._shard) > PIECE_BYTES:
            raise ValueError(
                f"the shard has {len(self._shard)} bytes; at most"
                f" {PIECE_BYTES}, so that it can be sent before the answer"
                " is read"
            )
        before = time.process_time()
        found = [self._one() for _ in range(requests)]
        names = ("grant", "stream", "own", "own_cpu")
        return {
            **dict(zip(names, zip(*found, strict=True), strict=True)),
            "cpu_seconds": time.process_time() - before,
        }

    def _one(self) -> tuple[float, float, float, float]:
        begun = time.monotonic()
        job_id = self._grant(Counter())
        granted = time.monotonic()
        connection = self._start(job_id)
        try:
            self._send(connection.sock)
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"{response.status}: {response.read()!r}")
            timings = [batch.timings for batch in read_features(response)]
            response.read()
        finally:
            connection.close()
        own, own_cpu = (
            sum(each[stage] for each in timings for stage in stages)
            for stages in (OWN_STAGES, OWN_CPU_STAGES)
        )
        return granted - begun, time.monotonic() - granted, own, own_cpu


def main() -> None:
    client = RequestClient()
    serve({"open": client.open, "measure": client.measure})


if __name__ == "__main__":
    main()
