"""The protocol between client, filter and worker.

Headers of an annotated GET, messages between the filter and its worker, the
feature stream, the index of a data set and the tree of errors.  The modules
``feature_*`` and ``data_index`` need pyarrow; the others need the standard
library only, so that a Swift proxy can import them.
"""
