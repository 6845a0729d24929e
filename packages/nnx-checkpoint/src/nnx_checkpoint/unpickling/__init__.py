"""Read files of `torch.save` without running their code, and bound the cost of a pickle beforehand."""
