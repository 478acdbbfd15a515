"""Data sets in Swift: shards, index, labels, splits, upload.

In: a container and prefix, or a local folder of images.
Out: an index of samples and spans, label mappings, uploaded shards.
"""
