"""Rotary embedding out of ``config.json``, in the spellings of several generations of transformers."""

from __future__ import annotations

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.model_config import RopeConfig

_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
# In every kind: names of the kind, the base, and notes that change nothing.
_ROPE_COMMON = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})


def read_rope(config: JSONObject, max_position: int) -> RopeConfig:
    """Both spellings: ``rope_theta`` + ``rope_scaling``, and the newer ``rope_parameters``.

    Keys and kinds follow ``modeling_rope_utils`` of Hugging Face transformers; a kind or key that is not honoured
    raises `CheckpointError`.
    """
    new, old = config.object("rope_parameters"), config.object("rope_scaling")
    rope = new or old or JSONObject(config.file, {}, "rope_scaling")
    if new is not None and old is not None and _rope_kind(old) != _rope_kind(new):
        kinds = _rope_kind(old), _rope_kind(new)
        raise config.fail("rope_scaling", f"is of type {kinds[0]!r} and rope_parameters of type {kinds[1]!r}")
    return _read(rope, config, max_position, config.number("rope_theta", 10000.0))


def read_two_ropes(config: JSONObject, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's two: of the layers that see the whole context, and of those with a window.

    Spelled ``rope_theta`` + ``rope_scaling`` and ``rope_local_base_freq``, or as ``rope_parameters`` by kind of layer.
    Raises `CheckpointError` like `read_rope`.
    """
    new, old = config.object("rope_parameters"), config.object("rope_scaling")
    if new is not None and old is not None:
        raise config.fail("rope_scaling", "stands beside rope_parameters: leave one of them out")
    none = JSONObject(config.file, {}, "rope_parameters")
    parts = {"full_attention": old or none, "sliding_attention": none}
    for key in new.values if new is not None else ():
        if new is None or key not in parts:
            raise none.fail(key, f"is none of the kinds of layers, {' and '.join(parts)}")
        parts[key] = new.object(key) or none
    thetas = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
    whole, local = (
        _read(rope, config, max_position, theta) for rope, theta in zip(parts.values(), thetas, strict=True)
    )
    return whole, local


def _read(rope: JSONObject, config: JSONObject, max_position: int, default_theta: float) -> RopeConfig:
    kind = _rope_kind(rope)
    for key in rope.values:
        if key not in _ROPE_KEYS[kind] and key not in _ROPE_COMMON and rope.get(key) is not None:
            raise rope.fail(key, f"is not supported for rotary embedding of type {kind}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.fail("partial_rotary_factor", "rotary embedding of a part of the head is not supported")
    theta = rope.number("rope_theta", default_theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=rope.number("factor"),
            original_max_position=rope.integer("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.number("factor"),
        original_max_position=rope.integer(
            "original_max_position_embeddings", config.integer("original_max_position_embeddings", max_position)
        ),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _rope_kind(rope: JSONObject) -> str:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROPE_KEYS:
        raise rope.fail("rope_type", f"{kind!r:.80} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    return kind
