"""``TransferJob``: one training job on data in Swift.

In: a model, a freeze point, a data set, options.
Out: loaders per epoch, the tail to train, reports, saved state.
"""
