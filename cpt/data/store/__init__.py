"""What is made once and kept: tokenised sources on this machine's disk and in a bucket."""
