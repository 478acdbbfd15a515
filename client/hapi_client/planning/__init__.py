"""Plans push-down: what to compute in the store, for which samples.

In: metrics of each window, profiles of worker and client, remaining work.
Out: weights of the routes (cut and encoding), revised at intervals.
"""
