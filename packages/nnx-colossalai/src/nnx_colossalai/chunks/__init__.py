"""Hold the working weights, masters and gradients of each layer together."""
