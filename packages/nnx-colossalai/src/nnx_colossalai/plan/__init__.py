"""Plan the tier of every chunk from sizes, budgets and rates."""
