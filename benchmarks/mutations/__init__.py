"""Break guarded lines one at a time, and see that a test falls."""
