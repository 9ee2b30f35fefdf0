"""What a run's tensors and modules are like while it trains: sizes over global tensors, every so many steps."""
