"""Proof that the parametrization is right: the coordinate check with its negative controls, and stable optima.

The coordinate check: family.py chooses the sizes, regimes.py the settings, controls.py takes a rule out, coordinates.py
measures, slopes.py fits, theory.py says what a slope should be, by what roles.py says of names, verdict.py judges;
coord_check.py runs it all.
Stable optima: stability.py runs the check, question.py says what is varied, grid.py trains, optimum.py finds minima.
"""
