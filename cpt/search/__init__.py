"""Search for better values of a recipe's keys: each trial is a run of its own."""
