"""Package discovery: each top-level folder holds importable packages.

Everything else about the distribution stands in ``setup.cfg``.
"""

from setuptools import find_packages, setup

FOLDERS = ("protocol", "splitter", "swift_middleware", "client", "deploy")

package_dir: dict[str, str] = {}
packages: list[str] = []
for folder in FOLDERS:
    for package in find_packages(folder):
        packages.append(package)
        top_level = package.partition(".")[0]
        package_dir[top_level] = f"{folder}/{top_level}"

setup(packages=packages, package_dir=package_dir)
