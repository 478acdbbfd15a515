"""Makes this checkout a distribution of the Python that runs this.

    python benchmarks/checkout_path.py [FOLDER ...]

Writes its name, version and entry points into the site-packages, as an
installation does, and builds nothing: setuptools need not be there.  The
packages themselves come from PYTHONPATH.  What is in the folders, the
site-packages of another Python, is seen as well.
"""

from __future__ import annotations

import configparser
import site
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_metadata(folder: Path) -> Path:
    """Of the checkout, into a folder of ``sys.path``; where it is then."""
    config = configparser.ConfigParser(delimiters=("=",))
    config.read(ROOT / "setup.cfg")
    name, version = config["metadata"]["name"], config["metadata"]["version"]
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(exist_ok=True)
    (made / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    points = [
        f"[{group}]\n{lines.strip()}\n"
        for group, lines in config["options.entry_points"].items()
    ]
    (made / "entry_points.txt").write_text("\n".join(points))
    return made


def see(folder: Path, others: Sequence[str]) -> None:
    """Has what is in other folders be seen behind what is in this one."""
    (folder / "beside.pth").write_text("".join(f"{x}\n" for x in others))


if __name__ == "__main__":
    place = Path(site.getsitepackages()[0])
    print(write_metadata(place))
    see(place, sys.argv[1:])
