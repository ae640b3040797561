"""What an agent may append to the history of a document: the claims of `verbs.py` for `history/`.

Orchestrators and administrators write bodies, decide and delete, and tell of that. An agent does two things to a document, and tells of
each in the batch that does it:

    contributed    the section that the batch puts, and what it puts there; of one that is too large its size
    withdrew       the section that the batch deletes

Whose section that is, the same batch is judged by (`named` in `verbs.py`). So an event of an agent is true: it speaks of the agent's own section
and says what was written there, and nobody makes up a decision, a deletion or another's contribution. The event is compared byte by byte
with what the library would have sent (`layers/history.py`), since values are canonical: nothing is read, and nothing can be read in two ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from holdfast.codec import encode
from holdfast.engine import Batch, Delete, Push, Put
from holdfast.middleware.messages import Misplaced

_EVENTS: Final = "history/"
_SECTIONS: Final = "sections/"


def check_told(op: Push, batch: Batch) -> None:
    """Refuse an event of an agent that tells of anything but what its batch does."""
    if op.value not in _told(_SECTIONS + op.prefix[len(_EVENTS) :], batch):
        raise Misplaced(
            op.prefix,
            "agents tell of their own contribution or withdrawal, in the batch that makes it; orchestrators tell the rest",
        )


def _told(prefix: str, batch: Batch) -> Iterator[bytes]:
    """The events that tell of what a batch does to the sections under a prefix."""
    for op in batch.operations:
        if isinstance(op, Put | Delete) and op.key.startswith(prefix):
            section = op.key[len(prefix) :]
            if isinstance(op, Delete):
                yield encode({"kind": "withdrew", "section": section})
            else:
                yield encode({"kind": "contributed", "section": section, "data": msgspec.Raw(op.value)}, known=True)
                yield encode({"kind": "contributed", "section": section, "omitted": len(op.value)})
