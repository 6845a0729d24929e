"""Helpers for testing strategies: a pool of worker processes that stay warm between tests."""
