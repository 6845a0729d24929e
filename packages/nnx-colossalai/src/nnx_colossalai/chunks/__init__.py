"""Working weights, masters and gradients of a layer, held together."""
