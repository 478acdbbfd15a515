"""The filter's client of the worker.

In: job requests, object bytes.  Out: feature streams, typed errors.
"""
