"""The filter of Swift's object servers: computes next to the disks.

In: signed requests of proxies' filters.  Out: frames of the answer.  It reads
the object from the application to its right and feeds the host's worker.
"""
