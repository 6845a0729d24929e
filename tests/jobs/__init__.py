"""Functions that worker processes run by name; one module per subject."""
