"""Measurements taken while a job trains.

In: timestamps, byte and sample counts from the loading threads.
Out: metrics per window for the planner, counters for reports.
"""
