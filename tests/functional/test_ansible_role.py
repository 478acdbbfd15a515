"""The Ansible role installs, changes, upgrades, rolls back and removes.

It runs against this machine in a mount namespace of its own, with other
folders at /etc, /opt and /run: without systemd there.
"""

import configparser
import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import venv
import zipfile

import pytest
import yaml

from documentation import ROOT

ROLE = ROOT / "deploy" / "ansible" / "roles" / "hapi"
MODULE = runpy.run_path(str(ROLE / "library" / "hapi_pipeline.py"))
KEY = "c2VjcmV0IG9mIHRoZSBjbHVzdGVyLCBvZiA0OCBieXRlcw=="

PROXY = """\
# pipeline = old copy proxy-server
[app:proxy-server]
use = egg:swift#proxy

[pipeline:main]
# copy stays where it is
pipeline: catch_errors cache tempauth
   # hapi copy
   copy dlo
   versioned_writes  proxy-server

# Users:
[filter:tempauth]
use = egg:swift#tempauth
user_a_b = c .admin
"""
PROXY += "".join(
    f"[filter:{name}]\nuse = egg:swift#{name}\n"
    for name in ("catch_errors", "copy", "dlo", "versioned_writes")
)
PROXY += "[filter:cache]\nuse = egg:swift#memcache"  # no newline at the end
OBJECT = """\
[pipeline:main]
pipeline = object-server

[app:object-server]
use = egg:swift#object
"""


# --- the files of Swift's servers ---


def edited(text, present=True, **options):
    return MODULE["edited"](text, "hapi", "copy", options, present)


def parsed(text):
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    return parser


def test_filter_is_left_of_copy_and_all_else_stays():
    text = edited(PROXY, use="egg:swift-hapi#hapi", cache=True)
    parser = parsed(text)
    names = parser["pipeline:main"]["pipeline"].split()
    assert names[:5] == ["catch_errors", "cache", "tempauth", "hapi", "copy"]
    assert dict(parser["filter:hapi"]) == {
        "use": "egg:swift-hapi#hapi",
        "cache": "True",
    }
    assert edited(text, use="egg:swift-hapi#hapi", cache=True) == text
    assert edited(text, False) == PROXY
    changed = edited(text, use="egg:swift-hapi#hapi")
    assert "cache" not in parsed(changed)["filter:hapi"]
    assert edited(changed, False) == PROXY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Somebody has put it there, and Swift's test judges the place.
        ("a hapi b copy c", "a hapi b copy c"),
        ("copy c", "hapi copy c"),
        ("a\n  copy\n  c", "a\n  hapi copy\n  c"),
        ("hapi-like copy", "hapi-like hapi copy"),
    ],
)
def test_place_in_unusual_pipelines(before, after):
    head = "[pipeline:main]\npipeline = "
    text = edited(f"{head}{before}\n", use="x")
    assert text == f"{head}{after}\n\n[filter:hapi]\nuse = x\n"
    removed = edited(text, False)
    assert removed == f"{head}{before}\n".replace(" hapi ", " ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[DEFAULT]\n", r"no pipeline in \[pipeline:main\]; name the file"),
        ("[pipeline:main]\n# pipeline = copy\n", "no pipeline"),
        ("[pipeline:main]\npipeline = a b\n", "without copy: .* a b; name"),
        (
            "[filter:hapi]\n[pipeline:main]\npipeline = copy\n[filter:hapi]\n",
            r"has \[filter:hapi\] 2 times; merge",
        ),
    ],
)
def test_files_that_cannot_be_edited_are_refused(text, message):
    with pytest.raises(MODULE["ConfigFileError"], match=message):
        edited(text, use="x")


# --- the module ---


def run_module(path, state="present"):
    given = {"path": str(path), "name": "hapi", "left_of": "copy"}
    arguments = {**given, "state": state, "options": {"use": "x"}}
    done = subprocess.run(
        [sys.executable, str(ROLE / "library" / "hapi_pipeline.py")],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def test_line_ends_and_links_stay(tmp_path):
    file, link = tmp_path / "own.conf", tmp_path / "proxy-server.conf"
    before = PROXY.replace("\n", "\r\n").encode() + b"\r\n\r\n# end\n"
    file.write_bytes(before)
    file.chmod(0o640)
    link.symlink_to(file)
    assert run_module(link)["changed"]
    after = file.read_bytes()
    assert b"   hapi copy dlo\r\n" in after
    # Without what was put in, it is the same.
    inserted = b"\n\n[filter:hapi]\nuse = x"
    assert (
        after.replace(b"hapi copy dlo", b"copy dlo").replace(inserted, b"")
        == before
    )
    assert not run_module(link)["changed"]
    assert run_module(link, "absent")["changed"]
    assert file.read_bytes() == before
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640


def test_result_has_changed_lines_only(tmp_path):
    file = tmp_path / "proxy-server.conf"
    file.write_text(PROXY)
    result = json.dumps(run_module(file)["diff"])
    assert "+   hapi copy dlo" in result
    assert "use = x" in result
    assert "admin" not in result  # a line of a user and his password


def test_file_of_another_encoding_is_named(tmp_path):
    file = tmp_path / "proxy-server.conf"
    file.write_bytes("# né\n".encode("latin-1") + PROXY.encode())
    message = run_module(file)["msg"]
    assert re.search(f"{file} .*utf-8.* 0xe9.*; convert it", message)


# --- the role ---


def wheel(folder, version):
    """This checkout's packages as a wheel of some version."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    info = f"swift_hapi-{version}.dist-info"
    path = folder / f"swift_hapi-{version}-py3-none-any.whl"
    entries = setup["options.entry_points"]
    texts = {
        "METADATA": "Metadata-Version: 2.1\nName: swift-hapi\n"
        f"Version: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "".join(
            f"[{name}]\n{value.strip()}\n" for name, value in entries.items()
        ),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for part in ("protocol", "splitter", "swift_middleware", "client"):
            for source in (ROOT / part).rglob("*.py"):
                archive.write(source, source.relative_to(ROOT / part))
        for name, text in texts.items():
            archive.writestr(f"{info}/{name}", text)
        names = [*archive.namelist(), f"{info}/RECORD"]
        archive.writestr(f"{info}/RECORD", "".join(f"{n},,\n" for n in names))
    return path


class Host:
    """This machine with other folders, of which Ansible changes only these."""

    def __init__(self, folder, cluster):
        self.folder = folder
        self.swift = folder / "etc" / "swift"
        subprocess.run(["cp", "-a", "/etc", str(folder / "etc")], check=True)
        shutil.rmtree(self.swift, ignore_errors=True)
        shutil.copytree(cluster.directory / "etc", self.swift)
        (self.swift / "proxy-server.conf").write_text(PROXY)
        (self.swift / "object-server.conf").write_text(OBJECT)
        (self.swift / "hapi-backend.key").unlink()
        for name in ("opt", "run", "packages"):
            (folder / name).mkdir()
        # The packages that are installed here, but for our own.
        for path in site.getsitepackages():
            for entry in os.scandir(path):
                if "swift_hapi" not in entry.name:
                    link = folder / "packages" / entry.name
                    link.symlink_to(entry.path)
        python = self.environment(folder / "swift")
        maker = folder / "python3"
        maker.write_text(
            # For "python3 -m venv FOLDER", whose pip takes seconds.
            f'#!/bin/sh\nexec cp -a {python.parents[1]}/. "$3"\n'
        )
        maker.chmod(0o755)
        pip = ["--no-deps", "--no-index", "--no-compile"]
        variables = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "hapi_package": str(wheel(folder, "1.0")),
            "hapi_swift_python": str(python),
            "hapi_swift_user": "root",
            "hapi_swift_group": "root",
            "hapi_proxy_url": cluster.proxy_url,
            "hapi_proxy_options": {"places": "object, proxy"},
            "hapi_proxy_reload": f"touch {folder}/proxy-reloaded",
            "hapi_object_reload": f"touch {folder}/object-reloaded",
            "hapi_backend_keys": [KEY],
            "hapi_worker_options": {"device": "cpu"},
            "hapi_metrics": True,
            "hapi_worker_python": str(maker),
            "hapi_worker_pip_args": pip,
        }
        hosts = {"hosts": {"here": None}}
        children = {"hapi_proxies": hosts, "hapi_object_servers": hosts}
        inventory = {"all": {"vars": variables, "children": children}}
        (folder / "inventory.yml").write_text(yaml.safe_dump(inventory))

    def environment(self, folder):
        """Python of a new virtual environment that sees the packages."""
        venv.create(folder, with_pip=True)
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "here.pth").write_text(f"{self.folder}/packages\n")
        return folder / "bin" / "python"

    def play(self, *options, **variables):
        """Runs the playbook; returns its status, output and changes."""
        folder = self.folder
        words = [
            *(shutil.which("ansible-playbook", path=PATH), "--diff", "-i"),
            str(folder / "inventory.yml"),
            str(ROOT / "deploy" / "ansible" / "hapi.yml"),
            *options,
            *("-e", yaml.safe_dump(variables, default_flow_style=True)),
        ]
        binds = [
            f"mount --bind {folder}/{x} /{x}" for x in ("etc", "opt", "run")
        ]
        script = " && ".join([*binds, 'exec "$@"'])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", *words],
            capture_output=True,
            text=True,
            timeout=900,
            env={
                "PATH": PATH,
                "HOME": str(folder),
                "ANSIBLE_LOCALHOST_WARNING": "0",
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_PIPELINING": "1",
            },
        )
        output = done.stdout + done.stderr
        assert KEY not in output
        changed = re.search(r"changed=(\d+)", output)
        return done.returncode, output, changed and int(changed[1])

    def release(self):
        return os.readlink(self.folder / "opt" / "hapi").split("/")[-1][:3]

    def files(self):
        """Text of all files that the role may touch."""
        return {
            str(path): path.read_bytes()
            for top in ("etc", "opt", "run", "swift")
            for path in (self.folder / top).rglob("*")
            if path.is_file()
            and path.suffix != ".pyc"
            # Copies and counters of useradd and userdel.
            and path.name[-1] != "-"
        }


PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def host(cluster, tmp_path_factory):
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("needs root, and a mount namespace")
    return Host(tmp_path_factory.mktemp("host"), cluster)


def test_role_installs_upgrades_goes_back_and_removes(host):
    before = host.files()
    status, output, _ = host.play("--check")
    assert status == 0, output
    assert host.files() == before

    status, output, changed = host.play("-vvv")  # and no key is printed
    assert status == 0, output
    assert changed
    assert (host.folder / "proxy-reloaded").exists()
    assert (host.folder / "object-reloaded").exists()
    assert (host.swift / "hapi-backend.key").stat().st_mode & 0o777 == 0o600
    units = host.folder / "etc" / "systemd" / "system"
    of_metrics = units / "hapi-metrics.service.d" / "local.conf"
    assert of_metrics.read_text() == "[Service]\nUser=root\n"
    installed = host.files()
    assert host.play()[::2] == (0, 0)

    # Swift refuses an option, and the upgrade stops half way.
    bad = {"places": "object, proxy", "worker_timeout": "soon"}
    newer = str(wheel(host.folder, "2.0"))
    status, output, _ = host.play(hapi_package=newer, hapi_proxy_options=bad)
    assert status
    assert "proxy-server.conf stays as it was" in output
    assert "worker_timeout = soon: it must be" in output
    # The next run changes nothing, but reloads what the last one did not.
    (host.folder / "proxy-reloaded").unlink()
    assert host.play(hapi_package=newer)[0] == 0
    assert host.release() == "2.0"
    assert (host.folder / "proxy-reloaded").exists()

    assert host.play(hapi_state="rollback")[0] == 0
    assert host.release() == "1.0"
    now = host.files()
    assert {n: now[n] for n in installed} == installed

    assert host.play(hapi_state="absent")[0] == 0
    after = host.files()
    assert {n for n in {*before, *after} if before.get(n) != after.get(n)} == (
        set()
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"hapi_package": "none.whl"}, '"none.whl", which is no file here'),
        ({"hapi_state": "rollback"}, "here has no earlier release"),
        ({"hapi_backend_keys": ["short"]}, "less than 32 characters"),
        (
            {"hapi_swift_user": "nobody-here"},
            "nobody-here.*set hapi_swift_pyt",
        ),
    ],
)
def test_wrong_variables_are_named_before_anything_changes(
    host, variables, message
):
    before = host.files()
    status, output, _ = host.play(**variables)
    assert status
    assert re.search(message, output), output
    assert host.files() == before
