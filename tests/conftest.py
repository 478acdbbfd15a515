"""Keeps tests apart from the user's cache of splits, and from one another."""

import os

from hapi_splitter.freezing import split_store

os.environ["HAPI_CACHE_DIR"] = ""
split_store.MAX_MEMORY_ENTRIES = 0
