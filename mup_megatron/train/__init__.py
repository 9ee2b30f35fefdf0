"""The training loop and what hangs on it: metrics and samples."""
