"""``hapi info``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from hapi_client.cli.context import (
    JsonPath,
    connect,
    print_facts,
    print_table,
    shape_text,
    write_json,
)
from hapi_client.data.dataset_summary import DataSetSummary, summarize_data_set
from hapi_client.model.package_store import read_metadata
from hapi_client.swift.account import ObjectInfo
from hapi_client.swift.capabilities import hapi_rows, swift_rows
from hapi_client.swift.connection import Connection
from hapi_client.swift.swift_url import Location, parse_location
from hapi_protocol.errors import ClientError
from hapi_splitter.package.metadata import PackageMetadata
from hapi_splitter.units import bytes_text, count_text

PACKAGE_SUFFIX = ".hapi"
MAX_CLASSES = 20


def info_command(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="[CONTAINER[/PREFIX]|CONTAINER/PACKAGE.hapi]",
            help="Data set with an index, or model package. The swift:// "
            "prefix is optional. Default: your account and the Swift "
            "cluster.",
        ),
    ] = "",
    json_path: JsonPath = None,
) -> None:
    """Describe the Swift cluster, a data set or a model package.

    The cluster is described by /info of its proxy ('hapi doctor' checks if
    the worker runs), a data set by its index and a few samples, a package by
    its head, which is not verified.

    Examples:

        hapi info

        hapi info swift://photos/train

        hapi info hapi-models/01f1c2.hapi --json -

    Keys of --json: account (name, containers, objects, bytes, quota_bytes)
    and info (all of /info); or data_set (location, index, index_version,
    stored, shards, samples, spans, shard_bytes, sample_bytes,
    mean_sample_bytes, classes, unlabelled, kinds, looked_at); or package
    (name, bytes, sample, transform, producer, values, weight_bytes, cuts:
    cut, module, shape, bytes).
    """
    with connect(context) as connection:
        if not target:
            facts = _describe_cluster(connection)
        elif target.endswith(PACKAGE_SUFFIX):
            facts = _describe_package(connection, parse_location(target))
        else:
            facts = _describe_data_set(connection, parse_location(target))
    write_json(json_path, facts)


def _print_rows(title: str, rows: Iterable[tuple[str, str]]) -> None:
    print_table((title, ""), rows, right=False)


# -- the cluster ---------------------------------------------------------


def _describe_cluster(connection: Connection) -> dict[str, Any]:
    info = connection.info()
    account = _account_facts(connection)
    _print_rows("account", _account_rows(account))
    _print_rows("cluster", swift_rows(info))
    section = info.get("hapi")
    if isinstance(section, dict):
        _print_rows("hapi filter", hapi_rows(section))
    else:
        typer.echo(
            "The proxy has no hapi filter (no section in /info): jobs read "
            "samples raw."
        )
    return {"account": account, "info": info}


def _account_facts(connection: Connection) -> dict[str, Any]:
    headers = connection.head_account()
    numbers = {
        "containers": headers.get("X-Account-Container-Count"),
        "objects": headers.get("X-Account-Object-Count"),
        "bytes": headers.get("X-Account-Bytes-Used"),
        "quota_bytes": headers.get("X-Account-Meta-Quota-Bytes"),
    }
    return {
        "name": connection.account,
        **{k: v if v is None else int(v) for k, v in numbers.items()},
    }


def _account_rows(account: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "name", account["name"]
    for name in ("containers", "objects"):
        yield name, "?" if account[name] is None else f"{account[name]:,}"
    used, quota = account["bytes"], account["quota_bytes"]
    text = "?" if used is None else bytes_text(used)
    yield "bytes", text if quota is None else f"{text} of {bytes_text(quota)}"


# -- a data set ----------------------------------------------------------


def _describe_data_set(
    connection: Connection, location: Location
) -> dict[str, Any]:
    summary = summarize_data_set(connection, location)
    _print_rows("data set", _data_rows(summary))
    if summary.classes:
        print_table(("class", "samples"), _class_rows(summary.classes))
    facts = asdict(summary) | {
        "location": str(location),
        "mean_sample_bytes": summary.mean_sample_bytes,
    }
    return {"data_set": facts}


def _data_rows(summary: DataSetSummary) -> Iterator[tuple[str, str]]:
    yield "location", str(summary.location)
    stored = summary.stored.partition(".")[0]
    yield (
        "index",
        f"{summary.index}, version {summary.index_version}"
        + (f", of {stored} UTC" if stored else ""),
    )
    total = summary.shard_bytes
    size = "which you may not list" if total is None else bytes_text(total)
    yield "shards", f"{summary.shards:,}, {size}"
    mean = bytes_text(summary.mean_sample_bytes)
    yield "samples", f"{summary.samples:,}, {mean} each on average"
    yield "spans", f"{summary.spans:,}"
    yield "classes", f"{len(summary.classes):,}"
    if summary.unlabelled:
        yield "without a label", count_text(summary.unlabelled, "sample")
    kinds = ", ".join(
        f"{kind} ({count})" for kind, count in summary.kinds.items()
    )
    yield "members", f"{kinds} of {count_text(summary.looked_at, 'sample')}"


def _class_rows(classes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name, count in itertools.islice(classes.items(), MAX_CLASSES):
        yield name, f"{count:,}"
    if len(classes) > MAX_CLASSES:
        yield f"({len(classes) - MAX_CLASSES} more: see --json)", ""


# -- a package -----------------------------------------------------------


def _describe_package(
    connection: Connection, location: Location
) -> dict[str, Any]:
    info = connection.head(location.container, location.prefix)
    if info is None:
        raise ClientError(
            "bad_configuration",
            f"there is no object {location}; 'hapi models ls' lists packages",
            object_name=f"{location.container}/{location.prefix}",
        )
    metadata = read_metadata(connection, location.container, info)
    _print_rows("package", _package_rows(info, metadata))
    cuts = [
        {
            "cut": cut.index,
            "module": cut.module,
            "shape": list(cut.shape),
            "bytes": cut.sample_bytes,
        }
        for cut in metadata.cuts
    ]
    same = {key: key for key in ("cut", "module", "shape")}
    print_facts(cuts, {**same, "bytes per sample": "bytes"})
    facts = {
        "name": info.name,
        "bytes": info.length_bytes,
        "sample": list(metadata.sample_shape),
        "transform": metadata.transform,
        "producer": metadata.producer,
        "values": metadata.num_values,
        "weight_bytes": metadata.weight_bytes,
        "cuts": cuts,
    }
    return {"package": facts}


def _package_rows(
    info: ObjectInfo, metadata: PackageMetadata
) -> Iterator[tuple[str, str]]:
    yield "object", info.name
    yield "bytes", bytes_text(info.length_bytes)
    yield "written by", _named_values(metadata.producer)
    yield "sample", shape_text(metadata.sample_shape)
    yield "transform", _named_values(metadata.transform or {}) or "none"
    yield (
        "weights",
        f"{metadata.num_values:,} values, {bytes_text(metadata.weight_bytes)}",
    )
    yield "cuts", str(len(metadata.cuts))
    yield "ends with", metadata.cuts[-1].module


def _named_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
