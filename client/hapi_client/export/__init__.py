"""``hapi extract``: features of a data set as files for other tools.

In: a job's loaders. Out: Parquet, Arrow or NumPy files.
"""
