"""The shape of a model, independent of the file it came from."""

from __future__ import annotations

import msgspec

from firsttoken.checkpoint.quantized.scheme import QuantScheme


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. ``kind`` is "default", "linear", "llama3" or "yarn"; the other fields are those of
    ``rope_scaling`` in ``config.json`` and are used by the kinds that know them."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and switches of a decoder. ``architecture`` is the Hugging Face class name, whatever the source.

    ``windows`` holds one entry a layer, empty where all layers see the whole context: a layer with a window of ``w``
    sees ``w`` tokens, the token itself included; None sees all. ``local_rope`` is the rope of the layers with a window
    where theirs differs. ``quantized`` says which linears are stored as rounded numbers.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float  # of whichever norm the architecture has
    max_position: int
    rope: RopeConfig | None  # None: q and k are not rotated
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False  # bias on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    alibi: bool = False
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    dtype: str = "bfloat16"  # of the stored weights
    quantized: QuantScheme | None = None

    def window(self, layer: int) -> int | None:
        """How many tokens ``layer`` sees; None: all."""
        return self.windows[layer] if self.windows else None


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's own defaults: every end token, and sampling values (None where it has none)."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to build a tokenizer, from either source.

    Either ``tokenizer_json`` names a file, or ``gguf`` holds the vocabulary read from GGUF metadata. ``add_bos`` and
    ``add_eos`` are None when the tokenizer's own post-processor decides.
    """

    tokenizer_json: str | None = None
    gguf: GGUFVocabulary | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    special_tokens: tuple[str, ...] = ()


class GGUFVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """``tokenizer.ggml.*`` as read: ``kind`` is the GGUF tokenizer model ("gpt2" is byte-level BPE), ``pre`` the name
    of its pre-tokenizer (None: missing). ``token_types`` follow GGUF: 1 normal, 2 unknown, 3 control, 4 user
    defined, 5 unused, 6 byte."""

    kind: str
    pre: str | None
    tokens: list[str]
    merges: list[str]
    token_types: list[int]
    scores: list[float] = []
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    file: str = ""
