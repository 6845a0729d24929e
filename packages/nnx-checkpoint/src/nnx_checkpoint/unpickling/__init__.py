"""Files of `torch.save` read without running code, and the cost of a pickle before it is read."""
