"""What is wrong with data, and what became of it: told before and after it is read."""
