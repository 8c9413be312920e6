"""The check that a checkpoint's sampling defaults must pass whatever file they came from."""

from __future__ import annotations

from collections.abc import Mapping

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.errors import CheckpointError, InvalidRequest
from firsttoken.core.sampling_params import SamplingParams

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def check_generation(generation: GenerationConfig, file: str, names: Mapping[str, str]) -> GenerationConfig:
    """Return ``generation`` if requests may take its values; else raise `CheckpointError` naming the file's own key
    (``names`` has those that differ from the field's).

    Unchecked, a wrong default would be refused as a fault of every request that leaves the field out.
    """
    given = {name: value for name in _FIELDS if (value := getattr(generation, name)) is not None}
    try:
        SamplingParams(**given)
    except InvalidRequest as error:
        field = error.param or "sampling"
        raise CheckpointError(error.message, file=file, field=names.get(field, field)) from error
    return generation
