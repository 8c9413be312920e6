"""How a model's vectors are to be made, from the files that sentence-transformers keeps in a model's folder."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any, cast

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.json_files import MAX_CONFIG_BYTES, JSONObject, decode_json, read_bytes, read_object
from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.core.pooling import POOLING_KINDS, Pooling, PoolingKind

MODULES_FILE = "modules.json"
# The modes of its Pooling module that are computed here, under its names and, in newer files, those of "pooling_mode".
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "lasttoken": "last",
}
_ADVICE = "give --pooling mean or --pooling last to have that instead"


def choose_pooling(asked: str, checkpoint: Checkpoint) -> Pooling:
    """``asked`` "auto" is what the model's folder says, else the hidden state of the last token; any other is what it
    names. Vectors have length 1 unless the folder says that they are left as they are.

    Raises `ConfigError` for another word, `CheckpointError` for a folder that asks for what is not computed here.
    """
    if asked not in ("auto", *POOLING_KINDS):
        raise ConfigError(f"pooling must be auto, {' or '.join(POOLING_KINDS)}, got {asked!r}")
    if asked != "auto":
        return Pooling(cast(PoolingKind, asked))
    folder = Path(checkpoint.path)
    return _read(folder) if (folder / MODULES_FILE).is_file() else Pooling()


def pooling_files(folder: Path) -> list[str]:
    """What beside ``folder``'s own files says how vectors are made, as paths in it; [] where it has no modules.

    Raises `CheckpointError` for modules that cannot be read.
    """
    if not (folder / MODULES_FILE).is_file():
        return []
    return [f"{one.text('path')}/config.json" for name, one in _modules(folder) if name == "Pooling"]


def _modules(folder: Path) -> list[tuple[str, JSONObject]]:
    path = folder / MODULES_FILE
    listed = decode_json(read_bytes(path, MAX_CONFIG_BYTES), list[dict[str, Any]], str(path))
    modules = [JSONObject(str(path), module, f"[{index}]") for index, module in enumerate(listed)]
    return [(one.text("type").rpartition(".")[2], one) for one in modules]


def _read(folder: Path) -> Pooling:
    kind: PoolingKind | None = None
    normalize = False
    for name, one in _modules(folder):
        if name == "Pooling":
            kind = _kind(folder, one)
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise one.fail("type", f"{name} is not computed here: {_ADVICE}")
    if kind is None:
        raise CheckpointError(f"has no Pooling module: {_ADVICE}", file=str(folder / MODULES_FILE))
    return Pooling(kind, normalize)


def _kind(folder: Path, module: JSONObject) -> PoolingKind:
    inner = module.text("path")
    path = folder / inner / "config.json"
    # By its name: the files of a hub's cache are links to where their contents lie.
    if PurePath(inner).is_absolute() or ".." in PurePath(inner).parts:
        raise module.fail("path", f"{inner!r:.80} lies outside the model's folder")
    if not path.is_file():
        raise module.fail("path", f"there is no {inner}/config.json: {_ADVICE}")
    config = read_object(path)
    on = [key for key in config.values if key.startswith("pooling_mode_") and config.flag(key, False)]
    if "pooling_mode" in config:
        on = [config.text("pooling_mode")]
    if len(on) != 1 or on[0] not in _MODES:
        asked = " and ".join(on) or "none"
        raise CheckpointError(f"asks for {asked}, which is not computed here: {_ADVICE}", file=str(path))
    return _MODES[on[0]]
