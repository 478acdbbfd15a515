"""Forward passes: decode, coalesce, run on a device.

In: queued samples and leases. Out: features per sample, in micro-batches
that never mix accounts.
"""
