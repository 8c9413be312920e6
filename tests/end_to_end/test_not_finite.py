"""A model whose numbers overflow: whatever its weights and KV are kept as, its callers get an error, never a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from firsttoken import LLM, SamplingParams
from firsttoken.frontend.failures import GenerationFailed
from tests.support.tiny_folder import WEIGHTS, write_tiny_folder

# What the second layer makes of the one, keys and values too, is not finite. Of the other all is, but no norm's square.
NORM, VALUES = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture(scope="module", params=[(NORM, 1e36), (VALUES, 1e30)], ids=["numbers", "squares"])
def overflowing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are finite, as a load demands."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    weights = load_file(folder / WEIGHTS)
    name, factor = request.param
    weights[name] *= factor
    save_file(weights, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("quantization", ["none", "packed", "int4"])
def test_an_overflow_ends_the_request_with_an_error(overflowing: Path, quantization: str, kv_dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(overflowing), device="cpu", threads=1, quantization=quantization, kv_dtype=kv_dtype) as llm:
        with pytest.raises(GenerationFailed, match="non-finite logits"):
            llm.generate(["hello"], params)
        assert llm.stats.failed == 1
