"""Convert checkpoints to other formats, merge them, and compare two of them."""
