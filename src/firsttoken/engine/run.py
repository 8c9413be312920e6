"""Builds an engine and runs it to its end, telling the front end whatever goes wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import CheckpointError, ConfigError, FirstTokenError
from firsttoken.devices.interface import Device
from firsttoken.engine.affinity import keep_to
from firsttoken.engine.build import build_engine
from firsttoken.engine.start_account import StartAccount
from firsttoken.transport.channel import ChannelClosed, EngineEnd
from firsttoken.transport.messages import Failed, FailureKind

log = logging.getLogger(__name__)


def run_engine(
    args: EngineArgs,
    channel: EngineEnd,
    account: StartAccount,
    *,
    own_process: bool,
    devices: Sequence[Device] | None = None,
) -> bool:
    """True when the engine ended because it was told to or its front end left, False when it failed.

    ``account`` began with the launch and gets the parts of the start from here on. ``own_process``: nothing else lives
    in this process, so its garbage collector may be tuned. ``devices`` are those of
    `registry.begin_devices`, if it was called.
    """
    try:
        loop = build_engine(args, channel, account, devices, own_process=own_process)
    except ChannelClosed:
        return True
    except Exception as error:
        # Known errors speak for themselves; of the others the log keeps the traceback.
        known = isinstance(error, FirstTokenError)
        if not known:
            log.exception("the engine could not start")
        with contextlib.suppress(ChannelClosed):
            channel.send(Failed(str(error) if known else f"{type(error).__name__}: {error}", _kind(error)))
        channel.close()
        return False
    if args.engine_core is not None:
        keep_to(args.engine_core)
    try:
        loop.run()
    except Exception:
        return False
    return True


def _kind(error: Exception) -> FailureKind:
    """Whose fault it is that there is no engine: the front end raises an error of that kind."""
    if isinstance(error, ConfigError):
        return "config"
    return "checkpoint" if isinstance(error, CheckpointError) else "engine"
