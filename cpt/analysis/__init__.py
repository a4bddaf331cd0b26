"""What runs achieved: compared with each other, described on one page, repeated."""
