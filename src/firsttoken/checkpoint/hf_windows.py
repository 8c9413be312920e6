"""Which layers see only a window of the context, out of ``config.json``."""

from __future__ import annotations

from firsttoken.checkpoint.families import Family, Windows
from firsttoken.checkpoint.json_files import JSONObject

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_windows(config: JSONObject, family: Family, num_layers: int, max_position: int) -> tuple[int | None, ...]:
    """`ModelConfig.windows`: empty when no layer has a window shorter than the context.

    Raises `CheckpointError` for windows that the architecture does not have, and for keys that contradict each other.
    """
    window = _window(config, family)
    stated = _stated_layers(config, num_layers)
    if window is None:
        if any(stated or ()):
            raise config.fail("layer_types", f"names {_SLIDING} layers, but there is no sliding_window")
        if family.windows is Windows.PERIODIC and stated is None:
            raise config.fail("sliding_window", "must be a number of tokens: the architecture has layers with a window")
        return ()
    # Where windows come with a rope table of their own, they tell which layers have it.
    if window >= max_position and not family.two_ropes:
        return ()
    if family.windows is Windows.NONE:
        raise config.fail(
            "sliding_window",
            f"this architecture has no window, got one of {window} tokens (max_position_embeddings is {max_position})",
        )
    rule = _layers_by_rule(config, family, num_layers)
    if stated is not None and family.windows is Windows.ALL and stated != rule:
        raise config.fail("layer_types", f"must be {_SLIDING} in every layer of this architecture")
    sliding = rule if stated is None else stated
    return tuple(window if slides else None for slides in sliding) if any(sliding) else ()


def _window(config: JSONObject, family: Family) -> int | None:
    """The window's length, whichever layers have it; a null turns it off."""
    if not config.flag("use_sliding_window", family.windows is not Windows.UPPER):
        return None
    if "sliding_window" in config.values:
        return config.optional_integer("sliding_window")
    return None if family.windows is Windows.NONE else family.window


def _stated_layers(config: JSONObject, num_layers: int) -> list[bool] | None:
    """For each layer of ``layer_types`` whether it has the window; None where there is no such list."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.fail("layer_types", f"must list {num_layers} kinds, one a layer, got {kinds!r:.80}")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise config.fail("layer_types", f"{kind!r:.80} is not supported, only {_FULL} and {_SLIDING} are")
    return [kind == _SLIDING for kind in kinds]


def _layers_by_rule(config: JSONObject, family: Family, num_layers: int) -> list[bool]:
    layers = range(num_layers)
    match family.windows:
        case Windows.UPPER:
            first = config.integer("max_window_layers", 28)
            return [layer >= first for layer in layers]
        case Windows.PERIODIC:
            period = config.integer("sliding_window_pattern", family.window_period)
            if period < 1:
                raise config.fail("sliding_window_pattern", f"is {period}, must be 1 or more")
            return [(layer + 1) % period != 0 for layer in layers]
    return [True] * num_layers
