"""What each layer should take: its reference. What a request takes beyond it is what can be won."""

from __future__ import annotations

from dataclasses import dataclass

# Data sheets: dense BF16 TFLOPS and GB/s of memory.
GPUS: dict[str, tuple[float, float]] = {
    "h200": (989.0, 4800.0),
    "h100": (989.0, 3350.0),
    "a100": (312.0, 2039.0),
    "l40s": (362.0, 864.0),
    "l4": (121.0, 300.0),
}
# Shares of those that good kernels reach, so that a healthy server is not blamed for what nobody gets.
ATTAINABLE_COMPUTE, ATTAINABLE_MEMORY = 0.5, 0.75


@dataclass(frozen=True)
class Reference:
    """In ms. ``rtt_ms`` is a region of one's own; ``tls_ms`` the arithmetic of a handshake, beside its round trips;
    ``fixed_ms`` what a server may take for a request whatever its length, beside one step of the model.

    Those of the model are known with its size and GPU only: None otherwise.
    """

    dns_ms: float = 1.0
    rtt_ms: float = 2.0
    tls_ms: float = 3.0
    proxy_ms: float = 1.0
    transfer_ms: float = 1.0
    fixed_ms: float = 3.0
    prefill_ms_per_token: float | None = None
    decode_ms_per_token: float | None = None


def roofs(gpu: str, parameters: float, weight_bits: int, gpus: int = 1) -> Reference:
    """The reference for a model of ``parameters`` (active ones) on ``gpus`` of a kind: 2 operations a parameter and
    prompt token against the arithmetic, the weights once a decode step against the memory. KV is left out.

    Raises `KeyError` for a GPU that is not in `GPUS`.
    """
    tflops, gb_s = GPUS[gpu]
    return Reference(
        prefill_ms_per_token=2 * parameters / (tflops * 1e9 * ATTAINABLE_COMPUTE * gpus),
        decode_ms_per_token=parameters * weight_bits / 8 / (gb_s * 1e6 * ATTAINABLE_MEMORY * gpus),
    )
