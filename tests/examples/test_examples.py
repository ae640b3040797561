"""Every example runs. What the demo promises is looked at in test_demo.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

ARGUMENTS: dict[str, list[str]] = {
    "audit.py": [],
    "blobs.py": [],
    "blocking.py": [],
    "cache.py": [],
    "correlation_lifecycle.py": [],
    "demo.py": ["--fast"],
    "orchestration_patterns.py": [],
    "queues.py": [],
    "records.py": [],
    "research_desk.py": [],
    "tasks.py": [],
    "transactions.py": [],
    "watching.py": [],
    "workflows.py": [],
}
"""Every example by name; with what makes a long one short."""


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout, "an example writes plain text where there is no terminal"
