"""Time and traffic of each epoch: recording, tables, figures, pages.

In: counters and metrics of a running epoch.
Out: ``EpochReport``, JSON files, terminal tables, a progress bar, HTML.
"""
