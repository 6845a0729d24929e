"""Strategies launch, fail and clean up properly."""
