"""From a graph and its plan to readable Python, kept in a folder."""
