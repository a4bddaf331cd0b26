"""The recipe: its schema and its loader. Knows nothing of torch."""
