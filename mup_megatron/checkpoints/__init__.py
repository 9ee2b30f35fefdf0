"""A run's folder, its checkpoints, and what each says about its weights."""
