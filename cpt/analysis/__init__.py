"""What runs achieved: compared with each other, told in one page, repeated."""
