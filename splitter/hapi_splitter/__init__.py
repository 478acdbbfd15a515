"""Models split into a frozen region and a tail, cut, packaged and loaded.

No HTTP and no Swift in here: numbers and files only.
"""
