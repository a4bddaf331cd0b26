"""Search for better values of a recipe's keys: each trial is an ordinary run in processes of its own."""
