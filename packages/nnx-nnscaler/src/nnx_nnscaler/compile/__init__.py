"""From a module to a program that can be called: compiled once for each form of input, kept, found again."""
