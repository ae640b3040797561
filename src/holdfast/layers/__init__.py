"""The capabilities: each a short algorithm over the engine contract, written once for every engine.

A layer knows no engine and no driver. It takes a `Scope` (which space, on behalf of whom) and speaks `holdfast.engine`.
"""
