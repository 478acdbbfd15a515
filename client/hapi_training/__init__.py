"""Training loops on top of ``hapi_client``; imported by its commands only.

In: a ``TransferJob``. Out: a trained tail, checkpoint files.
"""
