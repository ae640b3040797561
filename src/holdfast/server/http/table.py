"""Everything that can be asked for."""

from __future__ import annotations

from typing import Final

from holdfast.server.http import correlations, feed, health, locks, messages, records, spaces, transactions
from holdfast.server.http.endpoint import Endpoint

ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *health.ENDPOINTS,
    *messages.ENDPOINTS,
    *spaces.ENDPOINTS,
    *records.ENDPOINTS,
    *transactions.ENDPOINTS,
    *locks.ENDPOINTS,
    *correlations.ENDPOINTS,
    *feed.ENDPOINTS,
)
