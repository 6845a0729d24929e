"""Scripts as users write them, which checks start as fresh processes by their paths."""
