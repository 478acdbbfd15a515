"""The filter's side of the exchange with the worker.

In: job requests, object bytes. Out: feature streams, typed errors.
"""
