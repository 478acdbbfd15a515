"""Annotated requests: parsing, authorization, sub-requests, answers.

In: the WSGI environment of a client. Out: typed requests, authorized object
bodies, response headers.
"""
