"""What one sample takes, by the kind of work, and on which resource.

Profiles are wrong by kind: layers that ran alone while they were profiled
share caches with decoding later, and both by a factor of their own. So costs
are kept by kind, corrected by kind, and only then put on resources.
"""

from __future__ import annotations

from collections.abc import Mapping

from hapi_splitter.planner.problem import (
    CLIENT_CPU,
    CLIENT_DEVICE,
    LINK,
    SERVER_CPU,
    SERVER_DEVICE,
    Option,
    Problem,
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
    parts = _parts(work, server_share, server_threads, client_threads)
    return {
        LINK: link_bytes,
        **{name: sum(part.values()) for name, part in parts.items()},
    }


def stages(problem: Problem, option: Option) -> dict[str, dict[str, float]]:
    """Seconds for one sample by resource, and in each by kind of work.

    With all of the resource. Layers that take all cores are with these, and
    not once more with a device. An option of which only its use is known has
    the resource's own name in the place of kinds.
    """
    if not option.work:
        return {
            resource.name: {
                resource.name: problem.seconds(option, resource.name)
            }
            for resource in problem.resources
        }
    parts = _parts(
        option.work, 1.0, problem.server_threads, problem.client_threads
    )
    cores = parts[SERVER_CPU]
    used = option.use.get(SERVER_CPU, 0.0)
    cores[SERVING] = max(0.0, used - sum(cores.values()) + cores[SERVING])
    if problem.server_threads >= problem.capacity(SERVER_CPU):
        parts[SERVER_DEVICE] = {}
    if problem.client_threads >= problem.capacity(CLIENT_CPU):
        parts[CLIENT_DEVICE] = {}
    return {
        resource.name: {
            kind: problem.seconds_for(amount, resource.name)
            for kind, amount in parts.get(
                resource.name,
                {resource.name: option.use.get(resource.name, 0.0)},
            ).items()
        }
        for resource in problem.resources
    }


def _parts(
    work: Mapping[str, float],
    server_share: float,
    server_threads: int,
    client_threads: int,
) -> dict[str, dict[str, float]]:
    """Of each resource but the link, by kind of work."""

    def seconds(kind: str, times: float = 1.0) -> dict[str, float]:
        return {kind: times * work.get(kind, 0.0)}

    return {
        SERVER_CPU: seconds(SERVING, server_share)
        | seconds(SERVER_DECODING)
        | seconds(SERVER_LAYERS, server_threads),
        SERVER_DEVICE: seconds(SERVER_LAYERS),
        CLIENT_CPU: seconds(CLIENT_DECODING)
        | seconds(CLIENT_HANDLING)
        | seconds(CLIENT_LAYERS, client_threads)
        | seconds(TRAINING, client_threads),
        CLIENT_DEVICE: seconds(CLIENT_LAYERS) | seconds(TRAINING),
    }


def scaled(
    work: Mapping[str, float], scale: Mapping[str, float]
) -> dict[str, float]:
    """Each kind times its factor, 1 where there is none."""
    return {kind: each * scale.get(kind, 1.0) for kind, each in work.items()}
