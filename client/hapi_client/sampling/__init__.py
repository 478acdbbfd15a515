"""Order of samples: partitions, epochs, ranks, resume. No I/O.

In: the number of samples per span, a seed, an epoch, rank and worker.
Out: which slices of which spans a reader delivers in each step, and a state
that continues an interrupted epoch.
"""
