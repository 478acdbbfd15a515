"""From spans to batches: reads, decoding, routes, prefetch, loaders.

In: the steps of a reader and a route for each span.
Out: batches of features and labels in sampler order, each sample once.
"""
