"""Regions that look up token ids: safe in any batch, on any device."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from array_networks import (
    MELS,
    NUM_IDS,
    NUM_TOKENS,
    TOKENS,
    audio_network,
    text_network,
)
from hapi_protocol.errors import FreezeError, HapiError, PackageError
from hapi_splitter.cuts import FrozenGraph
from hapi_splitter.freezing.split_model import split
from hapi_splitter.graph.index_bounds import id_limits
from hapi_splitter.graph.program import Affine, Call, Program, Ref
from hapi_splitter.graph.shapes import (
    MAX_IDS,
    MAX_LOOKUPS,
    MAX_MOVES,
    ShapeLimits,
    infer,
)
from hapi_splitter.inputs.array_transform import ArrayTransform
from hapi_splitter.inputs.image_transform import ImageTransform
from hapi_splitter.inputs.sample_format import SampleForm
from hapi_splitter.package import zip_container as container
from hapi_splitter.package.inspection import PackageHead
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.subprocess_validation import probe_batchwise
from hapi_splitter.package.writer import package_bytes
from hapi_splitter.profiling.memory_model import needs_of
from hapi_splitter.profiling.profiler import profile_region

CPU = torch.device("cpu")
EMBEDDING = "aten.embedding.default"
IDS = SampleForm((4,), torch.int64)
TABLE = torch.randn(10, 3)


@pytest.fixture(scope="module")
def text() -> FrozenGraph:
    return split(text_network(), "body", transform=TOKENS).frozen


def test_every_cut_of_a_text_model_is_the_model(text: FrozenGraph) -> None:
    loaded = load_package(package_bytes(text))
    assert loaded.transform == TOKENS
    assert loaded.form == SampleForm((NUM_TOKENS,), torch.int64)
    whole = text_network().eval()
    ids = loaded.examples(5)
    assert ids.dtype == torch.int64
    assert 0 <= ids.min() < ids.max() < NUM_IDS
    with torch.inference_mode():
        expected = whole.body(ids).mean(1)
        for region in (loaded, loaded.to("cpu", fast=True)):
            for cut in range(region.num_cuts + 1):
                found = region.suffix(cut)(region.prefix(cut)(ids))
                torch.testing.assert_close(
                    found, expected, rtol=1e-4, atol=1e-5
                )


def test_ids_are_no_cut(text: FrozenGraph) -> None:
    assert text.num_cuts > 3
    assert {cut.dtype for cut in text.cuts} == {"float32"}


def test_samples_do_not_influence_one_another(text: FrozenGraph) -> None:
    probe_batchwise(text)


def test_profile_of_a_text_model_is_measured(text: FrozenGraph) -> None:
    (found,) = profile_region(text, CPU, batches=[2], budget_seconds=0.1)
    assert found.cut_seconds[-1] > 0


class Wide(nn.Module):
    """A table of which a sample needs a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100_000, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


def test_memory_and_work_of_a_lookup_are_those_of_its_rows() -> None:
    frozen = split(Wide(), "table", transform=TOKENS).frozen
    samples = needs_of(frozen, 1).peak_bytes(64) - frozen.parameter_bytes
    # Ids, a copy of them, rows, and what is added to round up.
    exact = 64 * NUM_TOKENS * (8 + 8 + 8 * 4)
    assert exact <= samples <= 1.1 * exact + (1 << 19)
    assert frozen.cuts[0].flops < 1000


def limits_of(program: Program, *tables: torch.Tensor) -> list[int] | None:
    values = infer(program, dict(enumerate(tables, 1)), IDS)
    found = id_limits(program, values)
    return None if found is None else found.tolist()


def test_ids_are_those_of_the_smallest_table() -> None:
    calls = (
        Call(EMBEDDING, (Ref(1), Ref(0))),
        Call(EMBEDDING, (Ref(2), Ref(0))),
        Call("aten.add.Tensor", (Ref(3), Ref(4), 1)),
    )
    program = Program(2, calls)
    tables = torch.randn(10, 3), torch.randn(7, 3)
    assert limits_of(program, *tables) == [7, 7, 7, 7]


def test_each_place_has_the_ids_of_its_own_tables() -> None:
    """Ids and kinds of tokens in one sample, or columns of a table."""
    calls = (
        Call("aten.slice.Tensor", (Ref(0), 1, 0, 2, 1)),
        Call(EMBEDDING, (Ref(1), Ref(3))),
        Call("aten.flip.default", (Ref(0), (1,))),
        Call("aten.slice.Tensor", (Ref(5), 1, 1, 3, 1)),
        Call(EMBEDDING, (Ref(2), Ref(6))),
        Call("aten.add.Tensor", (Ref(4), Ref(7), 1)),
    )
    program = Program(2, calls)
    tables = torch.randn(10, 3), torch.randn(7, 3)
    assert limits_of(program, *tables) == [10, 7, 7, 0]
    assert limits_of(program, *reversed(tables)) == [7, 7, 10, 0]


def test_without_a_lookup_any_number_is_fine() -> None:
    program = Program(0, (Call("aten.relu.default", (Ref(0),)),))
    assert limits_of(program) is None


def test_lookups_are_bounded() -> None:
    many = (Call(EMBEDDING, (Ref(1), Ref(0))),) * (MAX_LOOKUPS + 1)
    with pytest.raises(PackageError, match="more than 512 lookups"):
        infer(Program(1, many), {1: TABLE}, IDS)
    wide = (
        Call("aten.unsqueeze.default", (Ref(0), 1)),
        Call("aten.expand.default", (Ref(2), (Affine(1), MAX_IDS, 4))),
        Call(EMBEDDING, (Ref(1), Ref(3))),
    )
    with pytest.raises(PackageError, match="131072 of a sample at most"):
        infer(Program(1, wide), {1: TABLE}, IDS)
    large = SampleForm((MAX_IDS + 1,), torch.int64)
    with pytest.raises(PackageError, match="131072 of a sample at most"):
        infer(Program(1, many[:1]), {1: TABLE}, large)
    flips = [
        Call("aten.flip.default", (Ref(node and node + 1), (1,)))
        for node in range(MAX_MOVES + 1)
    ]
    last = Call(EMBEDDING, (Ref(1), Ref(MAX_MOVES + 2)))
    with pytest.raises(PackageError, match="of a sample at most"):
        infer(Program(1, (*flips, last)), {1: TABLE}, IDS)


def test_many_moves_are_followed() -> None:
    flips = [
        Call("aten.flip.default", (Ref(node and node + 1), (1,)))
        for node in range(99)
    ]
    calls = (
        *flips,
        Call("aten.select.int", (Ref(100), 1, 0)),
        Call(EMBEDDING, (Ref(1), Ref(101))),
    )
    assert limits_of(Program(1, calls), TABLE) == [0, 0, 0, 10]


@pytest.mark.parametrize(
    "call",
    [
        Call("aten.slice.Tensor", (Ref(0), 1, 0, 2, 1)),
        Call("aten.select.int", (Ref(0), 1, 0)),
        Call("aten.flip.default", (Ref(0), (1,))),
        Call("aten.cat.default", ((Ref(0), Ref(0)), 1)),
        Call("aten.unsqueeze.default", (Ref(0), 1)),
    ],
)
def test_chosen_ids_are_looked_up(call: Call) -> None:
    program = Program(1, (call, Call(EMBEDDING, (Ref(1), Ref(2)))))
    assert infer(program, {1: TABLE}, IDS)[-1].shape[-1] == 3


COMPUTED = {
    "added": [Call("aten.add.Scalar", (Ref(0), 1, 1))],
    "multiplied": [Call("aten.mul.Scalar", (Ref(0), 5))],
    "negated": [Call("aten.neg.default", (Ref(0),))],
    "padded": [Call("aten.pad.default", (Ref(0), (0, 1), 99))],
    "summed": [Call("aten.sum.dim_IntList", (Ref(0), (1,), True, None))],
    "narrowed": [Call("aten._to_copy.default", (Ref(0), torch.int32))],
    "mixed": [
        Call("aten.add.Tensor", (Ref(0), Ref(0), 1)),
        Call("aten.cat.default", ((Ref(0), Ref(2)), 1)),
    ],
}


@pytest.mark.parametrize("calls", COMPUTED.values(), ids=COMPUTED)
def test_computed_ids_are_refused(calls: list[Call]) -> None:
    """Whoever could compute them could end a GPU's process."""
    last = Call(EMBEDDING, (Ref(1), Ref(1 + len(calls))))
    program = Program(1, (*calls, last))
    with pytest.raises(PackageError, match="nobody has checked the range"):
        infer(program, {1: TABLE}, IDS)


@pytest.mark.parametrize(
    ("table", "form"),
    [
        (torch.randn(0, 3), IDS),
        (TABLE, SampleForm((4,))),
        (torch.zeros(4, dtype=torch.int64), IDS),
    ],
    ids=["empty", "float ids", "no rows"],
)
def test_lookup_that_cannot_be_safe_is_refused(table, form) -> None:
    program = Program(1, (Call(EMBEDDING, (Ref(1), Ref(0))),))
    with pytest.raises(PackageError):
        infer(program, {1: table}, form)


def test_samples_are_no_table() -> None:
    program = Program(0, (Call(EMBEDDING, (Ref(0), Ref(0))),))
    with pytest.raises(PackageError):
        infer(program, {}, IDS)


def test_constant_ids_that_a_table_lacks_are_refused() -> None:
    program = Program(2, (Call(EMBEDDING, (Ref(1), Ref(2))),))
    weights = {1: TABLE, 2: torch.tensor([[99]])}
    with pytest.raises(PackageError, match="nobody has checked the range"):
        infer(program, weights, IDS)


class Shifted(nn.Module):
    """Ids that are computed before they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids + 1).mean(1))


def test_model_that_computes_its_ids_is_told_why_it_cannot_be_frozen() -> None:
    with pytest.raises(HapiError, match="whole numbers of the input as they"):
        split(Shifted(), "table", transform=TOKENS)


def test_images_for_a_text_model_are_an_error() -> None:
    with pytest.raises(FreezeError) as caught:
        split(text_network(), "body", transform=ImageTransform(8, 8))
    assert caught.value.code == "cannot_trace"


def changed(package: bytes, **fields: object) -> bytes:
    members = container.unpack(memoryview(package))
    hapi = json.loads(bytes(members["hapi.json"])) | fields
    parts = {name: bytes(data) for name, data in members.items()}
    parts["hapi.json"] = json.dumps(hapi).encode()
    return b"".join(container.pack(parts))


def test_packages_of_images_have_the_format_that_they_had() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2))
    made = split(model, "0", transform=ImageTransform(8, 8)).frozen
    package = package_bytes(made)
    assert b'"format":1,' in package
    with pytest.raises(PackageError, match="its format is 2"):
        load_package(changed(package, format=2))


def test_packages_of_arrays_have_a_format_of_their_own(
    text: FrozenGraph,
) -> None:
    """So that what does not know arrays says so."""
    package = package_bytes(text)
    assert b'"format":2,' in package
    assert PackageHead.from_bytes(package).sample_shape == (NUM_TOKENS,)
    with pytest.raises(PackageError, match="its format is 1"):
        load_package(changed(package, format=1))
    with pytest.raises(PackageError, match="neither 1 nor 2"):
        load_package(changed(package, format=3))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sample": [3]}, r"yields \(16,\), the model takes \(3,\)"),
        ({"sample": [[3]]}, "no sample has the shape"),
        (
            {"transform": {"shape": [NUM_TOKENS], "dtype": "bool"}},
            "dtype must be one of",
        ),
        (
            {"transform": {"shape": [NUM_TOKENS], "dtype": "float32"}},
            "nobody has checked the range",
        ),
    ],
)
def test_stated_input_is_checked(text: FrozenGraph, fields, said) -> None:
    with pytest.raises(PackageError, match=said):
        load_package(changed(package_bytes(text), **fields))


def test_input_over_the_limit_is_refused(text: FrozenGraph) -> None:
    limits = PackageLimits(shapes=ShapeLimits(sample_bytes=100))
    with pytest.raises(PackageError, match="the input: a tensor of 128 bytes"):
        load_package(package_bytes(text), limits=limits)


def test_arrays_of_one_channel_are_convolved_alike_on_both_tiers() -> None:
    made = split(audio_network(), "body", transform=MELS).frozen
    whole = audio_network().eval()
    mels = made.examples(3)
    with torch.inference_mode():
        expected = whole.pool(whole.body(mels)).flatten(1)
        fast = made.to("cpu", fast=True)
        for cut in range(made.num_cuts + 1):
            found = made.suffix(cut)(fast.prefix(cut)(mels))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_sample_shape_that_is_not_the_arrays_is_an_error() -> None:
    with pytest.raises(FreezeError, match="not what the transform yields"):
        split(
            text_network(),
            "body",
            transform=ArrayTransform((3,), "int64"),
            sample_shape=(4,),
        )


class Encoded(nn.Module):
    """Of a model of Hugging Face, with the mask of its padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids != 0)[:, None, None, :]
        mask = mask.expand(-1, -1, ids.shape[1], -1)
        found = self.model(input_ids=ids, attention_mask=mask)
        return found.last_hidden_state[:, 0]


def hugging_face_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": NUM_IDS, "max_position_embeddings": NUM_TOKENS}
    if name == "DistilBert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    else:
        sizes |= {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}Model")(config).eval()
    return model


@pytest.mark.parametrize("name", ["Bert", "DistilBert"])
def test_models_of_hugging_face_can_be_frozen(name: str) -> None:
    model = hugging_face_model(name)
    parts = split((Encoded(model), nn.Linear(32, 2)), transform=TOKENS)
    region = load_package(package_bytes(parts.frozen))
    ids = region.examples(4)
    ids[:, 10:] = 0
    with torch.inference_mode():
        mask = (ids != 0).long()
        found = model(input_ids=ids, attention_mask=mask)
        expected = found.last_hidden_state[:, 0]
        for cut in range(region.num_cuts + 1):
            found = region.suffix(cut)(region.prefix(cut)(ids))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
