"""Text to batches: tokenizer, corpus to megatron-core's indexed dataset, deterministic and resumable batches."""
