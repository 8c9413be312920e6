"""A model and its executor without memory, on torch's meta device: its steps launch kernels that are only compiled."""

from __future__ import annotations

import torch

from firsttoken.executor.ahead.messages import Order
from firsttoken.executor.graphs.executor import GraphExecutor
from firsttoken.executor.graphs.load import limits
from firsttoken.executor.graphs.runtime import HostRuntime
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.models.load_step import outline_step_model


@torch.inference_mode()
def outline(order: Order) -> GraphExecutor:
    """The executor that an engine of this order has, with the same strides, types and configs everywhere. Of layers
    that launch the same kernels only some are there."""
    device = torch.device("meta")
    config = order.executor
    pool = KVPool(config.kv_format, config.kv_blocks, device="meta")
    model = outline_step_model(order.model, pool, limits(config, order.gpu.name, order.gpu.sms))
    return GraphExecutor(config, model, HostRuntime(device))
