"""Random models: a split trains as the whole model does, or is refused."""

import copy
import os
import random
import re

import numpy as np
import pytest
import torch

from hapi_protocol.errors import FreezeError
from hapi_splitter.freezing.split_model import split
from random_models import MODULES, WIDTH, Counting, RandomModel

SEEDS = int(os.environ.get("HAPI_RANDOM_MODELS", "80"))
PER_TEST = 20
BATCHES = (4, 6, 3, 5, 2)


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_random_model_trains_alike_or_is_refused(first):
    outcomes = {seed: outcome(seed) for seed in range(first, first + PER_TEST)}
    different = {s: o for s, o in outcomes.items() if o.startswith("diff")}
    assert not different


def outcome(seed):
    """Returns "equal", "refused" or how a split differs from its model."""
    model, plain = RandomModel(seed), RandomModel(seed)
    before = contents(model)
    try:
        parts = split(
            model, model.freeze, sample_shape=(WIDTH,), cache_directory=""
        )
    except FreezeError as error:
        parts, refusal = None, error
    if contents(model) != before:
        return f"different model after the split: {changes(model, before)}"
    if parts is None:
        return f"refused: {refusal.code}"
    trained = {name for name, _ in parts.tail.named_parameters()}
    samples = [torch.randn(n, WIDTH) for n in BATCHES]
    features = [parts.frozen.suffix(0)(batch).detach() for batch in samples]
    expected = train(plain, plain, samples, trained, model.freeze)
    actual = train(model, parts.tail, features, trained, model.freeze)
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(ours, FreezeError):
            return f"refused in step {step}"
        if isinstance(theirs, str) or isinstance(ours, str):
            if ours != theirs:
                return f"different in step {step}: {ours} {theirs}"
            return "equal errors"
        if abs(ours - theirs) > 1e-4 * max(1, abs(theirs)):
            return f"different in step {step}: {ours} {theirs}"
    return "equal"


def train(model, forward, inputs, trained, freeze):
    """Trains with all that runs up to the freeze point in eval mode."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([named[n] for n in sorted(trained)], 0.05)
    losses = []
    for model.epoch, given in enumerate(inputs):
        model.train()
        for index in range(int(freeze[1:]) + 1):
            getattr(model, f"m{index}").eval()
        try:
            loss = forward(given.clone()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
        except FreezeError as error:
            return [*losses, error] + [error] * (len(inputs) - len(losses) - 1)
        except Exception as error:
            text = (
                f"{type(error).__name__}: {re.sub('[0-9]+', 'n', str(error))}"
            )
            return losses + [text] * (len(inputs) - len(losses))
        optimizer.step()
        losses.append(loss.item())
    return losses


def contents(model):
    """Returns all state that a forward of the model changes, and of torch."""
    tensors = {k: v.numpy().tobytes() for k, v in model.state_dict().items()}
    return {
        **tensors,
        "modes": [module.training for module in model.modules()],
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "generator": model.generator.get_state().tolist(),
        "calls": Counting.calls,
        "seen": [
            copy.copy(module.seen)
            for module in model.modules()
            if isinstance(module, Counting)
        ],
        "early": model.early,
        "random": [torch.get_rng_state().tolist(), random.getstate()],
        "gradients": [p.requires_grad for p in model.parameters()],
    }


def changes(model, before):
    now = contents(model)
    return [key for key, value in before.items() if now[key] != value]


def test_outcomes_are_of_both_kinds():
    outcomes = [outcome(seed) for seed in range(5000, 5000 + 2 * MODULES)]
    assert any(text == "equal" for text in outcomes)
    assert any(text.startswith("refused") for text in outcomes)
