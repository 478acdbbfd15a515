"""Only what carries the mark of a cache is ever written to or deleted."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fuzzing import CASES
from hapi_client.caching.directory import CacheDirectory
from hapi_client.caching.row_map import RowFormat
from hapi_splitter.freezing.split_store import DiskStore
from hapi_splitter.private_folder import MARK, PrivateFolder


def home(folder):
    """A folder of a user with things in it, some with names like ours."""
    for name in ("thesis", "photos", "0" * 32, "samples-1", "splits"):
        (folder / name).mkdir(parents=True)
        (folder / name / "facts.json").write_text("mine")
        (folder / name / "use").touch()
    for name in ("old.lock", "old.part", f"{'0' * 64}.split", "use"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    return folder


def content(folder):
    """All files with their bytes, but for folders that carry the mark."""
    return {
        str(path.relative_to(folder)): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
        if not any(map(is_marked, (path, *path.parents)))
    }


def is_marked(folder):
    mark = folder / MARK
    is_file = mark.is_file() and not folder.is_symlink()
    return is_file and mark.read_text().startswith("Signature: 8a4")


def use_samples(parent):
    cache = CacheDirectory(parent, 12000)
    for number in range(3):
        form = RowFormat({"number": number}, np.array([0, 2000]))
        rows = cache.open(form)
        if rows is not None:
            rows.close()
    cache.purge()


def use_splits(parent):
    store = DiskStore(parent, 1)
    for number in range(3):
        with store.making(f"{number}" * 64):
            store.write(f"{number}" * 64, [b"a" * 10000])
    store.purge()


USES = {"samples-3": use_samples, "splits-3": use_splits}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("how", ["next to it", "link", "inside"])
def test_other_things_of_a_user_stay(tmp_path, name, how):
    parent, use = home(tmp_path / "home"), USES[name]
    if how == "link":
        parent = tmp_path / "cache"
        parent.mkdir()
        (parent / name).symlink_to(tmp_path / "home")
    if how == "inside":
        home(parent / name)
    before = content(tmp_path)
    if how == "next to it":
        use(parent)
    else:
        problem = "is a link" if how == "link" else "was not made by HAPI"
        with pytest.raises(OSError, match=problem):
            use(parent)
    assert content(tmp_path) == before


def test_random_content_stays(tmp_path):
    """Names and kinds of files that resemble those of a cache."""
    for seed in range(CASES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        use_random_content(folder, seed)
        shutil.rmtree(folder)


def use_random_content(tmp_path, seed):
    draw = random.Random(seed)
    names = ["facts.json", "use", "lock", f"{'0' * 32}.rows", "a.part", MARK]
    names += ["f" * 32, "0" * 32, f"{'0' * 64}.lock", "x.split", ".hapi-x"]
    places = [tmp_path, *(tmp_path / name for name in USES)]
    for _ in range(20):
        path = draw.choice(places) / draw.choice(names)
        if os.path.lexists(path) or not path.parent.is_dir():
            continue
        kind = draw.choice(["folder", "file", "link", "folder"])
        if kind == "folder":
            path.mkdir()
            places.append(path)
        elif kind == "file":
            path.write_text(draw.choice(["", "mine", "Signature: 0"]))
        else:
            path.symlink_to(draw.choice(places))
    outside = tmp_path / "outside"
    home(outside)
    for name in USES:
        if draw.random() < 0.5 and not os.path.lexists(tmp_path / name):
            (tmp_path / name).symlink_to(outside)
    before = content(tmp_path)
    for use in USES.values():
        with contextlib.suppress(PermissionError, FileExistsError):
            use(tmp_path)
    after = content(tmp_path)
    assert {path: after.get(path) for path in before} == before, seed


@pytest.mark.parametrize(
    ("mode", "is_used"), [(0o700, True), (0o755, True), (0o777, False)]
)
def test_parent_that_others_may_write_to_is_refused(tmp_path, mode, is_used):
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(mode)
    folder = PrivateFolder(parent, "samples", 2, ".rows")
    if is_used:
        folder.make()
        return
    with pytest.raises(PermissionError, match=r"may write to .*/shared; give"):
        folder.make()
    parent.chmod(mode | 0o1000)  # sticky: others cannot replace it
    folder.make()
    with folder.opened():
        pass


def test_processes_that_make_it_at_once_get_the_same(tmp_path):
    code = (
        "import sys; from hapi_splitter.private_folder import PrivateFolder\n"
        "PrivateFolder(sys.argv[1], 'samples', 2, '.rows').make()"
    )
    makers = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path / "new"])
        for _ in range(4)
    ]
    assert [each.wait() for each in makers] == [0] * 4
    assert [each.name for each in (tmp_path / "new").iterdir()] == [
        "samples-2"
    ]


@pytest.fixture
def open_folder():
    """Unlike pytest's, a folder that other users may look into."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_mark_that_is_a_pipe_is_none(tmp_path):
    folder = tmp_path / "samples-2"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / MARK)
    with pytest.raises(FileExistsError, match="was not made by HAPI"):
        PrivateFolder(tmp_path, "samples", 2, ".rows").make()


@pytest.mark.skipif(os.geteuid() != 0, reason="changes users: root only")
def test_two_users_share_a_sticky_parent(open_folder):
    """Each has a folder of their own only; a name taken is an error."""
    tmp_path = open_folder
    parent = tmp_path / "both"
    parent.mkdir()
    parent.chmod(0o1777)
    victim = home(tmp_path / "victim")
    os.chown(victim, 1001, 1001)
    code = (
        "import os, sys\n"
        "sys.path[:] = sys.argv[3:]\n"
        "from hapi_splitter.private_folder import PrivateFolder\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2]))\n"
        "os.setuid(int(sys.argv[2]))\n"
        "try:\n"
        "    PrivateFolder(sys.argv[1], 'samples', 2, '.rows').make()\n"
        "except OSError as error:\n"
        "    sys.exit(error.strerror)\n"
    )

    def made_by(user):
        return subprocess.run(
            [sys.executable, "-c", code, parent, str(user), *sys.path],
            capture_output=True,
            text=True,
            check=False,
        ).stderr

    link = parent / "samples-2"
    link.symlink_to(victim)
    os.lchown(link, 1002, 1002)
    assert "is a link" in made_by(1001)
    link.unlink()
    assert made_by(1002) == ""
    assert "belongs to user 1002" in made_by(1001)
    assert made_by(1002) == ""
    parent.chmod(0o777)
    assert "may write to" in made_by(1002)
