"""Parameters and buffers of a model, and when its forward reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

from torch import nn

from hapi_protocol.errors import FreezeError, cannot_freeze
from hapi_splitter.freezing.freeze_selector import FreezeSpec
from hapi_splitter.freezing.model_run import ModelRun, Operation

_MAX_NAMES = 4


class ModelTensors:
    """Checks which parameters a freeze point would freeze.

    Args:
        model: the model of the record.
        run: a record of its forward.

    Attributes:
        parameters: all parameters by name; shared ones have several names.
        reads: first and last step that reads each tensor, by name.
    """

    def __init__(self, model: nn.Module, run: ModelRun) -> None:
        self._model, self._run = model, run
        self.reads = run.reads
        self.parameters: Mapping[str, nn.Parameter] = dict(
            model.named_parameters(remove_duplicate=False)
        )
        self._names: dict[int, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                self._names.setdefault(id(tensor), []).append(name)

    def frozen(
        self, spec: FreezeSpec, step: int, inside: tuple[str, ...]
    ) -> Set[str]:
        """Returns the names of tensors that only the frozen part reads.

        Args:
            spec: what the user asks for.
            step: step of the freeze point.
            inside: prefixes of the names in replaced modules.
        """
        frozen: set[str] = set()
        for names in self._names.values():
            reads = self._reads_of(names)
            if any(last > step for _, last in reads):
                continue
            is_covered = spec.exact and any(map(spec.covers, names))
            is_inside = any(name.startswith(inside) for name in names)
            if reads or is_covered or is_inside:
                frozen.update(names)
        return frozen

    def watched(
        self, frozen: Set[str], inside: tuple[str, ...]
    ) -> Iterator[str]:
        """Yields the names of frozen tensors that may not change.

        The code before the freeze point may count in buffers of its own, and
        caches may be filled that nothing reads as they are.
        """
        for name in sorted(frozen):
            is_read = name in self.reads
            # Statistics are written without a sign of it but for this one.
            is_count = name.endswith("num_batches_tracked")
            if name in self.parameters or (
                name.startswith(inside) and (is_read or is_count)
            ):
                yield name

    def first_trainable(self) -> int | None:
        """Returns the first step that reads a trainable parameter, if any."""
        return min(
            (
                self.reads[name][0]
                for name, parameter in self.parameters.items()
                if parameter.requires_grad and name in self.reads
            ),
            default=None,
        )

    def check_exact(
        self,
        spec: FreezeSpec,
        ends: Mapping[str, int],
        end: int,
        nearest: Callable[[int], str],
    ) -> None:
        """Refuses other modules with parameters before the end.

        Args:
            spec: what the user asks for.
            ends: last step of each frozen module.
            end: the last of them.
            nearest: returns the valid names next to a step, for a message.
        """
        others: dict[str, int] = {}
        for step, event in enumerate(self._run.steps[: end + 1]):
            if not isinstance(event, Operation):
                continue
            for name in sorted(event.parameters):
                is_statistic = name.endswith("running_mean")
                is_parameter = name in self.parameters
                # Functions are not called for modules without parameters.
                counts = is_parameter or (
                    is_statistic and not spec.from_function
                )
                if counts and not any(map(spec.covers, self._aliases(name))):
                    others.setdefault(spec.outside(name), step)
        if not others:
            return
        first = min(others, key=others.__getitem__)
        later = next(n for n, e in ends.items() if e >= others[first])
        names = ", ".join(repr(name) for name in others)
        remedy = (
            "freeze them too, or nothing after them"
            if spec.from_function
            else "add them to the list, or freeze nothing after them"
        )
        raise cannot_freeze(
            f"freeze: {later!r} is frozen, but trained modules run before "
            f"its end: {names}; {remedy}. A single name freezes everything "
            f"before its end; nearest: "
            f"{nearest(others[first])}",
        )

    def _aliases(self, name: str) -> list[str]:
        return next(names for names in self._names.values() if name in names)

    def check_shared(self, freeze: str, step: int) -> None:
        """Refuses trainable parameters that are read before and after."""
        for names in self._names.values():
            reads = self._reads_of(names)
            if not reads or names[0] not in self.parameters:
                continue
            is_both = min(reads)[0] <= step < max(r for _, r in reads)
            if is_both and self.parameters[names[0]].requires_grad:
                raise cannot_freeze(
                    f"freeze {freeze!r}: parameter {names[0]!r} is used "
                    "before and after it, and cannot be both frozen and "
                    "trained; freeze elsewhere, or set requires_grad_(False) "
                    "on it",
                )

    def _reads_of(self, names: list[str]) -> list[tuple[int, int]]:
        return [self.reads[n] for n in names if n in self.reads]

    def check_trainable(
        self, freeze: str, step: int, automatic: Callable[[], str]
    ) -> None:
        """Refuses trainable parameters among parameters that are not.

        A model whose parameters all have ``requires_grad`` says nothing about
        what to train, also not if only its position tables are fixed.

        Args:
            freeze: what the user asks for.
            step: step of the freeze point.
            automatic: returns what can be frozen instead.
        """
        trainable, has_frozen = [], False
        for name, parameter in self.parameters.items():
            if self.reads.get(name, (step + 1, 0))[0] > step:
                continue
            if parameter.requires_grad:
                trainable.append(name)
            else:
                has_frozen |= not self._is_table(name)
        if not trainable or not has_frozen:
            return
        try:
            earlier = f"freeze {automatic()!r}, the last module before it"
        except FreezeError:
            earlier = "freeze nothing"
        shown = ", ".join(map(repr, trainable[:_MAX_NAMES]))
        more = len(trainable) - _MAX_NAMES
        raise cannot_freeze(
            f"freeze {freeze!r}: {len(trainable)} trainable parameters are "
            f"used before its end and would not be trained ({shown}"
            f"{f' and {more} more' if more > 0 else ''}); {earlier}, or set "
            "requires_grad_(False) on them",
        )

    def _is_table(self, name: str) -> bool:
        owner = self._model.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, nn.Embedding) or self.is_of_container(name)

    def is_of_container(self, name: str) -> bool:
        """Returns True for a tensor of a module with submodules."""
        owner = self._model.get_submodule(name.rpartition(".")[0])
        return owner is self._model or any(True for _ in owner.children())
