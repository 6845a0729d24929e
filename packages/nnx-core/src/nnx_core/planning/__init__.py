"""Predict the memory of a run before it starts: trace a model, replay a step, compare strategies."""
