"""Shims of megatron-core's layers: they record global shapes from their constructors' arguments and apply multipliers.

Each shim is a subclass that goes into the model through megatron-core's own layer specs, or, where GPTModel builds a
layer itself, a hook on it; nothing of megatron-core is replaced.
"""
