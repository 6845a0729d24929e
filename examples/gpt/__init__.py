"""A small GPT on Lightning: the model, its data, one training run, and the comparison of runs."""
