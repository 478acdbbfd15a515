"""HTTP to Swift: login, requests, retries, object and feature streams.

In: credentials, URLs, headers. Out: response bodies and typed answers.
Everything that opens a socket is in here; the rest of the client talks to
``Connection`` and ``Account``.
"""
