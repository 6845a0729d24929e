"""Errors, ranks and collectives, boxes, shards and dtypes: the layer that imports nothing else of nnx."""
