"""Two clusters of one layout, with and without the filter."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

from hapi_cluster import Cluster
from swift_functional.comparison import (
    SIDES,
    WITH,
    Comparison,
    compare,
)
from swift_functional.errors import NotRunError
from swift_functional.layouts import cluster_settings, config_of_tests
from swift_functional.progress import Progress
from swift_functional.runs import Result, Task, run_side_by_side

INFO_SECONDS = 20.0


class Clusters:
    """Two clusters that run within a ``with`` block and leave only logs.

    Args:
        layout: a name in LAYOUTS.
        source: folder with Swift's ``test/``.
        logs: folder for the logs of pytest and the servers.
    """

    def __init__(self, layout: str, source: Path, logs: Path) -> None:
        self._layout = layout
        self._source = source
        self._logs = logs / layout
        self._stack = ExitStack()

    def __enter__(self) -> Clusters:
        with ExitStack() as stack:
            for side in SIDES:
                self._start(side, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, side: str, stack: ExitStack) -> None:
        settings = cluster_settings(self._layout, hapi_filter=side == WITH)
        cluster = stack.enter_context(Cluster.temporary(**settings))
        folder = self._logs / side
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(
            shutil.copytree,
            cluster.log("swift").parent,
            folder / "servers",
            dirs_exist_ok=True,
        )
        (folder / "test.conf").write_text(
            config_of_tests(self._layout, cluster.auth_url)
        )
        has_filter = "hapi" in _info(cluster)
        if has_filter != (side == WITH):
            raise NotRunError(
                f"the cluster that should run {side} the filter"
                f" {'has' if has_filter else 'lacks'} hapi in its /info"
            )

    def compare(
        self, suite: str, tests: Sequence[str], options: Sequence[str]
    ) -> Comparison:
        """Runs tests on both sides; tests that differ run again, alone.

        Raises:
            NotRunError: a side has no result.
        """
        return compare(
            self._layout,
            suite,
            self._run(suite, tests, options),
            lambda differing: self._run(f"{suite} again", differing, ()),
        )

    def _run(
        self, what: str, tests: Sequence[str], options: Sequence[str]
    ) -> dict[str, Result]:
        places = {}
        for side in SIDES:
            folder = self._logs / side / what.replace(" ", "-")
            folder.mkdir(exist_ok=True)
            places[side] = (self._logs / side / "test.conf", folder)
        progress = Progress(f"{self._layout}, {what}", sys.stderr)
        try:
            return run_side_by_side(
                Task(self._source, tests, options), places, progress.show
            )
        finally:
            progress.done()


def _info(cluster: Cluster) -> dict[str, object]:
    url = f"{cluster.proxy_url}/info"
    with urlopen(url, timeout=INFO_SECONDS) as answer:
        return dict(json.load(answer))
