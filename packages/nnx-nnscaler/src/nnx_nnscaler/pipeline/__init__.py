"""Pipelines: stages of a traced graph, and microbatches that pass through them."""
