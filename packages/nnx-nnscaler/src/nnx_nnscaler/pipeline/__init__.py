"""Pipelines: a traced graph cut into stages, and batches cut into microbatches that go through them."""
