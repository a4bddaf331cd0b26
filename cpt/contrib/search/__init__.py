"""Search for better values of a recipe's keys: each trial is a separate run."""
