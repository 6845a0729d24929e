"""The checks, one module for each group; a function's docstring is the promise that it tries."""
