"""Where every chunk lies: sizes, budgets, speeds, and the plan made of them."""
