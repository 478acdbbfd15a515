"""Annotated requests: parsing, authorization, sub-requests, answers.

In: a client's WSGI environment.  Out: typed requests, authorised object
bodies, response headers.
"""
