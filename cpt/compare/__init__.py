"""What differs between runs: recipes, versions, code, machines, data, and what they came to."""
