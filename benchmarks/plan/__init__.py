"""What `cpt plan` prints of the shipped recipes."""
