"""Rules of single operators: their splits, and the code for each split."""
