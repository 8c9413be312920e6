"""Puts an engine together from its arguments, and accounts for every part of its start."""

from __future__ import annotations

import gc
import logging
from array import array
from collections.abc import Sequence
from functools import partial

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.core.agreement import SelfCheck
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import naming_file
from firsttoken.core.plan import RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Targets
from firsttoken.devices.interface import Device
from firsttoken.devices.registry import begin_devices
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.last_words import LastWords
from firsttoken.engine.loop import EngineLoop
from firsttoken.engine.resolve import resolve
from firsttoken.engine.self_check import describe_check, self_check
from firsttoken.engine.start_account import StartAccount
from firsttoken.engine.tiers import attach_tiers, kv_name
from firsttoken.executor.interface import Executor
from firsttoken.executor.memory import peak_memory
from firsttoken.grammar.grammars import Grammars
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.eviction import EvictionConfig, ghosts_of, make_policy
from firsttoken.scheduler.admission import Admission
from firsttoken.scheduler.config import SchedulerConfig
from firsttoken.scheduler.scheduler import Scheduler
from firsttoken.transport.channel import EngineEnd
from firsttoken.transport.messages import EngineInfo, Ready

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 40
DEFAULT_TARGETS = Targets()


def build_engine(
    args: EngineArgs,
    channel: EngineEnd,
    account: StartAccount,
    devices: Sequence[Device] | None = None,
    *,
    own_process: bool = False,
) -> EngineLoop:
    """Open the checkpoint, load, warm up, and say `Ready` on ``channel``. ``devices`` are those of
    `registry.begin_devices`, which is called when they are not given; ``own_process`` as in `run.run_engine`.

    Raises `CheckpointError` and `ConfigError`; the caller tells the front end.
    """
    devices = devices if devices is not None else begin_devices(args.device)
    try:
        checkpoint = open_checkpoint(args.model, offline=args.offline, revision=args.revision)
        account.close("checkpoint")
        device, config = resolve(args, checkpoint, devices, say=lambda text: log.info("%s", text))
        account.close("other")
        with naming_file(checkpoint.path):
            executor = device.load(config.executor, checkpoint, account.close)
        account.close("weights")
    finally:
        for begun in devices:
            begun.end()
    warm_up(executor, config, checkpoint)
    account.close("warm_up")
    checked = self_check(executor, config.executor, checkpoint) if args.self_check else None
    if checked is not None:
        account.close("self_check")
        log.info("self-check: %s", describe_check(checked))
    grammars = Grammars.of(checkpoint)
    executor.hold_to(grammars)
    # In a program of somebody else's, its own threads would wait for the interpreter.
    loop = assemble(
        config, checkpoint.fingerprint, executor, channel, args.targets, grammars, grammars_ahead=own_process
    )
    if own_process:
        # What lives now lives to the end: the collector need not walk it again in the middle of a step. Before the
        # first request can come, which would wait for it.
        gc.collect()
        gc.freeze()
    account.close("other")
    info = describe(config, checkpoint, account, device.facts().name, checked)
    if own_process:  # else there is no other process to be gone
        loop.on_orphaned = LastWords(args, info)
    channel.send(Ready(info))
    return loop


def assemble(
    config: EngineConfig,
    fingerprint: str,
    executor: Executor,
    channel: EngineEnd,
    targets: Targets = DEFAULT_TARGETS,
    grammars: Grammars | None = None,
    *,
    grammars_ahead: bool = False,
) -> EngineLoop:
    """Scheduler, KV cache and loop around an executor."""
    name = kv_name(config, fingerprint)
    kv = KVCache(
        config.executor.kv_format,
        config.executor.kv_blocks,
        model=name,
        prefix_caching=config.prefix_caching,
        policy=make_policy(config.eviction, EvictionConfig(ghosts=ghosts_of(config.executor.kv_blocks))),
    )
    attach_tiers(config, name, executor, kv)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.executor.max_num_seqs,
            max_model_len=config.executor.max_model_len,
        ),
        kv,
        config.budget,
        targets=targets,
        window=config.window,
    )
    return EngineLoop(
        scheduler,
        kv,
        executor,
        channel,
        in_flight=config.in_flight,
        admission=Admission(targets, config.executor.max_num_seqs),
        step_time=config.step_time,
        host=config.host,
        peak_memory=partial(peak_memory, config.executor.device),
        grammars=grammars,
        grammars_ahead=grammars_ahead,
    )


def warm_up(executor: Executor, config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Run a prefill and a decode step, so that the first caller does not pay for what torch sets up lazily.

    The KV written here lies in blocks that no prefix chain knows, so it can never be read by a request.
    """
    tokens = min(WARM_UP_TOKENS, config.executor.max_model_len - 1, config.executor.max_step_tokens)
    if tokens < 1:
        return
    format_ = config.executor.kv_format
    prompt = array("I", [i % checkpoint.config.vocab_size for i in range(tokens)])
    start = RowStart(
        slot=0,
        request_id=0,
        tokens=prompt.tobytes(),
        num_prompt=tokens,
        params=SamplingParams(temperature=0.5, top_p=0.9),
        seed=0,
        blocks=list(range(format_.blocks_for(tokens + 1))),
    )
    steps = [
        StepPlan(step_id=-3, starts=[start], work=[RowWork(0, 0, tokens, True)]),
        StepPlan(step_id=-2, work=[RowWork(0, tokens, 1, True)]),
        StepPlan(step_id=-1, work=[RowWork(0, tokens, 1, False)], retire=[]),
    ]
    for plan in steps:
        executor.submit(plan).result()


def describe(
    config: EngineConfig,
    checkpoint: Checkpoint,
    account: StartAccount,
    device_name: str,
    checked: SelfCheck | None = None,
) -> EngineInfo:
    executor = config.executor
    return EngineInfo(
        model=config.model,
        max_model_len=executor.max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        hidden_size=checkpoint.config.hidden_size,
        max_num_seqs=executor.max_num_seqs,
        kv_blocks=executor.kv_blocks,
        block_tokens=executor.kv_format.block_tokens,
        bytes_per_block=executor.kv_format.bytes_per_block,
        device=executor.device,
        dtype=executor.dtype,
        quantization=executor.quantization,
        kv_dtype=executor.kv_format.dtype,
        device_name=device_name,
        kv_outlives=config.disk is not None,
        self_check=checked,
        start_ms={part: round(ms, 1) for part, ms in account.parts.items()},
    )
