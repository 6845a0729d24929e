"""The graph of a traced program, placements of its tensors, and the plan of it: data only."""
