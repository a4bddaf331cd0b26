"""`cpt rehearse`: what a run will do, done once and in minutes, in a folder of its own, before GPU days are spent on
it."""
