"""Cached splits equal fresh ones, and are never used for another model."""

import contextlib
import functools
import importlib.util
import linecache
import logging
import os
import subprocess
import sys
import threading
import types
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from full_disk import no_file_beyond
from hapi_splitter.freezing import (
    one_module,
    split_cache,
    split_model,
    split_store,
    two_modules,
)
from hapi_splitter.freezing.model_key import UncacheableError, split_key
from hapi_splitter.freezing.split_cache import SplitCacheWarning
from hapi_splitter.freezing.split_model import split
from hapi_splitter.freezing.split_store import DiskStore
from hapi_splitter.inputs.array_transform import ArrayTransform

S = (3, 8, 8)
HELPER = """
import os

GAIN = 1.0

class Flags:
    clip = 6.0

FLAGS = Flags()

def adjusted(x):
    return x * GAIN * float(os.environ.get("FLAG_OF_A_TEST", 1))
"""
NET = """
from dataclasses import dataclass
import torch
from torch import nn
import helper_of_a_test

LIMIT = 6.0

def limited(x):
    return x.clamp(max=LIMIT)

class Options:
    slope = 1.0

@dataclass
class Result:
    values: object

class Neck(nn.Sequential):
    def forward(self, x):
        return Result(super().forward(x))

class Net(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.neck = Neck(nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.register_buffer("mean", torch.linspace(0, 1, 8))
        self.gain = 1.0
        self.options = Options()

    def forward(self, x):
        x = helper_of_a_test.adjusted(x) * self.gain * self.scale
        x = limited(self.stem(x + torch.sin(self.mean)))
        clip = helper_of_a_test.FLAGS.clip
        x = self.neck(x * self.options.slope).values.clamp(max=clip)
        return self.head(x.mean((2, 3)))
"""


class World:
    """A user's two files, imported, and how many exports were made."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.exports = 0
        self.monkeypatch = monkeypatch
        self._export = one_module.export_region
        for module in (one_module, two_modules):
            monkeypatch.setattr(module, "export_region", self._counted)
        self.write("helper", HELPER)
        self.write("net", NET)

    def _counted(self, *args):
        self.exports += 1
        return self._export(*args)

    def write(self, name, text):
        """Writes a file and imports it again, as a new process does."""
        path = self.folder / f"{name}_of_a_test.py"
        path.write_text(text)
        linecache.clearcache()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        module.__dict__["__cached__"] = None
        self.monkeypatch.setitem(sys.modules, path.stem, module)
        exec(compile(text, str(path), "exec"), vars(module))
        setattr(self, name, module)
        if name == "helper" and hasattr(self, "net"):
            self.write("net", NET)

    def model(self):
        torch.manual_seed(0)
        return self.net.Net()

    def split(self, model=None, freeze="neck", **options):
        options = {"sample_shape": S, **options}
        options.setdefault("cache_directory", self.folder / "cache")
        return split(model or self.model(), freeze, **options)

    def check(self, model=None, **options):
        """Splits a model and compares the parts with it."""
        model = model or self.model()
        parts = self.split(model, **options)
        samples = torch.randn(3, *S)
        model.eval()
        parts.tail.eval()
        with torch.no_grad():
            actual = parts.tail(parts.frozen.suffix(0)(samples))
            torch.testing.assert_close(actual, model(samples))
        return parts

    @property
    def entries(self):
        return DiskStore(self.folder / "cache").entries()

    def cache(self, model=None):
        """The entry of the net's split."""
        form = split_model._sample_form(None, S)
        model = model or self.model()
        spec = split_model.parse_freeze(model, "neck")
        folder = self.folder / "cache"
        return split_model._cache(model, None, form, spec, folder)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.delenv("FLAG_OF_A_TEST", raising=False)
    return World(tmp_path, monkeypatch)


class ConvolvedSamples(TorchDispatchMode):
    """Counts the samples of all convolutions."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in str(func):
            self.count += args[0].shape[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("error")
def test_split_of_an_equal_model_takes_one_forward_of_two_samples(world):
    first = world.check()
    model = world.model()
    before = {
        name: id(t) for name, t in model.state_dict(keep_vars=True).items()
    }
    with ConvolvedSamples() as samples:
        second = world.split(model)
    assert (world.exports, samples.count) == (1, 2)
    assert second.frozen.digest == first.frozen.digest
    assert second.frozen.values == first.frozen.values
    assert second.frozen.names == first.frozen.names
    assert second.tail._plan == first.tail._plan
    pointers = {each.data_ptr() for each in second.frozen.weights.values()}
    assert model.stem.weight.data_ptr() in pointers
    state = model.state_dict(keep_vars=True)
    assert {name: id(t) for name, t in state.items()} == before
    world.check()
    assert world.exports == 1


def test_weights_of_the_model_are_not_stored(world):
    model = nn.Sequential(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.Conv2d(64, 2, 1))
    world.check(model, freeze="1")
    assert world.entries[0].length_bytes < model[0].weight.nbytes // 2


@pytest.mark.parametrize("freeze", ["auto", ["stem", "neck"], "function"])
def test_each_form_of_freeze_is_cached_by_itself(world, freeze):
    def prepared():
        model = world.model()
        for part in (model.stem, model.neck):
            part.requires_grad_(False)
        return model

    world.check(prepared())
    if freeze == "function":

        def freeze(name, module):
            return name.startswith(("stem", "neck"))

    first = world.check(prepared(), freeze=freeze)
    second = world.check(prepared(), freeze=freeze)
    assert world.exports == 2
    assert second.freeze == first.freeze


def test_two_modules_are_cached(world):
    def pair():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), nn.Linear(
            72, 2
        )

    digests = {world.split(pair(), None).frozen.digest for _ in range(2)}
    assert (len(digests), world.exports) == (1, 1)
    frozen, tail = pair()
    frozen[0].weight.data *= 2
    assert world.split((frozen, tail), None).frozen.digest not in digests


def edit(name, old, new):
    """Returns a function that edits a file in a world."""

    def change(world):
        text = {"helper": HELPER, "net": NET}[name]
        world.write(name, text.replace(old, new))

    return pytest.param(change, id=f"{name}: {new}")


EDITS = [
    edit("helper", "x * GAIN", "x * GAIN * 2"),
    edit("helper", "GAIN = 1.0", "GAIN = 3.0"),
    edit("net", "torch.sin(self", "torch.cos(self"),
    # Evaluation does not show it.
    edit("net", "clamp(max=LIMIT)", "clamp(max=LIMIT) + 0"),
]


def set_(*path):
    """Returns a function that sets an attribute in a world."""
    *owners, name, value = path

    def change(world):
        owner = functools.reduce(getattr, owners, world)
        world.monkeypatch.setattr(owner, name, value, raising=False)

    return pytest.param(change, id=".".join(map(str, path[:-1])))


def forward(self, x):
    return self.head(self.neck(2 * self.stem(x)).values.mean((2, 3)))


@functools.wraps(nn.ReLU.forward)
def named_as_the_original(self, x):
    return x.abs()


IN_MEMORY = [
    set_("net", "LIMIT", 0.1),
    set_("helper", "GAIN", 2.0),
    set_("helper", "FLAGS", "clip", 0.1),
    set_("net", "Net", "scale", 2.0),
    set_("net", "Options", "slope", 2.0),
    set_("helper", "adjusted", lambda x: x * 2),
    set_("net", "Net", "forward", forward),
    set_("net", "nn", "ReLU", "forward", lambda self, x: x.abs()),
    set_("net", "nn", "ReLU", "forward", named_as_the_original),
    set_("net", "nn", "Linear", "scale", 2.0),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", [EDITS[0], IN_MEMORY[6]])
def test_split_of_other_code_is_made_again(world, change):
    world.check()
    change(world)
    world.check()
    assert (world.exports, len(world.entries)) == (2, 2)


@pytest.mark.parametrize("change", [*EDITS, *IN_MEMORY])
def test_key_depends_on_code_and_globals_in_memory(world, change):
    before = split_key(world.model(), {})
    change(world)
    assert split_key(world.model(), {}) != before


def test_key_depends_on_all_files_of_the_user_that_are_imported(world):
    name = "helper_of_a_test"
    text = NET.replace(f"import {name}", "import sys")
    text = text.replace(f"{name}.", f"sys.modules['{name}'].")
    world.write("net", text)
    before = split_key(world.model(), {})
    world.write("helper", HELPER.replace("x * GAIN", "x * GAIN * 2"))
    world.write("net", text)
    assert split_key(world.model(), {}) != before


def test_key_depends_on_code_that_is_not_in_its_file_any_more(world):
    """A user edits a file while a process runs."""
    text = NET.replace("clamp(max=LIMIT)", "clamp(max=LIMIT) + 0")
    (world.folder / "net_of_a_test.py").write_text(text)
    before = split_key(world.model(), {})
    world.write("net", text)
    assert split_key(world.model(), {}) != before


def first_weight(model):
    with torch.no_grad():
        model.stem.weight[0, 0, 0, 0] += 1e-6


def weight_of_tail(model):
    model.head.weight.data *= 2


def share_memory_of_zeros(model):
    model.neck[0].running_mean.data = model.neck[0].bias.data


@pytest.mark.parametrize(
    "change",
    [
        first_weight,
        weight_of_tail,
        lambda model: model.neck[0].running_mean.add_(1e-6),
        lambda model: model.mean.copy_(torch.rand(8)),
        lambda model: model.stem.requires_grad_(False),
        lambda model: model.eval(),
        lambda model: model.neck.eval(),
        lambda model: setattr(model, "gain", 2.0),
        lambda model: setattr(model, "gain", 1),
        lambda model: setattr(model.options, "slope", 2.0),
        lambda model: setattr(model.neck[0], "eps", 1e-4),
        lambda model: setattr(model, "table", torch.ones(2)),
        lambda model: setattr(model.neck, "1", nn.ReLU6()),
        lambda model: setattr(model, "forward", types.MethodType(run, model)),
        lambda model: model.double(),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: setattr(model.stem, "padding_mode", "reflect"),
        share_memory_of_zeros,
    ],
)
def test_key_depends_on_the_state_of_the_model(world, change):
    model = world.model()
    before = split_key(model, {})
    assert split_key(world.model(), {}) == before
    change(model)
    assert split_key(model, {}) != before


def run(self, x):
    return self.head(self.neck(self.stem(x)).values.mean((2, 3)))


@pytest.mark.parametrize(
    "settings",
    [
        lambda: torch.autocast("cpu"),
        lambda: default_dtype(torch.float64),
        lambda: torch.device("meta"),
        lambda: torch.backends.mkldnn.flags(enabled=False),
    ],
)
def test_key_depends_on_the_settings_of_torch(world, settings):
    model = world.model()
    before = split_key(model, {})
    with settings():
        assert split_key(model, {}) != before


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_transform_is_part_of_the_entry(world):
    for transform in (ArrayTransform(S), ArrayTransform(S), None):
        sample = None if transform else S
        parts = world.split(transform=transform, sample_shape=sample)
        assert parts.frozen.transform == transform
    assert world.exports == 2


def captured(scale):
    return lambda x: x * scale


def test_key_depends_on_variables_of_closures_and_functions_of_methods(world):
    keys = []
    for make in (
        *(lambda model, scale=scale: captured(scale) for scale in (2.0, 3.0)),
        *(partial(types.MethodType, each) for each in (run, forward)),
    ):
        for _ in range(2):
            model = world.model()
            model.neck.forward = make(model)
            keys.append(split_key(model, {}))
    assert keys[::2] == keys[1::2]
    assert len({*keys}) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.stem.register_forward_hook(print), "_forward_hooks"),
        (lambda m: m.register_forward_pre_hook(print), "_forward_pre_hooks"),
        (lambda m: setattr(m, "lock", threading.Lock()), "lock"),
        (lambda m: setattr(m, "items", (x for x in [1])), "generator"),
        (lambda m: setattr(m, "t", torch.ones(2).to_sparse()), "tensor"),
        (
            lambda m: setattr(m, "f", partial(captured(threading.Lock()), 2)),
            "lock",
        ),
    ],
)
def test_unknown_state_is_not_cached(world, change, reason):
    model = world.model()
    change(model)
    with pytest.raises(UncacheableError, match=reason):
        split_key(model, {})


def test_unknown_globals_of_the_users_code_are_not_cached(world):
    world.helper.FLAGS.lock = threading.Lock()
    with pytest.raises(UncacheableError, match="lock"):
        split_key(world.model(), {})
    world.helper.FLAGS = logging.getLogger("a")
    split_key(world.model(), {})


@pytest.mark.filterwarnings("ignore:hooks of the frozen module")
def test_model_with_hooks_is_split_without_the_cache(world, caplog):
    for _ in range(2):
        model = world.model()
        model.stem.register_forward_hook(lambda m, args, result: 2 * result)
        world.check(model)
    assert (world.exports, world.entries) == (2, [])
    assert "the split of Net is not cached: _forward_hooks" in caplog.text


def test_modes_of_torch_and_hooks_of_all_modules_are_not_cached(world):
    model = world.model()
    with (
        BaseTorchFunctionMode(),
        pytest.raises(UncacheableError, match="modes"),
    ):
        split_key(model, {})
    handle = nn.modules.module.register_module_forward_hook(print)
    try:
        with pytest.raises(UncacheableError, match="hooks of all modules"):
            split_key(model, {})
    finally:
        handle.remove()


CELLS = {
    "helper": "def helper(x):\n    return x + 1\n",
    "net": """
import torch
class Net(torch.nn.Sequential):
    limit = 6.0
    @torch.no_grad()
    def forward(self, x):
        return super().forward(helper(x)).clamp(max=self.limit)
""",
}


@pytest.fixture
def notebook(monkeypatch):
    """Runs cells, which have no file, in one module."""
    module = types.ModuleType("notebook_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run_cells(**cells):
        for name, text in cells.items():
            exec(compile(text, f"<cell {name}>", "exec"), vars(module))
        torch.manual_seed(0)
        return module.Net()

    return run_cells


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("helper", "x + 1", "x + 2"),
        ("net", "6.0", "7.0"),
        ("net", "no_grad", "enable_grad"),
        ("net", "max=", "min="),
    ],
)
def test_key_of_a_notebooks_model_depends_on_its_cells(
    notebook, name, old, new
):
    model = notebook(**CELLS)
    key = split_key(model, {})
    assert split_key(notebook(**CELLS), {}) == key
    edited = notebook(**{name: CELLS[name].replace(old, new)})
    assert split_key(edited, {}) != key
    if name == "net":  # the first model has still the code of its class
        assert split_key(model, {}) == key


def test_model_that_computes_something_else_is_split_again(world, monkeypatch):
    """The key cannot know all that code reads."""
    world.check()
    monkeypatch.setenv("FLAG_OF_A_TEST", "1.01")
    with pytest.warns(SplitCacheWarning, match="compute something else"):
        world.check()
    assert world.exports == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.check()
    assert world.exports == 2


def test_two_modules_that_compute_something_else_are_split_again(
    world, monkeypatch
):
    def pair():
        return world.model(), nn.Linear(2, 2)

    world.split(pair(), None)
    monkeypatch.setenv("FLAG_OF_A_TEST", "1.01")
    with pytest.warns(SplitCacheWarning, match="computes something else"):
        world.split(pair(), None)
    assert world.exports == 2


@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + data,
        lambda data: data[:-1] + bytes([data[-1] ^ 8]),
        lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:],
    ],
)
def test_damaged_entry_is_removed_and_made_again(world, damaged):
    world.split()
    (path,) = (world.folder / "cache" / "splits-3").glob("*.split")
    data = path.read_bytes()
    path.write_bytes(damaged(data))
    with pytest.warns(SplitCacheWarning, match="split of Net is damaged"):
        world.check()
    assert world.exports == 2
    assert path.read_bytes() == data


def test_entry_under_another_key_is_not_used(world):
    world.split()
    (path,) = (world.folder / "cache" / "splits-3").glob("*.split")
    model = world.model()
    model.gain = 2.0
    other = world.cache(model)
    path.rename(path.with_name(f"{other._key}.split"))
    with pytest.warns(SplitCacheWarning, match="is damaged"):
        assert other.load() is None


def test_entry_with_a_class_that_is_not_imported_is_not_used(world):
    world.split()
    cache = world.cache()
    assert cache.load() is not None
    del world.net.Result
    with pytest.warns(SplitCacheWarning, match="Result is not imported"):
        assert cache.load() is None


@pytest.mark.parametrize("problem", ["file", "shared", "full"])
def test_unusable_folder_is_named_and_the_run_goes_on(world, problem):
    folder = world.folder / "cache"
    limit = contextlib.nullcontext()
    if problem == "file":
        folder.write_bytes(b"")
    elif problem == "shared":
        (folder / "splits-3").mkdir(parents=True)
        (folder / "splits-3").chmod(0o777)
    else:
        limit = no_file_beyond(1000)
    with limit, pytest.warns(SplitCacheWarning) as warned:
        world.check()
    (message,) = {str(each.message) for each in warned}
    assert f"{folder}/splits" in message
    assert "HAPI_CACHE_DIR" in message
    assert world.exports == 1


def test_splits_of_one_process_are_in_memory_without_a_disk(
    world, monkeypatch
):
    monkeypatch.setattr(split_store, "MAX_MEMORY_ENTRIES", 2)
    monkeypatch.setattr(
        split_cache, "memory_store", functools.cache(split_store.MemoryStore)
    )
    for _ in range(3):
        world.check(cache_directory="")
    assert world.exports == 1
    for freeze in ("stem", "neck.0"):
        world.check(freeze=freeze, cache_directory="")
    world.check(cache_directory="")
    assert world.exports == 4


SCRIPT = """
import sys, torch
from net_of_a_test import Net
from hapi_splitter.freezing import one_module
from hapi_splitter.freezing.split_model import split

def exported(*args, export=one_module.export_region):
    print("exports", flush=True)
    sys.stdin.readline()
    return export(*args)

def exporting():
    print("finds nothing", flush=True)

one_module.export_region = exported
torch.manual_seed(0)
parts = split(
    Net(), "neck", sample_shape=(3, 8, 8), exporting=exporting
)
print(parts.frozen.digest, flush=True)
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_that_split_at_once_export_once(world, is_killed):
    (world.folder / "script.py").write_text(SCRIPT)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sys.path, str(world.folder)]),
        "HAPI_CACHE_DIR": str(world.folder / "cache"),
    }
    digest = f"{world.split(cache_directory='').frozen.digest}\n"
    with contextlib.ExitStack() as stack:

        def start():
            child = subprocess.Popen(
                [sys.executable, "script.py"],
                cwd=world.folder,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(child.communicate)
            stack.callback(child.kill)
            assert child.stdout.readline() == "finds nothing\n"
            return child

        first = start()
        assert first.stdout.readline() == "exports\n"
        second = start()
        if is_killed:
            first.kill()
            assert second.communicate("\n")[0] == f"exports\n{digest}"
        else:
            assert first.communicate("\n")[0] == digest
            assert second.communicate("\n")[0] == digest
    assert len(world.entries) == 1


def test_process_that_splits_for_too_long_is_not_waited_for(
    world, monkeypatch
):
    monkeypatch.setattr(split_store, "MAX_WAIT_SECONDS", 0.1)
    cache = world.cache()
    with DiskStore(world.folder / "cache").making(cache._key):
        world.check()
    assert world.exports == 1
