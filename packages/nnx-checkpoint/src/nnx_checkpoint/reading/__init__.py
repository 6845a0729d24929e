"""From a path to tensors: recognize the format, open, load into a model, verify."""
