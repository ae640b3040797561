"""Workflows: code whose every step is remembered, so that anybody can go on with it.

Reading order: `definitions.py` (what a workflow is), `entries.py` (what is kept under which keys), `journal.py` (what was done, and the
one commit per step), `state.py`, `branches.py`, `context.py` (what code calls), `performing.py`, `standing.py` and `running.py` (one run of
one execution), `worker.py` (who runs), `handles.py` (who starts, asks, signals), `outside.py` (what needs no worker), `limits.py` (how many at
once). Steps that are done elsewhere: `away.py`, then `serving.py` and `service.py` (on a queue), `task_ends.py` (as a process of their own).
"""
