"""Pictures and pages of finished runs."""
