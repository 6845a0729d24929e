"""What emitted programs run on: collectives with gradients, parameters in shards, gradient reduction."""
