"""From a module to a program that can be called: compile once for each form of input, keep it, find it again."""
