"""Metrics, load and accounting of the worker.

In: events of jobs and devices. Out: Prometheus metrics, access records, load.
"""
