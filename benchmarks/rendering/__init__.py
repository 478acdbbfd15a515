"""Parts of ``benchmarks.report``, which renders a record.

``tables`` and ``figures`` select parts of the record.  The templates are
``record.html.j2``, for all of it, and ``results.rst.j2``, for the docs.
"""
