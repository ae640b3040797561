"""Workflows: code whose every step is remembered, so that anybody can go on with it.

Reading order: `definitions.py` (what a workflow is), `entries.py` (what is kept under which keys), `journal.py` (what was done, and the
one commit per step), `state.py`, `branches.py`, `context.py` (what code calls), `performing.py`, `standing.py` and `running.py` (one run of
one execution), `worker.py` (who runs), `handles.py` (who starts, asks, signals), `limits.py` (how many at once).
"""
