"""A tiny random model with a byte tokenizer: for tests, and to try a configuration without
downloading anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specens.records.files import cache_dir, make_once

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] + "
    "'</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif "
    "%}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after the special tokens `<s>` (0), `</s>` (1), `<pad>` (2): 259 ids. Has
    a chat template.
    """
    specials = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def random_model(
    model_type: str = "llama", *, seed: int = 0, vocab_size: int = 259, **config: Any
) -> PreTrainedModel:
    """A random causal language model of two layers, the same for the same arguments. `config`
    overrides any field.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        # Wide weights: with the usual small ones a random model says the same token for ever.
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **{**sizes, **config})
        )
    return model.eval()


@dataclass(frozen=True)
class TinyModel:
    """A random model as a model source: made in the cache folder, then loaded like any other
    folder.
    """

    model_type: str = "llama"
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None: ...

    def folder(self) -> Path:
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return make_once(cache_dir() / "models" / f"tiny-{self.model_type}-{digest}", self._make)

    def _make(self, folder: Path) -> None:
        byte_tokenizer().save_pretrained(folder)
        random_model(self.model_type, seed=self.seed, **self.config).save_pretrained(folder)
