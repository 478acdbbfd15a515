"""Measurements behind the claims of README.md and docs/results.rst.

They run from a checkout and are not part of the installed package.  The
modules of this package are commands (``python -m benchmarks --help`` lists
them); ``experiments`` and ``suite`` compare HAPI with other loaders on the two
tiers that ``testbed`` starts, ``opponents`` holds these loaders, ``micro`` the
parts of the smaller benchmarks, ``scheduling`` a simulated cluster, and
``rendering`` tables, figures and templates.
"""
