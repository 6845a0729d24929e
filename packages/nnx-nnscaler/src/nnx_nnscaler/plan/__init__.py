"""From a graph to a plan: which strategy every operator takes, and how parameters are stored."""
