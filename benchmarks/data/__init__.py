"""The data layer, cold and warm, compared with raw tokenizers, gigatoken and run_clm."""
