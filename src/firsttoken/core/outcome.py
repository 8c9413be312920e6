"""How a request, or one answer of it, ends."""

from __future__ import annotations

from typing import Literal

# aborted: the caller left, or the server stopped; refused: it was not to be run, or there was no room; expired: it had
# not started by its deadline; failed: the engine or the server could not go on.
Outcome = Literal["finished", "aborted", "refused", "expired", "failed"]
# Through no doing of the caller, or by what was wrong with the request.
NOT_SERVED: tuple[Outcome, ...] = ("refused", "expired", "failed")
