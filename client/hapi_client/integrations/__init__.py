"""Features in the loops of other libraries, which stay optional.

Each module imports its library, and nothing else of HAPI imports the module.
"""
