"""Handlers of the kinds of requests, and their access-log entries.

``filter`` chooses the handler.  In: a typed request and the
``HandlerContext``.  Out: a WSGI application that answers.
"""
