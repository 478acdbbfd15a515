"""Virtual nodes: the same bits on any number of workers.

In: a tail, batches, and a process group. Out: per node its samples, and after
the last one the gradients of the whole batch.
"""
