"""Elastic training on torchft: groups may be killed and join at any step, and the numbers stay."""

from nnx_torchft.options import ElasticOptions, ShardedElasticOptions

__all__ = ["ElasticOptions", "ShardedElasticOptions"]
