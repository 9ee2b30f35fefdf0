"""Benchmarks: ratios side by side in one run, results committed under benchmarks/results/ with machine and versions."""
