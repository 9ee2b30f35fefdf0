"""Proof that the parametrization is right in a layout: the coordinate check and its negative controls.

family.py says which sizes are checked, controls.py how a rule is taken out, coordinates.py what is measured, verdict.py
what the measured slopes should be, coord_check.py runs it all.
"""
