"""Shapes to numbers: formulas, the table, kinds of tensors, batch and tokens, files of base shapes."""
