"""What ranks must have in common, and how it is compared."""
