"""`cpt rehearse`: try everything a run will do, once and in minutes, before it takes days."""
