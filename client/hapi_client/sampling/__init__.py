"""Order of samples: partitions, epochs, ranks, resume. No I/O.

In: the number of samples per span, a seed, an epoch, rank and worker.
Out: the slices of spans that a reader delivers in each step, and a state
that resumes an interrupted epoch.
"""
