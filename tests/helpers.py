"""What the tests share: an independent greedy oracle, a scripted target, drafters that return what they are told."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specens.decoding.budget import FixedBudget
from specens.decoding.loop import Decoder
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, StepRecord, TokenTree
from specens.decoding.verify import Coupled, Verifier
from specens.drafters.networks import NetworkConfig
from specens.prompts import DEMO_FILE
from specens.trained import Trained, model_fingerprint


@functools.cache
def trained_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer with merges, learnt from the demo prompts. `bpe`: bytes, tokens with a leading space (400 ids). `words`: 128
    ids, unknown characters, a space put before the first word. `bos`: as `bpe`, and it puts `<bos>` in front by itself.
    """
    if kind == "words":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=128 if kind == "words" else 400,
        special_tokens=["<unk>", "<end>", "<bos>"],
        initial_alphabet=[] if kind == "words" else sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(DEMO_FILE.read_text(encoding="utf-8").splitlines(), trainer)
    if kind == "bos":
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", bos_token="<bos>")


def plain_greedy(model, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """New ids by argmax over a full forward without any cache: independent of everything that is tested."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in eos:
                break
    return ids[len(prompt) :]


class ScriptedTarget:
    """A target whose next-token logits are `fn(prefix)`: one-hot for an id, or a list of logits. Its "cache" is the prefix."""

    name = "scripted"
    device = torch.device("cpu")
    dtype = torch.float32
    context_limit = None
    tokenizer = None
    origin = None

    def __init__(self, fn: Callable[[tuple[int, ...]], int | Sequence[float]], vocab_size: int = 128) -> None:
        self.fn, self.vocab_size = fn, vocab_size

    class Prefix:
        def __init__(self, ids: Sequence[int]) -> None:
            self.ids, self.tree, self.hidden = list(ids), TokenTree(), {}

        def accept(self, path: Sequence[int]) -> None:
            self.ids += [self.tree.token_ids[node] for node in path]

    def prefill(self, prompt_ids: Sequence[int], hidden_layers: Sequence[int] = ()) -> Prefix:
        return self.Prefix(prompt_ids[:-1])

    def score(self, cache: Prefix, last_token: int, tree: TokenTree, layout: str) -> torch.Tensor:
        cache.ids.append(last_token)
        cache.tree = tree
        nodes = [ROOT, *range(len(tree))]
        return torch.stack(
            [self._logits((*cache.ids, *(tree.token_ids[n] for n in tree.path_to(node)))) for node in nodes]
        )

    def _logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        said = self.fn(prefix)
        if isinstance(said, int):
            return torch.full((self.vocab_size,), -10.0).index_fill(0, torch.tensor([said]), 10.0)
        return torch.tensor(said, dtype=torch.float32)


class Fake:
    """A drafter that proposes `fn(context)`: a list of ids (a chain) or a Draft."""

    def __init__(
        self, fn: Callable[[Sequence[int]], Sequence[int] | Draft], name: str = "fake", depth: int = 8
    ) -> None:
        self.fn, self.members = fn, (Member(name, depth, 64),)
        self.commits: list[Commit] = []

    def bind(self, target) -> None: ...

    def start(self, prompt_ids: Sequence[int]) -> None:
        self.commits = []

    def propose(self, context_ids, plan, sampler) -> Draft:
        said = self.fn(context_ids)
        return said if isinstance(said, Draft) else Draft.chain(list(said)[: plan.num_tokens])

    def observe(self, commit: Commit) -> None:
        self.commits.append(commit)


def guesser_weights(
    model,
    architecture: str = "block",
    *,
    kept: Sequence[int] = range(0, 128, 2),
    num_positions: int = 4,
    num_layers: int = 2,
    hidden_layers: Sequence[int] = (1, 2),
    seed: int = 5,
) -> Trained:
    """Random weights of a non-autoregressive drafter for a tiny model, in memory."""
    config = model.config
    sizes = NetworkConfig(
        architecture,
        config.hidden_size,
        tuple(hidden_layers),
        num_positions=num_positions,
        num_layers=num_layers,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = sizes.build()
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    tensors = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    tensors["kept_ids"] = torch.tensor(list(kept), dtype=torch.int32)
    return Trained("non_autoregressive", model_fingerprint(model), vars(sizes), {}, tensors)


def text_drafter(
    prompt: Sequence[int], output: Sequence[int], *, name: str = "oracle", depth: int = 4, wrong: bool = False
):
    """Knows the target's whole output; with `wrong`, every token is off by one (mod 128)."""
    whole = [*prompt, *output]

    def say(context: Sequence[int]) -> list[int]:
        tokens = whole[len(context) : len(context) + depth]
        return [(token + 1) % 128 for token in tokens] if wrong else tokens

    return Fake(say, name, depth)


def decode(
    target,
    drafter,
    prompt: Sequence[int],
    count: int = 24,
    *,
    layout: str = "tree",
    budget=None,
    eos: Sequence[int] = (),
    seed: int | None = None,
    sampler: Sampler | None = None,
    stop: StopRules | None = None,
    prompt_key: str = "p",
    verifier: Verifier | None = None,
) -> tuple[list[int], list[StepRecord]]:
    """New ids and step records. `seed` samples with keyed noise at temperature 1; None is greedy."""
    target = target if hasattr(target, "score") else Target(target)
    drafter.bind(target)
    verifier = verifier or Coupled()
    decoder = Decoder(target, drafter, budget or FixedBudget(), verifier, layout)  # pyright: ignore
    noise = None if seed is None else KeyedNoise(seed, prompt_key)
    sampler = sampler or Sampler(noise=noise, coupled=verifier.coupled)
    stop = stop or StopRules(len(prompt) + count, tuple(eos), target.context_limit)
    cache, _ = decoder.prefill(prompt)
    steps = list(decoder.decode(prompt, cache, sampler, stop))
    return [token for step in steps for token in step.token_ids], steps


def door(main: Callable[[], object], monkeypatch, folder: Path, *given: str) -> int:
    """The exit code of a door's `main` for these words, run in this process and in `folder`."""
    monkeypatch.chdir(folder)
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    monkeypatch.setattr(sys, "argv", [main.__module__, *given, *quiet])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        logging.captureWarnings(False)
    return 0
