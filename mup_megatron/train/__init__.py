"""The training loop, and what hangs on it, a hook in a file each: metrics, screen, samples, BLEU, a watching study."""
