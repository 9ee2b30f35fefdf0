"""Proof that the parametrization is right: the coordinate check with its negative controls, and stable optima.

family.py says which sizes are checked, controls.py how a rule is taken out, coordinates.py what is measured, verdict.py
what the measured slopes should be, coord_check.py runs it all. stability.py asks where optima lie: question.py
says what is varied, grid.py trains, optimum.py finds minima.
"""
