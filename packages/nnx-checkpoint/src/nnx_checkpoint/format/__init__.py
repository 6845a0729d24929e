"""Define the files of a checkpoint: manifest, index, rank files, encoded values, and their paths."""
