"""``hapi doctor``: checks of connection, store, worker and data set.

In: a connection and optionally a data set. Out: findings with remedies.
"""
