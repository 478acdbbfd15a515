#!/usr/bin/python
# Apache-2.0
"""Ansible module that puts a filter into a paste.deploy file, or out of it.

Everything else in the file, comments too, stays byte for byte; taking the
filter out undoes putting it in.  A new file replaces the old one only if the
``test`` command accepts it.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_OPTION = r"(?:[^\r\n#;\[][^\n]*|[ \t]+[#;][^\n]*)(?=\n|\Z)"
"""A line of a section that is neither empty, a comment nor a header."""


class ConfigFileError(Exception):
    """The file is not one that can be edited; the message has the remedy."""


def _section(text: str, name: str) -> re.Match[str] | None:
    """A section from its header to its last option; ``body`` is the rest."""
    pattern = (
        rf"^\[{re.escape(name)}\][^\n]*"
        rf"(?P<body>(?:\n(?!\[)[^\n]*)*\n{_OPTION}|)"
    )
    found = list(re.finditer(pattern, text, re.M))
    if len(found) > 1:
        raise ConfigFileError(
            f"has [{name}] {len(found)} times; merge them into one"
        )
    return found[0] if found else None


def edited(
    text: str,
    name: str,
    left_of: str,
    options: Mapping[str, object],
    present: bool,
) -> str:
    """Returns the text with or without the filter.

    A filter that the pipeline names already stays where it is; its section is
    replaced if its options differ.

    Raises:
        ConfigFileError: there is no pipeline, or none with ``left_of``.
    """
    pipeline = _section(text, "pipeline:main")
    value = pipeline and re.search(
        r"^pipeline[ \t]*[=:][^\n]*(?:\n(?:[ \t]+[^\n]*|[#;][^\n]*))*",
        pipeline[0],
        re.M,
    )
    if pipeline is None or value is None:
        raise ConfigFileError(
            "has no pipeline in [pipeline:main]; name the file that has it"
        )
    lines = value[0].split("\n")
    own, other = (
        re.compile(rf"(?<![^\s=:]){re.escape(word)}(?!\S)")
        for word in (name, left_of)
    )
    used = [i for i, x in enumerate(lines) if not re.match(r"\s*[#;]", x)]
    named = [i for i in used if own.search(lines[i])]
    if not present:
        for i in named:
            lines[i] = re.sub(own.pattern + "[ \t]*", "", lines[i])
    elif not named:
        places = [i for i in used if other.search(lines[i])]
        if not places:
            raise ConfigFileError(
                f"has a pipeline without {left_of}: {' '.join(lines)}; name "
                f"{left_of} where {name} shall be left of it"
            )
        i = places[0]
        lines[i] = other.sub(rf"{name} \g<0>", lines[i], count=1)
    start, end = (pipeline.start() + place for place in value.span())
    kept = [x for i, x in enumerate(lines) if x.strip() or i not in named]
    text = text[:start] + "\n".join(kept) + text[end:]

    section = _section(text, f"filter:{name}")
    if not present:
        if section is None:
            return text
        before = re.sub(r"\n\n\Z", "\n", text[: section.start()])
        return before.removesuffix("\n") + text[section.end() :]
    wanted = "\n".join(
        [f"[filter:{name}]", *(f"{k} = {v}" for k, v in options.items())]
    )
    if section is None:
        pipeline = _section(text, "pipeline:main")
        assert pipeline is not None
        end = pipeline.end()
        return f"{text[:end]}\n\n{wanted}{text[end:]}"
    there = [x for x in section["body"].split("\n") if re.match(_OPTION, x)]
    pairs = dict(re.split(r"\s*[=:]\s*", x.strip(), maxsplit=1) for x in there)
    if pairs == {k: str(v) for k, v in options.items()}:
        return text
    return text[: section.start()] + wanted + text[section.end() :]


def replace(path: Path, text: str, test: list[str]) -> str:
    """Replaces the file unless the test fails; returns what that printed."""
    # A name that swift-init does not take for one more server's file.
    new = path.with_name(f".{path.name}.hapi-new")
    status = path.stat()
    try:
        new.touch(0o600)  # files of proxies have passwords
        new.write_bytes(text.encode())
        shutil.copymode(path, new)
        os.chown(new, status.st_uid, status.st_gid)
        if test:
            command = [word.replace("%s", str(new)) for word in test]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                output = (done.stderr or done.stdout).strip()
                return f"{shlex.join(command)}: {output.splitlines()[-1]}"
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return ""


def main() -> None:
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "left_of": {"type": "str", "required": True},
            "options": {"type": "dict", "default": {}},
            "state": {"choices": ["present", "absent"], "default": "present"},
            "test": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    path = Path(given["path"]).resolve()  # links stay
    present = given["state"] == "present"
    if not path.exists() and not present:
        module.exit_json(changed=False)
    try:
        text = path.read_bytes().decode()
        new = edited(
            text, given["name"], given["left_of"], given["options"], present
        )
    except OSError as error:
        module.fail_json(msg=f"{error}; name the server's own file")
    except UnicodeDecodeError as error:
        module.fail_json(
            msg=f"{path} is no text: {error}; convert it to UTF-8"
        )
    except ConfigFileError as error:
        module.fail_json(msg=f"{path} {error}")
    problem = ""
    if new != text and not module.check_mode:
        problem = replace(path, new, given["test"])
    if problem:
        module.fail_json(
            msg=f"{path} stays as it was; Swift refuses the change: {problem}"
        )
    module.exit_json(
        changed=new != text,
        # Other lines have passwords, and results are logged.
        diff={
            "prepared": "".join(
                difflib.unified_diff(
                    text.splitlines(keepends=True),
                    new.splitlines(keepends=True),
                    str(path),
                    n=0,
                )
            )
        },
    )


if __name__ == "__main__":
    main()
