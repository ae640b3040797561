"""Names of tasks: 19 digits that tell when a task was made, in the format of the ids that engines assign.

A tid is milliseconds since 1970 << 20, plus a counter that begins at a random point, so two processes meet rarely; if they do,
the store refuses the second (`Absent`) and another one is made. Tids of one process ascend. It is also the id of the task's
messages. People use the last ten digits, the short tid, or fewer as long as they mean one task.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.engine import ID_SHIFT
from holdfast.errors import InvalidInput
from holdfast.layers.queue_entries import new_message_id

SHORT_DIGITS: Final = 10
SUFFIX_DIGITS_MIN: Final = 4
"""Of the end of a tid that a person types."""
_TID: Final = re.compile(r"[0-9]{19}", re.ASCII)
_SUFFIX: Final = re.compile(rf"[0-9]{{{SUFFIX_DIGITS_MIN},18}}", re.ASCII)


def new_tid(now_ms: int) -> str:
    """A tid that this process has not made before. It is also the id of the task's messages."""
    return new_message_id(now_ms)


def check_tid(tid: str) -> str:
    """Refuse what cannot be the name of a task, and return it."""
    if type(tid) is not str or _TID.fullmatch(tid) is None:
        raise InvalidInput(
            f"{tid!r:.60} is not a tid: 19 digits, as submit gave it, or the last {SHORT_DIGITS} of them"
        )
    return tid


def is_suffix(text: str) -> bool:
    """Whether this can be the end of a tid, long enough to look for."""
    return type(text) is str and _SUFFIX.fullmatch(text) is not None


def short_tid(tid: str) -> str:
    """The last ten digits."""
    return check_tid(tid)[-SHORT_DIGITS:]


def made_at_ms(tid: str) -> int:
    """When it was made, by the clock of its maker."""
    return int(check_tid(tid)) >> ID_SHIFT
