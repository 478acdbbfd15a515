"""Keeps tests apart from the user's cache of splits, and from one another."""

import gc
import os

import pytest

from hapi_splitter.freezing import split_store

os.environ["HAPI_CACHE_DIR"] = ""
split_store.MAX_MEMORY_ENTRIES = 0


@pytest.fixture(autouse=True, scope="module")
def frozen_heap():
    """Collections pass over what was there before the file's tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # else libraries report at exit what is left


@pytest.fixture
def no_early_reads(monkeypatch):
    """Jobs read nothing before the first loader."""
    from hapi_client.job import transfer_job

    monkeypatch.setattr(transfer_job, "READING_CUTS", ())


@pytest.fixture
def frequent_plans(monkeypatch):
    """Jobs plan again after each span, and half a second of loading."""
    from hapi_client.job import job_plan
    from hapi_client.planning.replanner import ReplanOptions

    monkeypatch.setattr(job_plan, "REPLAN", ReplanOptions(0.5, 1))
