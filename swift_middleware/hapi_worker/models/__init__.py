"""Models in device memory: upload, load, lease, evict.

In: model identities and package bytes. Out: leases on loaded models, and
working memory for forward passes.
"""
