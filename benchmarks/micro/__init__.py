"""Parts of the smaller benchmarks, one group for each command.

``tight_loop`` belongs to ``benchmarks.worker``, ``filter_cost`` to ``filter``,
``memory_probe`` to ``memory``, ``contention`` and ``fair_shares`` to
``fairness``, ``cifar`` to ``accuracy`` and ``census_models`` to ``census``.
"""
