"""Measurements taken while a job trains.

In: events of the loading threads and of the training loop's thread.
Out: their sums, by window for the planner and of the whole job.
"""
