"""Hostile packages are refused before anything of them runs."""

import tempfile

import pytest

from hapi_protocol.errors import (
    DoesNotFitError,
    PackageError,
    UnavailableError,
)
from hapi_splitter.package.reader import PackageLimits, load_package
from hapi_splitter.package.subprocess_validation import (
    ProcessLimits,
    probe_batchwise,
    validate_package,
)
from hostile import attacks, valid_package


@pytest.mark.parametrize(
    ("build", "reason"), attacks().values(), ids=attacks()
)
def test_hostile_package_is_refused_by_name_and_leaves_no_trace(
    build, reason, tmp_path
):
    trace = tmp_path / "trace"
    data = build(trace)
    with pytest.raises(PackageError, match=reason):
        load_package(data)
    assert not list(tmp_path.iterdir())


def test_valid_package_loads_with_its_digest_only():
    frozen = load_package(valid_package())
    assert frozen.num_cuts == 4
    changed = bytearray(valid_package())
    changed[-1] ^= 1
    with pytest.raises(PackageError, match="has the digest"):
        load_package(changed, digest=frozen.digest)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (PackageLimits(package_bytes=100), "more than the limit of 100"),
        (PackageLimits(parameters=10), "parameters, more than the limit"),
        (PackageLimits(nodes=2), "more than the limit of 2|must be 0 to 2"),
        (PackageLimits(header_bytes=9), "more than the limit of 9"),
    ],
)
def test_each_limit_is_kept(limits, reason):
    with pytest.raises(PackageError, match=reason):
        load_package(valid_package(), limits=limits)


def test_validating_process_accepts_an_honest_package(tmp_path):
    path = tmp_path / "package"
    path.write_bytes(valid_package())
    frozen = load_package(path).to("cpu", fast=True)
    found = validate_package(path, digest=frozen.digest)
    assert found.digest == frozen.digest
    assert found.memory.keys() == probe_batchwise(frozen).keys()


def test_weights_over_the_workers_memory_are_refused():
    """Folded weights take more than those in the package."""
    size = load_package(valid_package()).to("cpu", fast=True).parameter_bytes
    assert size > load_package(valid_package()).parameter_bytes
    validate_package(valid_package(), limits=PackageLimits(loaded_bytes=size))
    with pytest.raises(DoesNotFitError) as refused:
        validate_package(
            valid_package(), limits=PackageLimits(loaded_bytes=size - 1)
        )
    assert refused.value.details == {
        "needed_bytes": size,
        "available_bytes": size - 1,
    }


@pytest.mark.parametrize("full", [True, False])
def test_no_space_for_a_temporary_file_may_pass(full, monkeypatch):
    if full:
        monkeypatch.setattr(tempfile, "TemporaryFile", full_file)
    else:
        monkeypatch.setattr(tempfile, "tempdir", "/no/such/directory")
    with pytest.raises(UnavailableError, match="TMPDIR") as raised:
        validate_package(valid_package())
    assert raised.value.retry_after


def full_file():
    return open("/dev/full", "wb")


def test_validating_process_passes_on_what_is_wrong(tmp_path):
    build, reason = attacks()["pickled header"]
    with pytest.raises(PackageError, match=reason):
        validate_package(build(tmp_path / "trace"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ProcessLimits(wall_seconds=0.001), r"took over 0\.001 s"),
        (ProcessLimits(cpu_seconds=0), "ended the process with status"),
    ],
)
def test_validating_process_that_is_ended_is_a_refusal(limits, reason):
    with pytest.raises(PackageError, match=reason):
        validate_package(valid_package(), process_limits=limits)
