"""Features cached on this host: in memory, and in a directory.

In: features of slices of spans, from any route.  Out: the same features in
later epochs, jobs and processes.  No network access.
"""
