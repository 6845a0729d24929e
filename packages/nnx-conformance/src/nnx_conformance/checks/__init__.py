"""The checks; a function's docstring is the promise that it tries.

A module's name begins with the group of its checks.
"""
