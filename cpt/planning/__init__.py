"""Memory, speed and checks before a run; values for `auto`; `cpt init`."""
