"""The examples of the guide, run by a shell against a live server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import holdfast
from holdfast.clock import SystemClock
from tests.server.http.keeping import MARKET, Keeper, running
from tests.test_docs import ROOT, blocks, matches

GUIDE = ROOT / "docs" / "guides" / "http.md"
END = "--- end of a block ---"


async def test_the_guide_shows_what_happens(tmp_path: Path) -> None:
    found = list(blocks(GUIDE.read_text()))
    scripts = [block.text for block in found if block.language == "sh"]
    shown = [block.text for block in found if block.language == "json"]
    assert len(scripts) == len(shown) == 5
    # A block is one shell script; curl's answers have no line end of their own.
    whole = f"echo '{END}'\n".join(scripts).replace("{ curl -sS", '{ curl -sS -w "\\n"')
    async with (
        holdfast.open(str(tmp_path / "team.db"), background=False) as store,
        running(Keeper(store, SystemClock())) as port,
    ):
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", whole),
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "URL": port.url, "TOKEN": MARKET},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    answers = output.decode().split(f"{END}\n")
    assert len(answers) == len(shown), output.decode()
    for expected, actual in zip(shown, answers, strict=True):
        assert matches(expected, actual), f"shows\n{expected}\nand what happens is\n{actual}"
