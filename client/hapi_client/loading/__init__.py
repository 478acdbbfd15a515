"""Loads spans and makes batches: reads, decoding, routes, prefetch, loaders.

In: the batches that a reader should get, and a route for each span.
Out: batches of features and labels in sampler order, each sample once.
"""
