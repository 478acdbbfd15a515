"""Construction of the planner's problem from measurements."""

from dataclasses import replace

import pytest

from hapi_protocol.profiles import BatchProfile, ModelProfile
from hapi_splitter.planner.costs import (
    Conditions,
    CutFacts,
    SampleCosts,
    build_problem,
    candidate_cuts,
)
from hapi_splitter.planner.plan import solve
from hapi_splitter.planner.problem import UNITS, StartupCost

CUTS = (
    CutFacts(1, "conv", "aten.conv2d.default", (8, 4, 4), 512, 100),
    CutFacts(2, "relu", "aten.relu.default", (8, 4, 4), 512, 100),
    CutFacts(3, "pool", "aten.avg_pool2d.default", (8,), 32, 300),
)
SERVER = ModelProfile(
    digest="d",
    numerics_tag="t",
    device="cuda",
    device_name="a GPU",
    num_devices=2,
    cores=16,
    forward_threads=0,
    batches=(
        BatchProfile(1, (0.0, 0.02, 0.02, 0.06)),
        BatchProfile(10, (0.0, 0.1, 0.1, 0.3)),
    ),
    reference_seconds=0.002,
    load_seconds=1.0,
    parameter_bytes=1000,
    memory_limit_bytes=5000,
    peak_bytes=(1000, 2000, 2100, 3000),
)
CLIENT = replace(
    SERVER,
    num_devices=1,
    cores=4,
    batches=(BatchProfile(10, (0.0, 0.2, 0.2, 0.6)),),
    reference_seconds=0.001,
    memory_limit_bytes=4000,
)
KEYS = [(2, "float32"), (2, "uint8"), (3, "float16;zstd")]
SAMPLES = SampleCosts(
    raw_bytes=1000.0,
    decode_seconds=0.005,
    wire_bytes={KEYS[0]: 520.0, KEYS[1]: 130.0, KEYS[2]: 20.0},
    encode_seconds=dict.fromkeys(KEYS, 0.001),
    unpack_seconds=dict.fromkeys(KEYS, 0.0005),
    span_samples=10,
)
CONDITIONS = Conditions(
    link_bytes_per_second=1e6,
    serve_seconds_per_byte=1e-6,
    serve_seconds_per_request=0.003,
    push_seconds_per_request=0.008,
)


def build(server=SERVER, client=CLIENT, samples=SAMPLES, **options):
    conditions = options.pop("conditions", CONDITIONS)
    defaults = {"min_precision": "uint8", "startup": StartupCost()}
    return build_problem(
        *(CUTS, server, client, samples, conditions),
        num_samples=100,
        epochs=2.5,
        **defaults | options,
    )


def option(problem, cut, encoding):
    return next(
        o for o in problem.options if (o.cut, o.encoding) == (cut, encoding)
    )


@pytest.mark.parametrize("rate", [None, 2e5])
def test_changed_bandwidth_equals_a_problem_built_with_it(rate):
    startup = StartupCost(3e6, 2.0, 1.0, upload_bytes_per_second=rate)
    wide = replace(CONDITIONS, link_bytes_per_second=3e6)
    built = build(startup=startup, conditions=wide)
    changed = build(startup=startup).with_bandwidth(3e6)
    seconds = pytest.approx(built.push_one_off_seconds)
    assert changed.push_one_off_seconds == seconds
    assert changed == built


@pytest.mark.parametrize(
    ("cut", "encoding", "use", "memory"),
    [
        # link, server CPU and device, client CPU and device
        (0, "raw", (1000, 1e-3 + 0.0003, 0, 0.005, 0.06), (0, 3000)),
        (2, "uint8", (130, 0.012 + 0.00193, 0.01, 0.0005, 0.04), (2100, 3000)),
        (3, "float16;zstd", (20, 0.012 + 0.00182, 0.03, 0.0005, 0), (3000, 0)),
    ],
    ids=["streaming", "inner cut", "last cut"],
)
def test_use_of_each_tier(cut, encoding, use, memory):
    """Decoding and encoding take twice as long on the server: 12 ms."""
    found = option(build(), cut, encoding)
    assert found.use == pytest.approx(dict(zip(UNITS, use, strict=True)))
    assert (found.server_bytes, found.client_bytes) == memory


@pytest.mark.parametrize(("device", "threads"), [("cpu", 2), ("cuda", 0)])
def test_every_option_includes_training_and_client_overhead(device, threads):
    client = replace(CLIENT, device=device, forward_threads=threads)
    conditions = replace(CONDITIONS, train_seconds=0.25, handling_seconds=0.02)
    before = build(client=client)
    after = build(client=client, conditions=conditions)
    more = {"client device": 0.25, "client cpu": 0.25 * threads + 0.02}
    for old, new in zip(before.options, after.options, strict=True):
        assert new.use == pytest.approx(
            {name: n + more.get(name, 0.0) for name, n in old.use.items()}
        )


def test_capacities_are_those_of_the_tiers_and_the_share():
    problem = build(conditions=replace(CONDITIONS, server_share=0.25))
    assert {r.name: (r.capacity, r.unit) for r in problem.resources} == {
        "link": (1e6, "bytes/s"),
        "server cpu": (4, "cores"),
        "server device": (0.5, "devices"),
        "client cpu": (4, "cores"),
        "client device": (1, "devices"),
    }
    assert problem.server_limit_bytes == 5000
    assert problem.client_limit_bytes == 4000
    assert problem.remaining_samples == 250
    assert problem.last_cut == 3


def test_workers_add_up_and_swift_stays_as_it_is():
    one, two = (
        build(conditions=replace(CONDITIONS, server_share=0.5, num_workers=n))
        for n in (1, 2)
    )
    for name in ("server cpu", "server device"):
        assert two.capacity(name) == 2 * one.capacity(name)
    assert two.capacity("link") == one.capacity("link")
    rates = [
        each.samples_per_second(option(each, 0, "raw")) for each in (one, two)
    ]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize("share", [0.5, 0.001, 0.0])
def test_server_share_does_not_limit_raw_reads(share):
    whole = build()
    problem = build(conditions=replace(CONDITIONS, server_share=share))
    raw = problem.samples_per_second(option(problem, 0, "raw"))
    expected = whole.samples_per_second(option(whole, 0, "raw"))
    assert raw == pytest.approx(expected)
    if not share:
        plan = solve(problem)
        assert not plan.pushes
        assert plan.samples_per_second > 0
    assert solve(whole).pushes


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("server decoding", {"server cpu": 2 * 2 * 0.006}),
        ("server layers", {"server cpu": 8 * 0.02, "server device": 0.02}),
        ("client decoding", {"client cpu": 2 * 0.0005}),
        ("client layers", {"client cpu": 2 * 0.08, "client device": 0.08}),
        ("serving", {"server cpu": 2 * (1130e-6 + 0.0008)}),
    ],
)
def test_scale_applies_to_its_cost_component_only(kind, more):
    server = replace(SERVER, device="cpu", forward_threads=8)
    client = replace(CLIENT, device="cpu", forward_threads=2)
    conditions = replace(CONDITIONS, scale={kind: 3.0})
    found, usual = (
        option(build(server=server, client=client, conditions=c), 2, "uint8")
        for c in (conditions, CONDITIONS)
    )
    assert found.use == pytest.approx(
        {name: n + more.get(name, 0.0) for name, n in usual.use.items()}
    )


@pytest.mark.parametrize(
    ("min_precision", "encodings"),
    [
        ("lossless", ["raw", "float32"]),
        ("half", ["raw", "float32", "float16;zstd"]),
        ("uint8", ["raw", "float32", "uint8", "float16;zstd"]),
    ],
)
def test_precision_floor_selects_the_encodings(min_precision, encodings):
    options = build(min_precision=min_precision).options
    assert [each.encoding for each in options] == encodings


def test_the_dtype_of_a_cut_is_lossless():
    cuts = (*CUTS[:2], replace(CUTS[2], dtype="float16"))
    problem = build_problem(
        *(cuts, SERVER, CLIENT, SAMPLES, CONDITIONS),
        num_samples=100,
        epochs=1,
        min_precision="lossless",
        startup=StartupCost(),
    )
    found = [(each.cut, each.encoding) for each in problem.options]
    assert found == [(0, "raw"), (2, "float32"), (3, "float16;zstd")]


def test_startup_costs_are_upload_load_and_profile():
    problem = build(
        startup=StartupCost(2e6, load_seconds=3, profile_seconds=4)
    )
    assert problem.push_one_off_seconds == pytest.approx(9)
    assert StartupCost().seconds(0.0) == 0


FEWER = replace(SERVER, peak_bytes=(1, 2))
IDLE = replace(CLIENT, reference_seconds=0.0)
BEYOND = replace(SAMPLES, wire_bytes={(4, "float32"): 1.0})
UNENCODED = replace(SAMPLES, encode_seconds={})
PACKED = replace(SAMPLES, unpack_seconds={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_precision": "none"}, "min_precision is 'none'"),
        ({"server": FEWER}, "server's profile has 1 cuts, the region 3"),
        ({"client": IDLE}, "client's profile has reference_seconds 0.0"),
        ({"samples": BEYOND}, "cut 4 was measured, the region has 1 to 3"),
        ({"samples": UNENCODED}, "encoding cut 2 · float32 was not measured"),
        ({"samples": PACKED}, "unpacking cut 2 · float32 was not measured"),
    ],
)
def test_inconsistent_measurements_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server_share": 1.5}, "server_share must be from 0 to 1, not 1.5"),
        ({"scale": {"gpu": 2.0}}, "'gpu' is not a cost component"),
    ],
)
def test_invalid_conditions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONDITIONS, **changes)  # type: ignore[arg-type]


HULL = ((800, 10), (790, 50), (400, 60), (300, 90), (50, 100))
EQUAL = [(600, 100 * number) for number in range(1, 9)]


@pytest.mark.parametrize(
    ("sizes", "raw_bytes", "expected"),
    [
        # On the convex hull of bytes over work.
        (HULL, 1e3, (1, 3, 5)),
        # The last of cuts with equal bytes and nearly equal work.
        (((800, 1000), (800, 1001), (800, 1002), (100, 5000)), 1e3, (3, 4)),
        # The first of cuts with equal bytes.
        (((600, 10), *EQUAL, (9, 900)), 1e3, (1, 10)),
        # No encoding makes the others smaller than the image.
        (((900, 10), (700, 20), (600, 100)), 100, (2, 3)),
        # The smallest and the last cut.
        (((900, 10), (700, 20), (400, 30), (800, 100)), 1, (3, 4)),
        (((900, 10),), 1, (1,)),
        ((), 1, ()),
    ],
)
def test_candidate_cuts(sizes, raw_bytes, expected):
    cuts = [
        CutFacts(index, "n", "aten.relu.default", (1,), size, flops)
        for index, (size, flops) in enumerate(sizes, 1)
    ]
    assert candidate_cuts(cuts, raw_bytes) == expected
