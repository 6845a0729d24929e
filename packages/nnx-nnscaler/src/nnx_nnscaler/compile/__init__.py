"""Compile a module to a program for each form of input, store it, and find it again."""
