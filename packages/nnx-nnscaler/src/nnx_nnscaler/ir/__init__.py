"""The graph of a traced program, the placements of its tensors, and its plan: data only."""
