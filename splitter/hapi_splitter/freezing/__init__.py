"""Splits a user's model into a frozen region and a tail.

In: an ``nn.Module``, a freeze point, an example input.
Out: the frozen region as a flat graph, the tail as an ``nn.Module``.
"""
