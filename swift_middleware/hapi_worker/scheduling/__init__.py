"""Fair shares of devices, decode threads and memory. No I/O.

In: accounts, weights, requests for work. Out: the next item to run, batch
sizes, max-min fair shares of memory.
"""
