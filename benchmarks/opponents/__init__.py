"""What people use today, in the place of HAPI.

Nothing in this package imports anything of HAPI: each opponent is what a
careful user writes with the library of its name, torch and torchvision.
"""
