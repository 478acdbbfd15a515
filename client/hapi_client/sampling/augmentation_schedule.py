"""Schedule of random augmentations by epoch. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from hapi_protocol.errors import ClientError
from hapi_protocol.transforms import MAX_NUMBER, Training


@dataclass(frozen=True)
class AugmentationSchedule:
    """The random augmentations of a job's epochs.

    Attributes:
        augments: True if training images are augmented.
        seed: seed of the job.
        period: epochs after which the augmentations repeat, so that cached
            features can be reused; None for never.

    Raises:
        ClientError: ``bad_configuration`` naming the value.
    """

    augments: bool
    seed: int
    period: int | None = None

    def __post_init__(self) -> None:
        if not self.augments and self.period is not None:
            raise _bad(
                f"augment_period_epochs is {self.period!r}, but there is no "
                "augmentation to repeat; give augment as well"
            )
        if self.period is not None and not _is_integer(self.period, 1):
            raise _bad(
                f"augment_period_epochs is {self.period!r}; give an integer "
                "of at least 1, or None"
            )
        if self.augments and not _is_integer(self.seed, 0):
            raise _bad(
                f"seed is {self.seed!r}; with an augmentation, give an "
                "integer from 0 to 2**63 - 1"
            )

    @property
    def variants(self) -> int | None:
        """Number of epochs after which images repeat; None for never."""
        return self.period if self.augments else 1

    def training(self, epoch: int | None) -> Training | None:
        """Returns the seed and epoch of the augmentations, or None for none.

        Args:
            epoch: epoch of training; None for evaluation.
        """
        if epoch is None or not self.augments:
            return None
        number = int(epoch)
        if self.period is not None:
            number %= self.period
        return Training(self.seed, number)


def _is_integer(value: object, minimum: int) -> bool:
    return type(value) is int and minimum <= value <= MAX_NUMBER


def _bad(message: str) -> ClientError:
    return ClientError("bad_configuration", message)
