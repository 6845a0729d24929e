"""Models of every architecture, however they are built."""
