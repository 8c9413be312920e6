"""The engine's process: ``python -m firsttoken.engine.process FD ARGS``. Started by `engine.launch`, not by hand.

FD is an inherited socket, ARGS an `EngineArgs` as JSON. The process ends when the front end's end of the socket closes,
however that happened, so nothing is left behind when the front end is killed.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys

import msgspec

from firsttoken.core.engine_args import EngineArgs
from firsttoken.engine.run import run_engine
from firsttoken.transport.socket_channel import SocketEngineEnd


def main(argv: list[str]) -> int:
    """Serve one front end; the exit status is 0 when it left or said so, 1 when the engine failed."""
    fd, raw_args = argv
    # The front end decides when to stop; a Ctrl-C or TERM sent to the whole group must not cut its drain short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s engine: %(message)s")
    channel = SocketEngineEnd(socket.socket(fileno=int(fd)))
    return 0 if run_engine(msgspec.json.decode(raw_args, type=EngineArgs), channel, own_process=True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
