"""The jobs of launch/slurm: what they ask for, what their batch step does, what runs on each node.

submit.py   a config as sbatch's options; submits the jobs of a stage, or shows them
job.py      the batch step: one srun, the signal before the time limit, requeueing
node.py     one node's part of the target: starts its ranks, tells which failed first
"""
