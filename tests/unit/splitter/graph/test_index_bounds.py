"""Regions that look up token ids, and the bounds of these ids."""

from functools import partial

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
from hapi_splitter.package.header import encode_header, parse_header
from hapi_splitter.package.metadata import PackageMetadata
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.subprocess_validation import probe_batchwise
from hapi_splitter.package.writer import package_bytes
from hapi_splitter.profiling.memory_model import memory_requirement
from hapi_splitter.profiling.profiler import profile_region

CPU = torch.device("cpu")
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
EMBEDDING = "aten.embedding.default"
SELECT_ROWS = "aten.index_select.default"
IDS = SampleForm((4,), torch.int64)
LONG = SampleForm((MAX_IDS + 1,), torch.int64)
TABLE = torch.randn(10, 3)


@pytest.fixture(scope="module")
def text():
    return split(text_network(), "body", transform=TOKENS).frozen


def assert_equivalent_at_every_cut(before, after, samples, expected):
    with torch.inference_mode():
        for cut in range(before.num_cuts + 1):
            assert_close(
                after.suffix(cut)(before.prefix(cut)(samples)), expected
            )


def test_text_model_is_equivalent_at_every_cut(text):
    loaded = load_package(package_bytes(text))
    assert loaded.transform == TOKENS
    assert loaded.form == SampleForm((NUM_TOKENS,), torch.int64)
    ids = loaded.examples(5)
    assert ids.dtype == torch.int64
    assert 0 <= ids.min() < ids.max() < NUM_IDS
    expected = text_network().eval().body(ids).mean(1).detach()
    for region in (loaded, loaded.to("cpu", fast=True)):
        assert_equivalent_at_every_cut(region, region, ids, expected)


def test_ids_are_no_cut_and_the_region_can_be_profiled(text):
    assert text.num_cuts > 3
    assert {cut.dtype for cut in text.cuts} == {"float32"}
    probe_batchwise(text)
    (profile,) = profile_region(text, CPU, batches=[2], budget_seconds=0.1)
    assert profile.cut_seconds[-1] > 0


def looked_up(table):
    return nn.Sequential(table, nn.Flatten(), nn.Linear(NUM_TOKENS * 8, 2))


def test_lookup_costs_memory_and_work_only_for_its_rows():
    wide = looked_up(nn.Embedding(100_000, 8))
    frozen = split(wide, "0", transform=TOKENS).frozen
    samples = (
        memory_requirement(frozen, 1).peak_bytes(64) - frozen.parameter_bytes
    )
    # Ids and rows, a copy of each, rounded up.
    exact = 64 * NUM_TOKENS * 2 * (8 + 8 * 4)
    assert exact <= samples <= 1.1 * exact + (1 << 19)
    assert frozen.cuts[0].flops < 1000


def limits_of(program, *tables):
    values = infer(program, dict(enumerate(tables, 1)), IDS)
    limits = id_limits(program, values)
    return None if limits is None else limits.tolist()


def test_smallest_table_limits_ids():
    calls = (
        Call(EMBEDDING, (Ref(1), Ref(0))),
        Call(EMBEDDING, (Ref(2), Ref(0))),
        Call("aten.add.Tensor", (Ref(3), Ref(4), 1)),
    )
    program = Program(2, calls)
    tables = torch.randn(10, 3), torch.randn(7, 3)
    assert limits_of(program, *tables) == [7, 7, 7, 7]


def test_positions_have_the_limits_of_their_own_tables():
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


def test_program_without_a_lookup_has_no_limits():
    program = Program(0, (Call("aten.relu.default", (Ref(0),)),))
    assert limits_of(program) is None


def flips(count):
    """Returns calls that flip the ids again and again."""
    return [
        Call("aten.flip.default", (Ref(node and node + 1), (1,)))
        for node in range(count)
    ]


def lookup_after(*calls):
    """Returns a program that looks up the result of calls."""
    last = Ref(1 + len(calls)) if calls else Ref(0)
    return Program(1, (*calls, Call(EMBEDDING, (Ref(1), last))))


MANY = (Call(EMBEDDING, (Ref(1), Ref(0))),) * (MAX_LOOKUPS + 1)
WIDE = (
    Call("aten.unsqueeze.default", (Ref(0), 1)),
    Call("aten.expand.default", (Ref(2), (Affine(1), MAX_IDS, 4))),
)


def test_ids_are_followed_through_many_moves():
    first = Call("aten.select.int", (Ref(100), 1, 0))
    assert limits_of(lookup_after(*flips(99), first), TABLE) == [0, 0, 0, 10]


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
def test_moved_ids_are_accepted(call):
    assert infer(lookup_after(call), {1: TABLE}, IDS)[-1].shape[-1] == 3


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
def test_computed_ids_are_refused(calls):
    with pytest.raises(PackageError, match="cannot be checked"):
        infer(lookup_after(*calls), {1: TABLE}, IDS)


def counted(*calls):
    """Returns a program that numbers tokens, the first one from 1 on.

    Args:
        calls: made on the numbers, ``Ref(5)``, before they are looked up.
    """
    return lookup_after(
        Call("aten.ne.Scalar", (Ref(0), 0)),
        Call("aten._to_copy.default", (Ref(2), torch.int32)),
        Call("aten.cumsum.default", (Ref(3), 1, None)),
        Call("aten.mul.Tensor", (Ref(4), Ref(3))),
        *calls,
    )


def plus(number):
    return Call("aten.add.Scalar", (Ref(5), number, 1))


def clamped(low, high):
    return lookup_after(Call("aten.clamp.default", (Ref(0), low, high)))


BOUNDED = {
    "counted": (counted(), 5),
    "counted and shifted": (counted(plus(2)), 7),
    "clamped": (clamped(0, 9), 10),
    "position of the maximum": (
        lookup_after(Call("aten.argmax.default", (Ref(0), 1, False))),
        4,
    ),
}


@pytest.mark.parametrize(
    ("program", "num_rows"), BOUNDED.values(), ids=BOUNDED
)
def test_computed_ids_are_looked_up_only_in_large_enough_tables(
    program, num_rows
):
    assert limits_of(program, torch.randn(num_rows, 3)) is None
    with pytest.raises(PackageError, match="cannot be checked"):
        limits_of(program, torch.randn(num_rows - 1, 3))


@pytest.mark.parametrize(
    "program",
    [
        clamped(0, None),
        clamped(None, 9),
        clamped(-1, 9),
        clamped(0, 9.5),
        counted(plus(-1)),
        # The product wraps around to negative integers.
        counted(
            Call("aten.mul.Scalar", (Ref(5), 2**61)),
            Call("aten.clamp.default", (Ref(6), None, 9)),
        ),
    ],
)
def test_ids_that_may_be_out_of_range_are_refused(program):
    with pytest.raises(PackageError, match="cannot"):
        infer(program, {1: TABLE}, IDS)


def test_computed_and_unchanged_ids_have_their_own_limits():
    calls = (
        *counted(plus(5)).calls,
        Call(EMBEDDING, (Ref(1), Ref(0))),
        Call("aten.add.Tensor", (Ref(7), Ref(8), 1)),
    )
    assert limits_of(Program(1, calls), TABLE) == [10] * 4


ONE, OUTSIDE = {1: TABLE}, {1: TABLE, 2: torch.tensor([[99]])}
NUMBERS = {1: torch.zeros(4, dtype=torch.int64)}
SELF = Program(0, (Call(EMBEDDING, (Ref(0), Ref(0))),))
CONSTANT = Program(2, (Call(EMBEDDING, (Ref(1), Ref(2))),))
TOO_MANY_IDS = "at most 131072 per sample"
UNCHECKED = "cannot be checked"
NO_ROWS = {1: torch.randn(0, 3)}


def selected(*numbers, dtype=torch.int64):
    """Returns weights: a table and indices of its rows."""
    return {1: TABLE, 2: torch.tensor(numbers, dtype=dtype)}


SELECT = Program(2, (Call(SELECT_ROWS, (Ref(1), 0, Ref(2))),))
GATHER = Program(2, (Call("aten.gather.default", (Ref(1), 1, Ref(2))),))
SELECT_SAMPLES = Program(1, (Call(SELECT_ROWS, (Ref(0), 1, Ref(0))),))
GATHER_IDS = Program(0, (Call("aten.gather.default", (Ref(0), 1, Ref(0))),))
REFUSED = {
    "many lookups": (Program(1, MANY), ONE, IDS, "more than 512 lookups"),
    "expanded ids": (lookup_after(*WIDE), ONE, IDS, TOO_MANY_IDS),
    "many ids": (lookup_after(), ONE, LONG, TOO_MANY_IDS),
    "moves": (lookup_after(*flips(MAX_MOVES + 1)), ONE, IDS, TOO_MANY_IDS),
    "empty table": (lookup_after(), NO_ROWS, IDS, UNCHECKED),
    "float ids": (lookup_after(), ONE, SampleForm((4,)), UNCHECKED),
    "no table of rows": (lookup_after(), NUMBERS, IDS, UNCHECKED),
    "samples as table": (SELF, {}, IDS, UNCHECKED),
    "constant ids out of range": (CONSTANT, OUTSIDE, IDS, UNCHECKED),
    "row after the last": (SELECT, selected(0, 10), IDS, "from 0 to 10"),
    "negative row": (SELECT, selected(9, -1), IDS, "from -1 to 9"),
    "int32 rows": (SELECT, selected(0, dtype=torch.int32), IDS, UNCHECKED),
    "float rows": (SELECT, {1: TABLE, 2: TABLE[0]}, IDS, UNCHECKED),
    "no rows": (SELECT, {**selected(0), **NO_ROWS}, IDS, UNCHECKED),
    "column after the last": (GATHER, selected([3]), IDS, UNCHECKED),
    "no dimension": (
        GATHER,
        {1: torch.tensor(1.0), 2: torch.tensor(0)},
        IDS,
        UNCHECKED,
    ),
    "ids as columns": (GATHER_IDS, {}, IDS, UNCHECKED),
    "ids as rows": (SELECT_SAMPLES, {}, IDS, UNCHECKED),
}


@pytest.mark.parametrize(
    ("program", "weights", "form", "message"), REFUSED.values(), ids=REFUSED
)
def test_unsafe_lookup_is_refused(program, weights, form, message):
    with pytest.raises(PackageError, match=message):
        infer(program, weights, form)


class Shifted(nn.Embedding):
    """Computes ids before it looks them up."""

    def forward(self, ids):
        return super().forward(ids + 1)


def test_model_that_computes_its_ids_cannot_be_frozen():
    with pytest.raises(HapiError, match="unchanged int64 ids of the input"):
        split(looked_up(Shifted(100, 8)), "0", transform=TOKENS)


def test_transform_that_the_model_does_not_accept_is_refused():
    with pytest.raises(FreezeError) as caught:
        split(text_network(), "body", transform=ImageTransform(8, 8))
    assert caught.value.code == "cannot_trace"
    short = ArrayTransform((3,), "int64")
    with pytest.raises(FreezeError, match="not the transform's output"):
        split(text_network(), "body", transform=short, sample_shape=(4,))


def with_fields(package, **fields):
    header = parse_header(package)
    documents = {"hapi.json": header.hapi | fields, "graph.json": header.graph}
    return encode_header(documents, header.tensors) + package[header.end :]


def test_package_of_arrays_is_read_in_its_own_format_only(text):
    package = package_bytes(text)
    assert PackageMetadata.from_bytes(package).sample_shape == (NUM_TOKENS,)
    assert with_fields(package) == package
    for other in (4, 6, "5", None):
        with pytest.raises(PackageError, match="its format is not 5"):
            load_package(with_fields(package, format=other))


def array_of(dtype):
    return {"transform": {"shape": [NUM_TOKENS], "dtype": dtype}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sample": [3]}, r"yields \(16,\), the model takes \(3,\)"),
        ({"sample": [[3]]}, "invalid sample shape"),
        (array_of("bool"), "dtype must be one of"),
        (array_of("float32"), "cannot be checked"),
    ],
)
def test_recorded_input_format_is_checked(text, fields, message):
    with pytest.raises(PackageError, match=message):
        load_package(with_fields(package_bytes(text), **fields))


def test_input_over_the_limit_is_refused(text):
    limits = PackageLimits(shapes=ShapeLimits(sample_bytes=100))
    with pytest.raises(PackageError, match="the input: a tensor of 128 bytes"):
        load_package(package_bytes(text), limits=limits)


def test_audio_model_is_equivalent_at_every_cut():
    frozen = split(audio_network(), "body", transform=MELS).frozen
    whole = audio_network().eval()
    mels = frozen.examples(3)
    expected = whole.pool(whole.body(mels)).flatten(1).detach()
    fast = frozen.to("cpu", fast=True)
    assert_equivalent_at_every_cut(fast, frozen, mels, expected)


class Encoded(nn.Module):
    """A Hugging Face model with its padding mask."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        mask = (ids != PADDING).long()
        output = self.model(input_ids=ids, attention_mask=mask)
        return output.last_hidden_state[:, 0]


PADDING = 1


def test_model_that_numbers_its_tokens_is_equivalent_at_every_cut():
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(
        vocab_size=NUM_IDS,
        max_position_embeddings=NUM_TOKENS + 2,
        pad_token_id=PADDING,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    torch.manual_seed(0)
    model = transformers.RobertaModel(config).eval()
    parts = split((Encoded(model), nn.Linear(32, 2)), transform=TOKENS)
    region = load_package(package_bytes(parts.frozen))
    ids = region.examples(4)
    ids[1:, 10:] = PADDING
    output = model(input_ids=ids, attention_mask=(ids != PADDING).long())
    expected = output.last_hidden_state[:, 0]
    assert_equivalent_at_every_cut(region, region, ids, expected.detach())
