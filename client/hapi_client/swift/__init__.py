"""HTTP to Swift: login, requests, retries, object and feature streams.

In: credentials, URLs, headers. Out: response bodies and typed results.
Every socket of the client is opened here; the other subpackages use
``Connection`` and ``SwiftAccount``.
"""
