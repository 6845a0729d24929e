"""The runtime of generated programs: collectives with gradients, sharded parameters, gradient reduction."""
