"""The stored model: zip container with graph, weights, transform.

In: a frozen region, or the bytes of a stranger's package.
Out: a package named by its digest, or a checked region; no code is evaluated.
"""
