"""Loaders that people use today, for comparison with HAPI.

Nothing here imports HAPI: each opponent is the code of a careful user of its
library, torch and torchvision.  ``serve`` runs one in a process of its own,
``tuning`` chooses its settings, ``convert`` writes the formats some of them
need.
"""
