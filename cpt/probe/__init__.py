"""Short runs of a recipe over shares of replay and learning rates, and what they forecast of the whole run."""
