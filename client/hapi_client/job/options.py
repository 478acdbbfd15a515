"""Options of data sets and jobs, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from hapi_client.caching.cache_config import CacheConfig
from hapi_client.loading.read_config import ReadConfig
from hapi_client.model.package_store import DEFAULT_MODELS_CONTAINER
from hapi_client.model.split_arguments import AUTO, check_cut, check_precision
from hapi_client.option_checks import check_integers, check_types
from hapi_client.swift.connection import Connection
from hapi_protocol.encodings import PRECISIONS, Encoding, allowed_encodings
from hapi_protocol.errors import AnnotationError, ClientError
from hapi_splitter.inputs.augmentation import Augmentation


@dataclass(frozen=True)
class PlanConfig:
    """Options of planning.

    Attributes:
        encoding: encoding of features on the wire, e.g. ``"float16"``; None
            leaves it to the plan, and means the dtype of the features if the
            cut is fixed.
        min_precision: lowest precision that a plan may use: ``"lossless"``,
            ``"half"`` (16 bits) or ``"uint8"``.
        epochs: number of passes over the data, evaluations included, by
            which startup costs are judged; None assumes that as many follow
            as there were already.

    Raises:
        ClientError: ``bad_configuration`` naming the option, its value and
            what is allowed.
    """

    encoding: str | None = None
    min_precision: str = PRECISIONS[0]
    epochs: float | None = None

    def __post_init__(self) -> None:
        check_types(
            {
                "encoding": (str, type(None)),
                "min_precision": (str,),
                "epochs": (int, float, type(None)),
            },
            vars(self),
        )
        self.encodings()
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise _bad(f"epochs is {self.epochs!r}; a positive number or None")

    def encodings(self, dtype: str = "float32") -> tuple[str, ...]:
        """Returns encodings that a plan may choose from, the default first.

        Args:
            dtype: dtype of the features.
        """
        try:
            allowed = allowed_encodings(self.min_precision, dtype)
            if self.encoding is None:
                return allowed
            chosen = str(Encoding.parse(self.encoding))
        except (AnnotationError, ValueError) as error:
            raise _bad(getattr(error, "message", str(error))) from error
        # The default precision is no request of the user.
        if self.min_precision != PRECISIONS[0] and chosen not in allowed:
            raise _bad(
                f"encoding is {self.encoding!r}, which rounds more than "
                f"min_precision {self.min_precision!r} allows: leave one of "
                "them out"
            )
        return (chosen,)


@dataclass(frozen=True)
class JobConfig:
    """Options of a :class:`TransferJob` that most scripts leave alone.

    Attributes:
        cut: last layer that the worker computes: ``"auto"`` plans, and
            revises the plan while the job runs; ``"freeze"`` for the whole
            frozen region, ``"stream"`` or 0 for none of it, or the number of
            a cut, 1 being nearest to the input (``hapi plan`` lists them).
        device: device of the tail and of the frozen layers that run on the
            client.
        augment: random changes of training images; None for none.
        augment_period_epochs: epochs after which the random changes repeat,
            so that features of them can be cached; None for never.
        image: extension of the member that is the image, such as ``"jpg"``
            or ``"left.jpg"``, if samples have several; None if they have one.
        exif: ``"turn"`` images as their EXIF data say and people see them, or
            ``"ignore"`` that, as ``ImageFolder`` does; None for what the
            transform says, else ``"ignore"``.
        precision: in what the frozen layers compute: ``"bfloat16"``,
            ``"float16"``, ``"float32"``, or ``"auto"`` for the autocast in
            which the job is made.
        num_classes: outputs of the tail: data with more classes is an error
            before the model is split.  None warns if the tail has too few
            outputs.
        plan: options of planning.
        read: options of reading and decoding.
        cache: options of the caches.
        connection: connection to the account; None opens one from the
            environment, and closes it with the job.
        models_container: container in which model packages are stored.

    Raises:
        ClientError: ``bad_configuration`` naming the option, its value and
            what is allowed.
    """

    cut: int | str = AUTO
    device: torch.device | str = "cpu"
    augment: Augmentation | None = None
    augment_period_epochs: int | None = None
    image: str | None = None
    exif: str | None = None
    precision: str = AUTO
    num_classes: int | None = None
    plan: PlanConfig = field(default_factory=PlanConfig)
    read: ReadConfig = field(default_factory=ReadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    connection: Connection | None = None
    models_container: str = DEFAULT_MODELS_CONTAINER

    def __post_init__(self) -> None:
        check_cut(self.cut)
        check_precision(self.precision)
        check_integers(self, 1, "augment_period_epochs", "num_classes")
        check_types(
            {
                "image": (str, type(None)),
                "plan": (PlanConfig,),
                "read": (ReadConfig,),
                "cache": (CacheConfig,),
                "connection": (Connection, type(None)),
                "models_container": (str,),
            },
            vars(self),
        )
        if not self.models_container or "/" in self.models_container:
            raise _bad(
                f"models_container is {self.models_container!r}; give the "
                "name of a container, without a slash"
            )


def _bad(message: str) -> ClientError:
    return ClientError("bad_configuration", message)
