"""Names that the distribution guarantees to imports and type checkers."""

import ast
import configparser
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hapi_client

ROOT = Path(__file__).parent.parent.parent
PUBLIC = [
    "ArrayTransform",
    "Augmentation",
    "CacheConfig",
    "Connection",
    "Credentials",
    "EpochPartition",
    "FeatureDataset",
    "FrozenRegion",
    "HapiError",
    "ImageTransform",
    "JobConfig",
    "JsonLabels",
    "NamedArrays",
    "PlanConfig",
    "ReadConfig",
    "TransferJob",
    "split_model",
]
"""Training scripts depend on these names."""
PACKAGES = sorted(path.parent for path in ROOT.glob("*/hapi_*/__init__.py"))


def test_exported_names_are_the_promised_ones():
    assert hapi_client.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(hapi_client))
    for name in PUBLIC:
        assert inspect.getdoc(getattr(hapi_client, name)), name


def test_transfer_job_has_at_most_eight_arguments():
    """More belong into one of the frozen configs."""
    assert len(inspect.signature(hapi_client.TransferJob).parameters) <= 8


def test_type_checkers_see_what_is_exported():
    tree = ast.parse(Path(hapi_client.__file__).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
        if alias.name in PUBLIC
    }
    homes = {n: getattr(hapi_client, n).__module__ for n in PUBLIC}
    assert seen == homes


def test_name_that_is_not_exported_is_an_error():
    with pytest.raises(AttributeError, match="has no 'TransferJobs'"):
        hapi_client.TransferJobs  # noqa: B018


PLANNING = (
    "from hapi_client.plan_report import plan_page, plan_tables\n"
    "from hapi_splitter.planner import costs, plan\n"
)
COMPLETION = (
    "import hapi_client.cli.main\n"
    "from hapi_client.cli import options\n"
    "assert 'resnet18' in options.complete_model('resnet')\n"
)


FILTER = (
    "from hapi_middleware.filter import filter_factory\n"
    "filter_factory({})(None)\n"
)
OPPONENTS = (
    "from benchmarks.micro import tight_loop\n"
    "from benchmarks.opponents import convert, local_features\n"
    "from benchmarks.opponents import serve, tar_stream\n"
)


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import hapi_client", {"torch"}),
        (PLANNING, {"torch", "torchvision", "matplotlib"}),
        (COMPLETION, {"torch", "torchvision", "pyarrow", "numpy"}),
        (FILTER, {"torch", "pyarrow", "numpy"}),
        (OPPONENTS, {path.name for path in PACKAGES}),
    ],
    ids=["package", "planning", "completion", "filter", "opponents"],
)
def test_import_loads_only_what_it_needs(code, unwanted):
    check = f"import sys; sys.exit(bool({unwanted} & {{*sys.modules}}))"
    command = [sys.executable, "-c", f"{code}\n{check}"]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT)


def test_packages_are_typed():
    assert len(PACKAGES) == 7
    assert all((package / "py.typed").is_file() for package in PACKAGES)


def test_torch_and_torchvision_have_no_upper_bound():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [
        line
        for extra in setup["options.extras_require"].values()
        for line in extra.splitlines()
        if re.match(r"torch(vision)?\b", line)
    ]
    assert len(wanted) == 4
    assert all(re.fullmatch(r"\w+>=[\d.]+", line) for line in wanted)
