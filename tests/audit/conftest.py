from __future__ import annotations

import copy

import pytest
import torch


@pytest.fixture(scope="session")
def near():
    """A function of a model and a seed: a model near it."""

    def near(model, seed: int):
        changed = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        return changed

    return near
