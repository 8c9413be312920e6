"""The engine's process: ``python -m firsttoken.engine.process FD LAUNCHED LEVEL FORMAT ARGS``.

Started by `engine.launch`, not by hand.

FD is an inherited socket, LAUNCHED when the process was asked for (monotonic nanoseconds), LEVEL what to log and FORMAT
how ("text" or "json"), ARGS an `EngineArgs` as JSON. The process ends when the front end's end of the socket closes,
however that happened, so nothing is left behind when the front end is killed.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from firsttoken.engine.start_account import StartAccount

if TYPE_CHECKING:
    from firsttoken.devices.interface import Device

# What an engine gets to leave by itself once its front end is gone.
LEAVE_S = 2.0
# For the front end, which decides when to stop, writes a recording, or begins a log anew: sent to the whole group, none
# of them may end the engine.
FRONT_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def main(argv: list[str]) -> int:
    """Serve one front end; the exit status is 0 when it left or said so, 1 when the engine failed."""
    fd, launched_ns, level, log_format, raw_args = argv
    account = StartAccount(int(launched_ns))
    account.close("interpreter")
    for number in FRONT_END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FRONT_END_SIGNALS)  # held since the launch
    front_end = socket.socket(fileno=int(fd))
    threading.Thread(target=_end_with, args=(front_end.fileno(),), name="firsttoken-end", daemon=True).start()
    # What imports make is no garbage: walking it again and again takes a sixth of their time, and finds nothing.
    gc.disable()
    import msgspec

    from firsttoken.core.engine_args import EngineArgs

    args = msgspec.json.decode(raw_args, type=EngineArgs)
    devices = _begin(args.device)
    # torch comes with these, and takes a second or several: a part of the start of its own.
    from firsttoken.engine.run import run_engine
    from firsttoken.observability.logging import setup_logging
    from firsttoken.transport.socket_channel import SocketEngineEnd

    setup_logging(level, json_lines=log_format == "json")
    gc.freeze()
    gc.enable()
    account.close("imports")
    channel = SocketEngineEnd(front_end)
    return 0 if run_engine(args, channel, account, own_process=True, devices=devices) else 1


def _end_with(fd: int) -> None:
    """End this process after the front end, whose end of the socket has closed: a loop that turns sees it and leaves,
    but an engine may be at its imports or its weights for long, and hold a device's memory."""
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always told, and nothing else is asked for
    poll.poll()
    time.sleep(LEAVE_S)
    os._exit(1)


def _begin(device: str) -> list[Device] | None:
    """Whatever can go on beside the imports. None when it fails: it is tried again where the front end hears of it."""
    from firsttoken.devices.registry import begin_devices

    try:
        return begin_devices(device)
    except Exception:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
