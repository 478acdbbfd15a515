"""Places that compute for a proxy: its own worker, and object servers.

In: an authorised job and where its object is.  Out: the stream of the first
place that computes it.
"""
