"""Tuning the proxy: search space, budget, study, trials in processes of their own, the transfer record.

space.py     what may be tuned; a config with values put in; the proxy's config
budget.py    an estimate of what tuning and pretraining cost
memory.py    bytes on the fullest process of the target
study.py     the shared study: planned trials, halving in order, repetitions
storage.py   the study as Optuna keeps it; journal.py checks the lines of a journal
sampler.py   which values are tried
lease.py     which trials lost their worker
objective.py what trials are compared by, in people's words
outcome.py   the study's trials, and the one that is chosen
trial.py     one trial, in the process that runs it
process.py   starts that process and talks with it
decide.py    whether to tune; the checks before; a run with a record's values
lead.py      the worker that leads: moves the study on, chooses, writes the record
worker.py    takes trials, watches their process, tells the study
family.py    between which configs values transfer
record.py    transfer.json: written, checked, applied
"""


class Stopped(Exception):
    """SIGTERM came while tuning; the trial at hand is saved and waits in the study."""
