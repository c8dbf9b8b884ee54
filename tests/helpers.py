"""What the tests share: an independent greedy oracle, a scripted target, drafters that propose what
they are given.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specens.config.build import build
from specens.config.compose import compose
from specens.decoding.budgets.base import Policy
from specens.decoding.budgets.costs import CostTable
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.dense import Recording
from specens.decoding.generation import SamplingOptions
from specens.decoding.loop import Decoder
from specens.decoding.sampling import KeyedNoise, Sampler
from specens.decoding.stopping import StopRules
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, StepRecord, TokenTree
from specens.decoding.verify import Coupled, Verifier
from specens.drafters.trained.networks import NetworkConfig
from specens.drafters.trained.weights import Trained, model_fingerprint
from specens.models.load import ModelSpec
from specens.models.tiny import TinyModel
from specens.prompts.sources import DEMO_FILE, Jsonl
from specens.records.writer import RunWriter
from specens.run.job import Job
from specens.run.run_job import run_job
from specens.run.terminal import Terminal
from specens.run.tracker import NoTracker

REPOSITORY = Path(__file__).resolve().parent.parent


@functools.cache
def trained_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer with merges, learnt from the demo prompts. `bpe`: bytes, tokens with a leading
    space (400 ids). `words`: 128 ids, unknown characters, a space put before the first word. `bos`:
    as `bpe`, and it puts `<bos>` in front by itself.
    """
    if kind == "words":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
        )
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
        tokenizer.post_processor = processors.TemplateProcessing(
            "<bos> $A", special_tokens=[("<bos>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", bos_token="<bos>"
    )


def plain_greedy(model, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """New ids by argmax over a full forward without any cache: independent of everything that is
    tested.
    """
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] in eos:
                break
    return ids[len(prompt) :]


class ScriptedTarget:
    """A target whose next-token logits are `fn(prefix)`: one-hot for an id, or a list of logits.
    Its "cache" is the prefix.
    """

    name = "scripted"
    device = torch.device("cpu")
    dtype = torch.float32
    context_limit = None
    tokenizer = None
    origin = None

    def __init__(
        self, fn: Callable[[tuple[int, ...]], int | Sequence[float]], vocab_size: int = 128
    ) -> None:
        self.fn, self.vocab_size = fn, vocab_size

    class Prefix:
        def __init__(self, ids: Sequence[int]) -> None:
            self.ids, self.tree, self.hidden = list(ids), TokenTree(), {}

        def __enter__(self) -> ScriptedTarget.Prefix:
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

        def close(self) -> None: ...

        def accept(self, path: Sequence[int]) -> None:
            self.ids += [self.tree.token_ids[node] for node in path]

    def prefill(self, prompt_ids: Sequence[int], hidden_layers: Sequence[int] = ()) -> Prefix:
        return self.Prefix(prompt_ids[:-1])

    def score(self, cache: Prefix, last_token: int, tree: TokenTree, layout: str) -> torch.Tensor:
        cache.ids.append(last_token)
        cache.tree = tree
        paths = [tree.path_to(node) for node in (ROOT, *range(len(tree)))]
        texts = [(*cache.ids, *(tree.token_ids[node] for node in path)) for path in paths]
        return torch.stack([self._logits(text) for text in texts])

    def _logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        scripted = self.fn(prefix)
        if isinstance(scripted, int):
            logits = torch.full((self.vocab_size,), -10.0)
            return logits.index_fill(0, torch.tensor([scripted]), 10.0)
        return torch.tensor(scripted, dtype=torch.float32)


class Fake:
    """A drafter that proposes `fn(context)`: a list of ids (a chain) or a Draft. `commits` are
    those of the newest sequence.
    """

    def __init__(
        self,
        fn: Callable[[Sequence[int]], Sequence[int] | Draft],
        name: str = "fake",
        depth: int = 8,
    ) -> None:
        self.fn, self.members = fn, (Member(name, depth, 64),)
        self.commits: list[Commit] = []

    def bind(self, target) -> None: ...

    def begin(self, prompt_ids: Sequence[int]) -> FakeProposer:
        self.commits = []
        return FakeProposer(self, self.commits)

    def propose(self, context_ids, plan, sampler) -> Draft:
        proposed = self.fn(context_ids)
        if isinstance(proposed, Draft):
            return proposed
        return Draft.chain(list(proposed)[: plan.num_tokens])


class FakeProposer:
    """One sequence of a Fake."""

    def __init__(self, drafter: Fake, commits: list[Commit]) -> None:
        self.propose, self.commits = drafter.propose, commits

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
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    name: str = "oracle",
    depth: int = 4,
    wrong: bool = False,
):
    """Knows the target's whole output; with `wrong`, every token is off by one (mod 128)."""
    whole = [*prompt, *output]

    def propose(context: Sequence[int]) -> list[int]:
        tokens = whole[len(context) : len(context) + depth]
        return [(token + 1) % 128 for token in tokens] if wrong else tokens

    return Fake(propose, name, depth)


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
    """New ids and step records. `seed`: keyed noise at temperature 1; None is greedy."""
    target = target if hasattr(target, "score") else Target(target)
    drafter.bind(target)
    verifier = verifier or Coupled()
    decoder = Decoder(target, drafter, budget or FixedBudget(), verifier, layout)  # pyright: ignore
    noise = None if seed is None else KeyedNoise(seed, prompt_key)
    sampler = sampler or Sampler(noise=noise, coupled=verifier.coupled)
    stop = stop or StopRules(len(prompt) + count, tuple(eos), target.context_limit)
    steps = list(decode_steps(decoder, prompt, sampler, stop))
    return [token for step in steps for token in step.token_ids], steps


def decode_steps(
    decoder: Decoder,
    prompt: Sequence[int],
    sampler: Sampler,
    stop: StopRules,
    policy: Policy | None = None,
    recording: Recording | None = None,
) -> Iterator[StepRecord]:
    """The steps of one sequence, by default without knowing what they cost."""
    policy = policy or decoder.budget.begin(decoder.drafter.members, CostTable())
    return decoder.decode(decoder.prefill(prompt, recording), sampler, stop, policy)


def run_command(main: Callable[[], object], monkeypatch, folder: Path, *given: str) -> int:
    """The exit code of a command's `main` for these overrides, in this process and in `folder`."""
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


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


TEXTS = [
    "one two one two one",
    "aaaa",
    "The cat sat on the mat. The cat sat",
    "x = 1; y = 2; x = 1; y =",
]


def texts_file(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return jsonl(
        folder / "prompts.jsonl", *({"id": f"p{i}", "text": text} for i, text in enumerate(texts))
    )


def run_drafter(folder: Path, drafter, path: Path, **options) -> dict:
    """A run on the tiny target with a drafter that no configuration names."""
    job = Job(
        target=ModelSpec(TinyModel(), dtype="float32", device="cpu"),  # pyright: ignore
        drafter=drafter,
        prompts=Jsonl(path=str(path)),
        tracker=NoTracker(),
        **{
            "sampling": SamplingOptions(max_new_tokens=12),
            "budget": build_part("budget"),
            "verifier": build_part("verifier"),
            "layout": "tree",
            **options,
        },
    )
    return run_job(job, RunWriter(folder), {}, Terminal())


@functools.cache
def fixed_config() -> DictConfig:
    return compose(["budget=fixed"])


def build_part(part: str):
    return build(fixed_config()[part])
