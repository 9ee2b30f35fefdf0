"""What tensors and optimizer really have, held against the table: initial values, groups, updates."""
