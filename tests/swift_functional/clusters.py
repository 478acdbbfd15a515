"""Two clusters of one layout, with and without the filter."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from hapi_cluster import Cluster
from swift_functional import NotRunError
from swift_functional.comparison import SIDES, WITH, Comparison, compare
from swift_functional.layouts import cluster_settings, config_of_tests
from swift_functional.runs import run_side_by_side

INFO_SECONDS = 20.0


def compare_layout(
    layout: str,
    source: Path,
    logs: Path,
    suites: Mapping[str, Sequence[str]],
    options: Sequence[str],
) -> list[Comparison]:
    """Runs suites against two clusters, of which only logs are left.

    Args:
        layout: a name in LAYOUTS.
        source: folder with Swift's ``test/``.
        logs: folder for the logs of pytest and the servers.
        suites: files and folders of each suite.
        options: additional options of pytest.

    Raises:
        NotRunError: a side has no result.
    """
    places = {side: logs / layout / side for side in SIDES}
    found = []
    with ExitStack() as stack:
        for side, place in places.items():
            _start(layout, side == WITH, place, stack)
        run = partial(run_side_by_side, source, places)
        for suite, tests in suites.items():
            results = run(suite, [*options, *tests])
            again = partial(run, f"{suite}-again")
            found.append(compare(layout, suite, results, again))
    return found


def _start(
    layout: str, has_filter: bool, place: Path, stack: ExitStack
) -> None:
    place.mkdir(parents=True, exist_ok=True)
    key: Path | None = None
    if has_filter:
        key = place / "backend.key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_urlsafe(48))
    settings = cluster_settings(layout, key)
    cluster = stack.enter_context(Cluster.temporary(**settings))
    stack.callback(
        shutil.copytree,
        cluster.log("swift").parent,
        place / "servers",
        dirs_exist_ok=True,
    )
    (place / "test.conf").write_text(config_of_tests(layout, cluster.auth_url))
    with urlopen(f"{cluster.proxy_url}/info", timeout=INFO_SECONDS) as answer:
        if ("hapi" in json.load(answer)) != has_filter:
            raise NotRunError(f"/info of {place.name} the filter is wrong")
