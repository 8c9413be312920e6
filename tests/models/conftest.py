"""Shared input."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 211, (37,), generator=generator).tolist()
