"""Which topic holds which command. A topic's module is imported when one of its commands is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from holdfast.cli.command import Command, Topic

TOPICS: Final = {
    "holdfast.cli.records": ("get", "entry", "set", "delete", "increment", "keys"),
    "holdfast.cli.collections": ("append", "list", "add", "remove", "members"),
    "holdfast.cli.feed": ("watch",),
    "holdfast.cli.audit": ("audit",),
    "holdfast.cli.locks": ("locks",),
    "holdfast.cli.schemas": ("schema",),
    "holdfast.cli.documents": ("doc",),
    "holdfast.cli.correlations": ("correlation",),
    "holdfast.cli.queues": ("queue", "dlq"),
    "holdfast.cli.run": ("run",),
    "holdfast.cli.tasks": ("status", "result", "logs", "task"),
    "holdfast.cli.managers": ("manager",),
    "holdfast.cli.pipelines": ("pipeline",),
    "holdfast.cli.workflows": ("workflow",),
    "holdfast.cli.schedules": ("schedule",),
    "holdfast.cli.worker": ("worker",),
    "holdfast.cli.spaces": ("spaces",),
    "holdfast.cli.serve": ("serve",),
    "holdfast.cli.tokens": ("token",),
    "holdfast.cli.moving": ("export", "import", "copy", "backup"),
    "holdfast.cli.restoring": ("restore",),
    "holdfast.cli.care": ("doctor", "tidy"),
}


def find(name: str) -> Command | Topic | None:
    """The command, or the group of commands, of this name."""
    for module, names in TOPICS.items():
        if name in names:
            topic: Topic = import_module(module).app
            return topic.commands[name]
    return None
