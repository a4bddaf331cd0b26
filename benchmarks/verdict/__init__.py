"""How often verdicts mislead, in simulated held-out sets."""
