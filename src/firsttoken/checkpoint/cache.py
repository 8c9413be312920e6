"""Where fetched models are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$FIRSTTOKEN_CACHE``, else ``$XDG_CACHE_HOME/firsttoken``, else ``~/.cache/firsttoken``; may not exist yet."""
    if own := os.environ.get("FIRSTTOKEN_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "firsttoken"
    return Path.home() / ".cache" / "firsttoken"
