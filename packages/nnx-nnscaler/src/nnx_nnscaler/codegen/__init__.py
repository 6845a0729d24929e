"""Write a graph and its plan as readable Python."""
