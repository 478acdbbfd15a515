"""``hapi demo``: trains once with raw reads and once with push-down.

In: tars or generated photographs. Out: both runs compared, on a Swift
cluster that lives as long as the command.
"""
