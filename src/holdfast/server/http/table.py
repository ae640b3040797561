"""Everything that can be asked for."""

from __future__ import annotations

from typing import Final

from holdfast.server.http import (
    correlations,
    documents,
    feed,
    health,
    locks,
    messages,
    queues,
    records,
    schemas,
    spaces,
    tasks,
    transactions,
    workflows,
)
from holdfast.server.http.endpoint import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *health.ENDPOINTS,
    *messages.ENDPOINTS,
    *spaces.ENDPOINTS,
    *records.ENDPOINTS,
    *transactions.ENDPOINTS,
    *locks.ENDPOINTS,
    *schemas.ENDPOINTS,
    *documents.ENDPOINTS,
    *correlations.ENDPOINTS,
    *queues.ENDPOINTS,
    *tasks.ENDPOINTS,
    *workflows.ENDPOINTS,
    *feed.ENDPOINTS,
)
