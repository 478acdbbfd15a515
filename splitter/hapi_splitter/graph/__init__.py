"""The flat ATen graph of a frozen region.

In: an exported region, or calls read from a package.
Out: checked calls with shapes and costs, and runnable modules between cuts.
"""
