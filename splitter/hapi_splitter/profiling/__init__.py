"""Time and memory of a cut on a device.

In: a frozen region, a device, a batch size.
Out: seconds per node, peak bytes per prefix.
"""
