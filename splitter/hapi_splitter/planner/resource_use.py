"""Cost components of one sample, and the resources that they use.

Profiles are wrong by a factor per component: layers that ran alone while they
were profiled share caches with decoding later. So costs are stored and
corrected by component, and only then assigned to resources.
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
"""Core-seconds of Swift, without the worker."""
SERVER_DECODING = "server decoding"
"""Core-seconds of the worker for decoding, transform and encoding."""
SERVER_LAYERS = "server layers"
"""Device-seconds of the worker for the layers up to the cut."""
CLIENT_DECODING = "client decoding"
"""Core-seconds of the client for decoding images or unpacking features."""
CLIENT_LAYERS = "client layers"
"""Device-seconds of the client for the frozen layers after the cut."""
CLIENT_HANDLING = "client handling"
"""Client overhead: core-seconds of requests, copies and all else."""
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
    """Returns one sample's use of each resource.

    Args:
        link_bytes: bytes sent over the link.
        work: seconds by cost component.
        server_share: the job's capacity on workers, as a multiple of one
            worker's. It limits the workers but not Swift. As the problem's
            capacity is that of the share, Swift's seconds are multiplied by
            it.
        server_threads: cores that layers use on a worker without an
            accelerator; 0 with one.
        client_threads: cores that layers use on a client without an
            accelerator; 0 with one.
    """
    parts = _parts(work, server_share, server_threads, client_threads)
    return {
        LINK: link_bytes,
        **{name: sum(part.values()) for name, part in parts.items()},
    }


def stages(problem: Problem, option: Option) -> dict[str, dict[str, float]]:
    """Returns seconds for one sample by resource and cost component.

    Seconds are those of the whole resource. Layers that use all cores count
    for the CPU only, not for the device as well. An option without known
    components has the resource's name as its only component.
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
    """Returns the use of each resource but the link, by component."""

    def seconds(kind: str, factor: float = 1.0) -> dict[str, float]:
        return {kind: factor * work.get(kind, 0.0)}

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
    """Multiplies each component by its factor, by default 1."""
    return {kind: used * scale.get(kind, 1.0) for kind, used in work.items()}
