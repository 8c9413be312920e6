"""What a user may say about the engine. "auto" and None are resolved once, by `engine.resolve`, which logs why."""

from __future__ import annotations

import os

import msgspec

from firsttoken.core.errors import ConfigError
from firsttoken.core.service import Targets
from firsttoken.core.targets_file import read_targets

DEFAULT_MODEL = "smollm2"


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine, under the names of the command line (``--max-model-len`` is ``max_model_len``).

    ``revision`` is a branch, tag or commit of a hub's repository (None: its main branch), refused for any other model.
    ``max_model_len`` in tokens (prompt and output together); ``kv_memory`` in bytes; ``kv_host_memory`` bytes of host
    memory keep KV that the device evicts, 0 for none, and files in the folder ``kv_disk``, of ``kv_disk_size`` bytes at
    most (None: 32 GiB), what passes through that; ``kv_eviction`` is the policy by which each of them evicts
    (`kvcache.eviction`); ``prefill_tokens`` caps the prompt tokens of a step that has no decode row,
    ``mixed_prefill_tokens`` of one that has; ``in_flight`` is how many steps may be submitted before the first one's
    result is read; ``threads`` is for CPU compute; ``engine_core`` is the processor that the engine's own thread keeps
    to, None for any; ``deterministic`` makes the bits of a request's logits independent of the batch, of chunks, caches
    and preemption, where the device offers that; ``batch_window`` is how long a waiting prompt is held back so that
    others can join its step (`scheduler.window`); ``targets`` are the promises of the service classes; a path is read
    as a file of such (`core.targets_file`), for which `ConfigError` is raised; ``self_check`` compares logits with the
    reference that the model's folder holds, where it holds one (`engine.self_check`); ``pooling`` says how prompts
    become vectors (`checkpoint.pooling`); ``chat_template`` is a file with a Jinja template to use in the place of the
    model's own; ``flight_dir`` is the folder of the flight recorder's files (`observability.flight`), None for none.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    kv_memory: int | None = None
    kv_host_memory: int = 0
    kv_disk: str | None = None
    kv_disk_size: int | None = None
    kv_eviction: str = "default"
    prefix_caching: bool = True
    prefill_tokens: int | None = None
    mixed_prefill_tokens: int | None = None
    in_flight: int | None = None
    threads: int | None = None
    batch_window: str = "0"
    engine_core: int | None = None
    deterministic: bool = False
    seed: int = 0
    offline: bool = False
    self_check: bool = True
    pooling: str = "auto"
    chat_template: str | None = None
    flight_dir: str | None = None
    targets: Targets = Targets()

    def check_tiers(self) -> None:
        """Raises `ConfigError` for options of the lower KV tiers of which one lacks another."""
        if self.kv_disk is None and self.kv_disk_size is not None:
            raise ConfigError(
                f"kv_disk_size of {self.kv_disk_size / 2**20:.0f} MiB is for the files in kv_disk, which is not given: "
                "name a folder with kv_disk too, or drop it"
            )
        if self.kv_disk is not None and not self.kv_disk.strip():
            raise ConfigError(f"kv_disk {self.kv_disk!r} is an empty folder name: name a folder, or leave it out")
        if self.kv_disk is not None and not self.kv_host_memory:
            raise ConfigError(
                f"kv_disk {self.kv_disk!r} needs host memory that its files pass through: give kv_host_memory too"
            )
        if self.kv_host_memory and not self.prefix_caching:
            raise ConfigError("kv_host_memory keeps KV to be found again, and prefix_caching is off: drop one")

    def __post_init__(self) -> None:
        given: object = self.targets
        if isinstance(given, str | os.PathLike):
            msgspec.structs.force_setattr(self, "targets", read_targets(given))
