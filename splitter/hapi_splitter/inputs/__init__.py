"""Input transforms: images and arrays from stored bytes to tensors.

In: the bytes of a sample, a transform's parameters, a seed.
Out: a tensor, the same on client and worker.
"""
