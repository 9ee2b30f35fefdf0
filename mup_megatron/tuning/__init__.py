"""Tuning the proxy: search space, budget, study, trials in processes of their own, the transfer record.

space.py     what may be tuned; a config with values put in; the proxy's config
budget.py    what tuning and pretraining cost, before they cost anything
memory.py    bytes on the fullest process of the target
study.py     the shared study: planned trials, halving in order, repetitions
storage.py   what Optuna keeps of it; journal.py checks the lines of a journal
sampler.py   which values are tried
lease.py     whose worker is gone, where workers come and go
outcome.py   its trials, and the one that is chosen
trial.py     one trial, in the process that runs it
process.py   starts that process and talks with it
decide.py    whether to tune; what must hold before; what a record's values make of a run
lead.py      the worker that leads: moves the study on, chooses, writes the record
worker.py    takes trials, watches their process, tells the study
family.py    between which configs values transfer
record.py    transfer.json: written, checked, applied
"""


class Stopped(Exception):
    """SIGTERM came while tuning; the trial at hand is saved and waits in the study."""
