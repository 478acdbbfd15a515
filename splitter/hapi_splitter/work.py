"""What one sample takes, by the kind of work, and on which resource.

Profiles are wrong by kind: layers that ran alone while they were profiled
share caches with decoding later, and both by a factor of their own. So costs
are kept by kind, corrected by kind, and only then put on resources.
"""

from __future__ import annotations

from collections.abc import Mapping

from hapi_splitter.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    SERVER_CPU,
    SERVER_DEVICE,
)

SERVING = "serving"
"""Core-seconds of Swift itself."""
SERVER_DECODING = "server decoding"
"""Core-seconds of the worker: decoding, transform, encoding."""
SERVER_LAYERS = "server layers"
"""Device-seconds of the worker."""
CLIENT_DECODING = "client decoding"
"""Core-seconds of decoding and transform, or of unpacking features."""
CLIENT_LAYERS = "client layers"
"""Device-seconds of the layers behind the cut."""
CLIENT_HANDLING = "client handling"
"""Core-seconds of requests, copies and whatever else the client does."""
TRAINING = "training"
"""Device-seconds of the training loop."""

KINDS = (
    SERVING,
    SERVER_DECODING,
    SERVER_LAYERS,
    CLIENT_DECODING,
    CLIENT_LAYERS,
    CLIENT_HANDLING,
    TRAINING,
)


def resource_use(
    link_bytes: float,
    work: Mapping[str, float],
    *,
    server_share: float,
    server_threads: int,
    client_threads: int,
) -> dict[str, float]:
    """What a sample takes of each resource.

    Args:
        link_bytes: on the link.
        work: seconds by kind.
        server_share: part of the worker's capacity that is the job's. It
            rations the worker's work, not Swift's, which serves whom it
            likes; as the capacity is the share's, Swift's seconds count for
            that much less.
        server_threads: cores that the layers take on a worker without
            accelerator; 0 with one.
        client_threads: likewise in the client.
    """
    server_layers = work.get(SERVER_LAYERS, 0.0)
    computing = work.get(CLIENT_LAYERS, 0.0) + work.get(TRAINING, 0.0)
    return {
        LINK: link_bytes,
        SERVER_CPU: server_share * work.get(SERVING, 0.0)
        + work.get(SERVER_DECODING, 0.0)
        + server_threads * server_layers,
        SERVER_DEVICE: server_layers,
        CLIENT_CPU: work.get(CLIENT_DECODING, 0.0)
        + work.get(CLIENT_HANDLING, 0.0)
        + client_threads * computing,
        CLIENT_DEVICE: computing,
    }


def scaled(
    work: Mapping[str, float], scale: Mapping[str, float]
) -> dict[str, float]:
    """Each kind times its factor, 1 where there is none."""
    return {kind: each * scale.get(kind, 1.0) for kind, each in work.items()}
