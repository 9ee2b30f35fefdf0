"""What pages tell of the records in docs/evidence: tables and paragraphs that are made, and marks behind other numbers.

    python -m benchmarks.evidence       # makes them anew, between their markers, on every page that quotes records

pages.py says what is made and what needs a mark; tests/proof/test_evidence.py holds both.
"""
