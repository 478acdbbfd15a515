"""The feature cache in Swift's reserved namespace.

In: feature streams of whole shards or spans.  Out: cached streams, listings,
purges.
"""
