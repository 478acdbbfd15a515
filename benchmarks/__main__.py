"""``python -m benchmarks COMMAND``: runs one of the benchmarks."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Mapping
from types import MappingProxyType

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "compare HAPI with other loaders: all experiments, one record",
        "report": "render a record as HTML, or as docs/results.rst",
        "worker": "worker throughput over that of the tightest loop",
        "filter": "cost of the filter for a request that is not annotated",
        "places": "object servers that compute, next to the proxy's worker",
        "simulation": "1 to 1,000 storage nodes, with measured costs",
        "cluster": "policies that give the GPUs of a cluster to training jobs",
        "memory": "predicted over measured memory of forward passes",
        "nodes": "cost of virtual nodes: seconds, bytes, activations",
        "partial": "partial backward passes: seconds, accuracy",
        "device_queue": "jobs that share two cores by device queues",
        "extraction": "two workers of Ray over one process",
        "checkpoints": "checkpoints over dd, torch.save, swiftclient",
        "fairness": "shares of accounts that use one worker",
        "attacks": "a neighbour's waiting times next to dear images",
        "census": "models that can be split, packaged and cut",
    }
)


def main() -> None:
    listed = "\n".join(f"  {name:12} {COMMANDS[name]}" for name in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{__doc__}\n\ncommands:\n{listed}\n\n"
        "`python -m benchmarks COMMAND --help` lists the options of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    options = parser.parse_args()
    sys.argv = [options.command, *options.arguments]
    # alter_sys: processes that census spawns import its functions from there.
    runpy.run_module(
        f"benchmarks.{options.command}", run_name="__main__", alter_sys=True
    )


if __name__ == "__main__":
    main()
