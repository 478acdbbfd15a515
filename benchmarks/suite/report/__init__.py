"""``python -m benchmarks report``: results as HTML, and as a page of docs.

What a section of the results says becomes a
:class:`~benchmarks.suite.report.document.Part`, and a document of these is
written in each form.
"""
