"""The experiments of ``python -m benchmarks run``.

``grid`` compares epoch 1 with opponents, ``regret`` the plan with fixed cuts,
``runs`` whole runs from cold, ``tenants`` several accounts at once.  Each
fills one section of the record.
"""
