"""From logits to tokens: bias, penalties, temperature, nucleus, log-probabilities; a row never sees its neighbours."""

from firsttoken.sampling.sampler import SampleBatch, Sampler

__all__ = ["SampleBatch", "Sampler"]
