"""From the one argument MODEL to an opened checkpoint."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from firsttoken.checkpoint.aliases import ALIASES, Alias, alias_path
from firsttoken.checkpoint.checkpoint import Checkpoint, CheckpointText
from firsttoken.checkpoint.gguf_checkpoint import open_gguf
from firsttoken.checkpoint.hf_folder import open_folder, open_folder_without_weights
from firsttoken.checkpoint.hub import REPOSITORY_ID, fetch_repository
from firsttoken.checkpoint.progress import OnProgress
from firsttoken.checkpoint.pull import pull
from firsttoken.checkpoint.shapes import PREFIX, SHAPES, open_random
from firsttoken.core.errors import CheckpointError


def open_checkpoint(
    model: str,
    *,
    cache: Path | None = None,
    offline: bool = False,
    on_progress: OnProgress | None = None,
    endpoint: str | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """Open MODEL without reading weights; fetches it first when it has to and ``offline`` is false.

    The first rule that fits decides:

    1. ``random:<shape>``: that shape without weights; ``random:<folder>`` the same of a folder's configuration, with
       its tokenizer;
    2. the name of an alias (``smollm2``): its file in ``cache``, even when a folder of that name is at hand
       (write ``./smollm2`` for the folder);
    3. a path that exists: a folder in Hugging Face layout, or a ``.gguf`` file;
    4. something written as a path (``/``, ``./``, ``../`` or ``~`` in front, ``.gguf`` at the end): an error, never a
       download;
    5. ``owner/name``: a hub repository (``endpoint``: the hub's URL, the public one by default; ``revision``: the
       branch, tag or commit, main by default). No other model has a ``revision``.

    Raises `CheckpointError` that says what was tried.
    """
    if revision is not None:
        _check_has_revisions(model, revision)
    if model.startswith(PREFIX):
        shape = model.removeprefix(PREFIX)
        if shape and shape not in SHAPES and _exists(folder := Path(shape).expanduser(), model):
            return open_folder_without_weights(folder)
        return open_random(model)
    if model in ALIASES:
        return _advised(open_gguf(_alias_file(model, cache, offline, on_progress), name=model), ALIASES[model])
    path = Path(model).expanduser()
    if model and _exists(path, model):
        return _open_path(path)
    if model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf"):
        raise CheckpointError("there is no such file or folder", file=str(path))
    if REPOSITORY_ID.fullmatch(model):
        folder = fetch_repository(
            model, cache=cache, offline=offline, endpoint=endpoint, on_progress=on_progress, revision=revision
        )
        return open_folder(folder, name=model)
    raise CheckpointError(
        f"{model!r:.200} is none of what a model may be: a folder or .gguf file (no such path), an alias "
        f"({', '.join(ALIASES)}), a hub repository (owner/name), random:<shape or folder> (shapes: {', '.join(SHAPES)})"
    )


def _check_has_revisions(model: str, revision: str) -> None:
    if model.startswith(PREFIX):
        what = "is made, and not fetched"
    elif model in ALIASES:
        what = "is an alias of one file"
    elif model and _exists(Path(model).expanduser(), model):
        what = "is a path on this machine"
    else:
        return
    raise CheckpointError(
        f"revision {revision!r:.80} is for repositories of the hub (owner/name), and this model {what}: leave it out",
        file=model,
        field="revision",
    )


def _advised(checkpoint: Checkpoint, alias: Alias) -> Checkpoint:
    """With the sampling that the alias advises, where its file says nothing."""

    def read_text() -> CheckpointText:
        text = checkpoint.read_text()
        own = text.generation
        temperature = alias.temperature if own.temperature is None else own.temperature
        top_p = alias.top_p if own.top_p is None else own.top_p
        return replace(text, generation=structs.replace(own, temperature=temperature, top_p=top_p))

    return replace(checkpoint, read_text=read_text)


def _exists(path: Path, model: str) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # too long, or holds a NUL byte
        raise CheckpointError(f"{model!r:.200} cannot be a model's name ({error})"[:400]) from error


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return open_folder(path)
    if path.suffix == ".gguf" or _is_gguf(path):
        return open_gguf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"is a part of a model: name its folder, {path.parent}", file=str(path))
    raise CheckpointError("is neither a folder nor a GGUF file; pickled weights are never read", file=str(path))


def _is_gguf(path: Path) -> bool:
    """Some caches name files by their hash: look at the first bytes."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror or error})", file=str(path)) from error


def _alias_file(name: str, cache: Path | None, offline: bool, on_progress: OnProgress | None) -> Path:
    """The alias' file; only its size is checked here (`pull` checks the digest), so that starting stays fast."""
    path = alias_path(name, cache)
    try:
        if os.stat(path).st_size == ALIASES[name].member_bytes:
            return path
    except OSError:
        pass
    if offline:
        raise CheckpointError(f"is not in the cache: run `firsttoken pull {name}` while online", file=str(path))
    return pull(name, cache, on_progress)
