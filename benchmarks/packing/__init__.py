"""What packing is worth in supervised fine-tuning: real tokens a second, on conversations whose lengths are
log-normal."""
