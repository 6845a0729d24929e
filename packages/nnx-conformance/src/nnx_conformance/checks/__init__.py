"""The checks, in a folder or module per group; a function's docstring states its promise."""
