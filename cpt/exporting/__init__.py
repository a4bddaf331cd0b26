"""Every way out of a run: whole, quantised, the Hub; `cpt export`."""
