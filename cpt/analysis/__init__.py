"""The results of runs: compared with each other, described on one page, repeated."""
