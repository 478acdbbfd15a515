"""Swift's own functional tests, with and without the hapi filter.

``python -m swift_functional`` (``tox run -e swift-functional``) runs them
against two clusters that differ in nothing but the filter, and compares the
sets of results.
"""


class NotRunError(Exception):
    """The tests could not be run; the message has reason and remedy."""
