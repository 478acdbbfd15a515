"""When and what to push down.

In: metrics per window, the profile of worker and client, remaining work.
Out: weights over routes (cut, encoding), applied span by span, revised at
intervals.
"""
