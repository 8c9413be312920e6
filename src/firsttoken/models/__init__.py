"""Decoder models: one short file a family on shared blocks, and the way of weights from checkpoint to memory."""

from firsttoken.models.decoder import DecoderModel
from firsttoken.models.load import load_model

__all__ = ["DecoderModel", "load_model"]
