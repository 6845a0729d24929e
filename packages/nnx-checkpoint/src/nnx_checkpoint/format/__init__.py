"""What is written: manifest, index, rank files, encoded values, and where a checkpoint's files lie."""
