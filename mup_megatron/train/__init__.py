"""The training loop, and its hooks, a file each: metrics, screen, samples, BLEU, the audit, a watching study."""
