"""The data layer: cold and warm, beside raw tokenizers, gigatoken and run_clm."""
