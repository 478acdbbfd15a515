"""What the two tiers of HAPI say to each other.

Headers of an annotated GET, the messages between the filter and its worker,
the feature stream, the index of a data set and the tree of errors.  The
modules ``features`` and ``index`` need pyarrow; the others only the standard
library, so that a Swift proxy can import them.
"""
