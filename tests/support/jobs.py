"""Transfer jobs made of flat options, for tests."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hapi_client import (
    JobConfig,
    PlanConfig,
    ReadConfig,
    SwiftConfig,
    TransferJob,
)

CONFIGS = {"plan": PlanConfig, "read": ReadConfig, "swift": SwiftConfig}


def transfer_job(model: Any, **options: Any) -> TransferJob:
    """Makes a job; each option goes to the config that has a field for it.

    Args:
        options: arguments of :class:`TransferJob`, and fields of its configs;
            a whole config, ``read=ReadConfig(…)``, is the base of its fields.
    """
    config = {}
    for name, kind in CONFIGS.items():
        own = {each.name for each in fields(kind)} & set(options)
        given = {each: options.pop(each) for each in own}
        config[name] = replace(options.pop(name, None) or kind(), **given)
    for each in fields(JobConfig):
        if each.name in options:
            config[each.name] = options.pop(each.name)
    return TransferJob(model, config=JobConfig(**config), **options)
