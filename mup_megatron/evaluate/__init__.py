"""What a trained model is asked: likelihoods, tasks, translation, generation."""
