"""`cpt prepare`: a recipe's documents made ready ahead of its run, by one machine or by many."""
