"""Fixtures: tiny random models, a scripted target, fake drafters. No downloads, CPU only."""

from __future__ import annotations

import os

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from specens.models.tiny import byte_tokenizer, random_model


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    torch.set_num_threads(1)  # tiny models: threads only cost


@pytest.fixture(scope="session")
def tiny():
    """A random Llama over 128 ids with a context of 128."""
    return random_model(vocab_size=128, max_position_embeddings=128)


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()
