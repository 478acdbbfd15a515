"""Checkpoints of each step, on local disks and in Swift.

:mod:`.torch_file` lays a file out, :mod:`.direct_write` writes parts of it,
:mod:`.folder` commits whole files, and :mod:`.manager` has the public class.
"""
