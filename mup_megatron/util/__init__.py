"""Files, locks, disk, errors, secrets and progress: what every room stands on."""
