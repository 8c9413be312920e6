"""The engine's process: ``python -m firsttoken.engine.process FD LAUNCHED LEVEL FORMAT ARGS``.

Started by `engine.launch`, not by hand.

FD is an inherited socket, LAUNCHED when the process was asked for (monotonic nanoseconds), LEVEL what to log and FORMAT
how ("text" or "json"), ARGS an `EngineArgs` as JSON. The process ends when the front end's end of the socket closes,
however that happened, so nothing is left behind when the front end is killed.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING

from firsttoken.engine.start_account import StartAccount

if TYPE_CHECKING:
    from firsttoken.devices.interface import Device


def main(argv: list[str]) -> int:
    """Serve one front end; the exit status is 0 when it left or said so, 1 when the engine failed."""
    fd, launched_ns, level, log_format, raw_args = argv
    account = StartAccount(int(launched_ns))
    account.close("interpreter")
    # The front end decides when to stop; a Ctrl-C or TERM sent to the whole group must not cut its drain short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import msgspec

    from firsttoken.core.engine_args import EngineArgs

    args = msgspec.json.decode(raw_args, type=EngineArgs)
    devices = _begin(args.device)
    # torch comes with these, and takes a second or several: a part of the start of its own.
    from firsttoken.engine.run import run_engine
    from firsttoken.observability.logging import setup_logging
    from firsttoken.transport.socket_channel import SocketEngineEnd

    setup_logging(level, json_lines=log_format == "json")
    account.close("imports")
    channel = SocketEngineEnd(socket.socket(fileno=int(fd)))
    return 0 if run_engine(args, channel, account, own_process=True, devices=devices) else 1


def _begin(device: str) -> list[Device] | None:
    """Whatever can go on beside the imports. None when it fails: it is tried again where the front end hears of it."""
    from firsttoken.devices.registry import begin_devices

    try:
        return begin_devices(device)
    except Exception:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
