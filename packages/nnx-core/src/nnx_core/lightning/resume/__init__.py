"""Resume a run in the middle of an epoch, at the sample where it stopped."""
