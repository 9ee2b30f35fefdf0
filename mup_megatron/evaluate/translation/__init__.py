"""Translation by an encoder-decoder: beam search (search.py), the model with its cache (decoder.py), BLEU (bleu.py)."""
