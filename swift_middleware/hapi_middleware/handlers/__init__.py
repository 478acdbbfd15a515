"""One handler for each kind of request, and its access-log entry.

In: a typed request and the ``HandlerContext``. Out: a WSGI answer.
"""
