"""The requests, field by field, as in `server.schema`."""

from __future__ import annotations

from typing import Any

import msgspec

from firsttoken.server.schema import ABSENT, Number, TermsRequest


class PoolingRequest(TermsRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all of them share."""

    # after vLLM
    truncate_prompt_tokens: Number | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    # known, not implemented: see refusals.py
    mm_processor_kwargs: Any = None


class EmbeddingRequest(PoolingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/embeddings``. ``input``: a string, token ids, or a list of either; raw until its size is checked."""

    input: msgspec.Raw = ABSENT
    encoding_format: str | None = None
    dimensions: Number | None = None
    normalize: bool | None = None
    # known, not implemented: see refusals.py
    embed_dtype: Any = None
    endianness: Any = None
    messages: Any = None


class ScoreRequest(PoolingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/score``: the texts of one side against those of the other, one with all or in pairs."""

    text_1: msgspec.Raw = ABSENT
    text_2: msgspec.Raw = ABSENT


class RerankRequest(PoolingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/rerank``: documents by their likeness to a query."""

    query: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    top_n: Number | None = None
    return_documents: bool | None = None
