"""Fetching a model folder from a Hugging Face hub, through `huggingface_hub`."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from firsttoken.checkpoint.hf_config import read_config
from firsttoken.checkpoint.hf_folder import read_folder_config
from firsttoken.checkpoint.pooling import pooling_files
from firsttoken.checkpoint.progress import OnProgress, Progress
from firsttoken.core.errors import CheckpointError

REPOSITORY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
TEXT_FILES = ["*.json", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
# Other copies of the same weights.
IGNORED_FILES = ["*/*", "consolidated*.safetensors"]


def fetch_repository(
    repository: str,
    *,
    cache: Path | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    on_progress: OnProgress | None = None,
    revision: str | None = None,
) -> Path:
    """The folder of a snapshot of ``repository`` (``owner/name``) at ``revision``, a branch, tag or commit (None: its
    main branch).

    Only safetensors, JSON and Jinja files are fetched, of inner folders those that say how a vector is made, and the
    weights only after ``config.json`` was found to be
    one that can be served. Files go to ``cache / "hub"``, or where `huggingface_hub` keeps them when it is None.
    ``offline`` uses what was fetched before. Raises `CheckpointError`.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionNotFoundError

    options: dict[str, Any] = {
        "cache_dir": None if cache is None else cache / "hub",
        "local_files_only": offline,
        "endpoint": endpoint,
        "revision": revision,
        "ignore_patterns": IGNORED_FILES,
        "tqdm_class": _progress_bar(repository, on_progress),
    }
    try:
        folder = Path(snapshot_download(repository, allow_patterns=TEXT_FILES, **options))
        read_config(read_folder_config(folder))
        # The snapshot's folder is named by its commit: all calls must see the same one.
        options["revision"] = folder.name
        if inner := pooling_files(folder):
            snapshot_download(repository, allow_patterns=inner, **{**options, "ignore_patterns": None})
        return Path(snapshot_download(repository, allow_patterns=TEXT_FILES + WEIGHT_FILES, **options))
    except LocalEntryNotFoundError as error:
        if offline:
            reason = f"was not fetched before, and offline mode was asked for: {_first_line(error)}"
        else:
            where = endpoint or constants.ENDPOINT
            reason = f"cannot be fetched from {where} ({_cause(error)}): check the network, or name a file or folder"
        raise CheckpointError(reason, file=repository) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"has no revision {revision!r:.80}: name a branch, a tag or a commit of it", file=repository
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "check the name" if status == 404 else "log in with `hf auth login` if it is gated or private"
        raise CheckpointError(f"the hub answers {status}: {advice} ({_first_line(error)})", file=repository) from error
    except CheckpointError:
        raise
    # The errors of the HTTP client inside differ from one version of the library to the next.
    except Exception as error:
        raise CheckpointError(f"cannot be fetched ({_first_line(error)})", file=repository) from error


def _cause(error: Exception) -> str:
    """What the system said, without the names of exceptions around it."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.strerror:
            return at.strerror
        at = at.__cause__ or at.__context__
    return re.sub(r"^Got: (\w+: )?", "", _first_line(error))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]


def _progress_bar(repository: str, on_progress: OnProgress | None) -> type[Any]:
    """A progress bar class that draws nothing and hands the bytes on, even when drawing bars is disabled."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})  # type: ignore[no-untyped-call]

        def display(self, *args: Any, **kwargs: Any) -> None:
            return

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            if on_progress is not None and self._counts_bytes:
                on_progress(Progress("download", repository, self._done, int(self.total) if self.total else None))
            shown: bool | None = super().update(n)
            return shown

    return Reporter
