"""What an engine writes when its front end is gone without a word: its last steps, which nobody else has."""

from __future__ import annotations

import logging
from pathlib import Path

from firsttoken.core.engine_args import EngineArgs
from firsttoken.observability.flight import PIECE_TOKENS
from firsttoken.observability.flight_file import FlightHead, FlightSettings, write_flight
from firsttoken.observability.ledger import StepLedger
from firsttoken.transport.messages import EngineInfo, EngineStats

log = logging.getLogger(__name__)


class LastWords:
    """For an engine of these ``args``, which said ``info`` of itself."""

    def __init__(self, args: EngineArgs, info: EngineInfo) -> None:
        self._args = args
        self._info = info

    def __call__(self, ledger: StepLedger, stats: EngineStats) -> None:
        if self._args.flight_dir is None:
            return
        head = FlightHead.now(
            "the front end was gone", PIECE_TOKENS, self._info, FlightSettings.of(self._args), "engine"
        )
        try:
            path = write_flight(Path(self._args.flight_dir), head, steps=[ledger.snapshot()], stats=[stats])
        except OSError as error:
            log.error("the last steps could not be written to %s: %s", self._args.flight_dir, error)
        else:
            log.warning("the front end was gone: the last steps are in %s", path)
