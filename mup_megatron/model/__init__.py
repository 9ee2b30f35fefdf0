"""A config to a model in µP on this rank: layers, architectures, models as built, names, initial values, `explain`."""
