"""What a process's exit code tells of its end, in words."""

from __future__ import annotations

import signal

# What the system's killer sends when memory is short; nobody else here does.
_OUT_OF_MEMORY = signal.SIGKILL


def end_words(code: int | None) -> str:
    """Of `subprocess.Popen.poll`; "" while it runs."""
    if code is None:
        return ""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "no name"
    hint = "; out of memory?" if -code == _OUT_OF_MEMORY else ""
    return f"its process was killed by signal {-code} ({name}{hint})"
