"""What reads or writes other people's weights: export, import, rebase, and runs that were saved."""
