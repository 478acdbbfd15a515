"""The model package: one safetensors file with graph, weights, transform.

In: a frozen region, or the bytes of an untrusted package.
Out: a package named by its digest, or a checked region; no code is evaluated.
"""
