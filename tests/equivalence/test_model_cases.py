"""Equivalence of many models and ways of using them with their splits."""

import copy
import random
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from equal_models import (
    assert_close,
    assert_same_model,
    assert_same_result,
    tensors,
)
from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing import one_module, two_modules
from hapi_splitter.freezing.split_model import default_freeze, split
from hapi_splitter.package.reader import load_package
from hapi_splitter.package.writer import package_bytes
from model_cases import MODEL_CASES

CACHED = {case.id for case in MODEL_CASES[::4]}
"""Cases whose split is read from the cache."""


@pytest.mark.filterwarnings("ignore:hooks of the frozen module")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id) for case in MODEL_CASES]
)
def test_split_equals_the_model_or_is_refused(case, monkeypatch, tmp_path):
    if case.id in CACHED and not case.error:
        cache_split(case, monkeypatch, tmp_path)
    check(case)


def cache_split(case, monkeypatch, folder):
    """Splits an equal model, so that the split of the case is cached."""
    model = case.model()
    freeze = case.freeze or default_freeze(model, **case.options)
    monkeypatch.setenv("HAPI_CACHE_DIR", str(folder))
    split(model, freeze, **case.options)
    is_cached = any((folder / "splits-3").glob("*.split"))
    has_hook = "hook" in case.name and "later" not in case.name
    assert is_cached != has_hook  # hooks have no key
    if is_cached:  # any other export is an error
        monkeypatch.setattr(one_module, "export_region", None)
        monkeypatch.setattr(two_modules, "export_region", None)


def check(case):
    """Checks one case of the table."""
    fresh, model = case.model(), case.model()
    random_state = torch.get_rng_state()
    parts, refusal = None, None
    freeze = case.freeze
    try:
        if freeze is None:
            freeze = default_freeze(model, **case.options)
        parts = split(model, freeze, **case.options)
    except FreezeError as error:
        refusal = error
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_model(model, fresh)
    if refusal is not None:
        assert refusal.code == case.error, refusal
        assert re.search(case.message, refusal.message), refusal
        return
    assert not case.error or case.later, "it is accepted"
    if freeze == "auto":
        freeze = parts.freeze
    check_copies(model, fresh, case.samples(2))
    reference = Reference(fresh, freeze, case.samples(2))
    Reference(model, freeze, case.samples(2))  # models may count forwards
    check_evaluation(case, reference, model, parts)
    check_training(case, reference, model, parts)


def check_evaluation(case, reference, model, parts):
    """Compares at the freeze point and two random cuts of the package."""
    samples = case.samples(5)
    loaded = load_package(package_bytes(parts.frozen))
    draw = random.Random(case.id)
    last = parts.frozen.num_cuts
    cuts = {last, draw.randint(0, last), draw.randint(0, last)}
    parts.tail.eval()
    for cut in sorted(cuts):
        with torch.inference_mode():
            crossing = loaded.prefix(cut)(samples)
            features = parts.frozen.suffix(cut)(crossing)
        expected = reference.run(samples)
        seed(0)
        with torch.no_grad():
            actual = parts.tail(features.clone())
        assert_same_result(actual, expected, f"cut {cut}")


def check_copies(model, fresh, samples):
    """Compares a copy of the split model with one of the whole model."""
    # The forward of a copy may be a function of the original.
    fresh.eval()
    model.eval()
    try:
        copies = [copy.deepcopy(fresh)]
    except RuntimeError:  # of a computed weight
        return
    copies.append(copy.deepcopy(model))
    results = []
    for copied in copies:
        copied.eval()
        seed(0)
        with torch.no_grad():
            results.append(copied(in_dtype_of(copied, samples)))
    assert_same_result(results[1], results[0], "copy")


def check_training(case, reference, model, parts):
    """Compares two steps; the model and the seed change between them."""
    parts.tail.train()
    trained = {
        name
        for name, parameter in parts.tail.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in reference.model.named_parameters():
        parameter.requires_grad_(name in trained)
    for step, count in enumerate((4, 3)):
        samples = case.samples(count)
        for changed in (reference.model, model):
            changed.zero_grad()
            if step:
                case.change(changed)
        try:
            expected = reference.run(samples, training=True, number=step)
        except Exception:  # it trains with targets only
            return
        with torch.no_grad():
            features = parts.frozen.suffix(0)(samples)
        seed(step)
        actual = parts.tail(features.clone())
        assert_same_result(actual, expected, f"training step {step}")
        if not has_gradient(expected):
            assert not has_gradient(actual)
            continue
        loss(expected).backward()
        loss(actual).backward()
        check_gradients(model, reference.model, trained)
    buffers = dict(parts.tail.named_buffers())
    for name, buffer in reference.model.named_buffers():
        if name in buffers and buffer.is_floating_point():
            assert_close(buffers[name], buffer, f"buffer {name}")


def check_gradients(model, reference, trained):
    """Compares gradients, of which some are zero but for rounding."""
    actual, expected = (
        {n: p.grad for n, p in module.named_parameters() if n in trained}
        for module in (model, reference)
    )
    largest = max(g.abs().max() for g in expected.values() if g is not None)
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_close(actual[name], gradient, name, 1e-6 * largest.item())


def has_gradient(result):
    return any(tensor.requires_grad for tensor in tensors(result))


def loss(result):
    """Returns a scalar on which all results have different influence."""
    total = torch.zeros(())
    for tensor in tensors(result):
        if tensor.requires_grad:
            weights = torch.linspace(-1, 1, tensor.numel())
            weights = weights.reshape(tensor.shape)
            total = total + (tensor.float() * weights).mean()
    return total


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Reference:
    """Runs a whole model: in eval mode to the freeze point, then in its own.

    Its first run finds the freeze point: the last named module that ends.
    """

    def __init__(self, model, freeze, samples):
        self.model, self.freeze = model, freeze
        names = set(named(model, freeze))
        ends = []
        with torch.no_grad(), hooks(model, names, ends.append):
            self.model.eval()
            seed(0)
            model(in_dtype_of(model, samples))
        self._end, self._calls = ends[-1], ends.count(ends[-1])

    def run(self, samples, training=False, number=0):
        calls = iter(range(self._calls))

        def reach(_):
            if next(calls) == self._calls - 1:
                self.model.train(training)

        self.model.eval()
        seed(number)
        with (
            hooks(self.model, {self._end}, reach),
            torch.set_grad_enabled(training),
        ):
            return self.model(in_dtype_of(self.model, samples.clone()))


def in_dtype_of(model, samples):
    """Returns samples as the script of a 16-bit model would give them."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    is_half = bool(dtypes) and dtypes[0] in (torch.bfloat16, torch.float16)
    if is_half and samples.is_floating_point():
        return samples.to(dtypes[0])
    return samples


def named(model, freeze):
    """Yields the names of modules that a freeze specification covers."""
    for name, module in model.named_modules():
        if callable(freeze):
            own = any(True for _ in module.parameters(recurse=False))
            is_covered = own and freeze(name, module)
        else:
            names = freeze if isinstance(freeze, list) else [freeze]
            is_covered = name in names
            if any(name.startswith(f"{parent}.") for parent in names):
                is_covered = True
        if is_covered:
            yield name


@contextmanager
def hooks(model, names, act):
    """Calls a function at each end of the named modules."""
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda *_, name=name: act(name)
        )
        for name in names
        if not isinstance(model.get_submodule(name), torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
