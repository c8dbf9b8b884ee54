"""A model card for trained weights: what they are, from which data and command, how good."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from specens.drafters.trained.weights import Trained
from specens.records.files import write_whole

DISTILLED = """A small model of {count} layers, begun from the target's own layers {layers} and
trained on the target's distribution."""
MULTI_TOKEN = """A network (`{architecture}`) that predicts {num_positions} tokens in one pass from
the target's hidden states (layers {hidden_layers})."""
WHAT = {"distilled": DISTILLED, "non_autoregressive": MULTI_TOKEN}


def command_line() -> str:
    """The command that runs now, as a user would type it."""
    return shlex.join(["python", "-m", "specens.train", *sys.argv[1:]])


def model_card(trained: Trained) -> str:
    """Markdown."""
    training, config = trained.training, trained.config
    what = WHAT[trained.kind].format(count=len(config.get("layers", [])), **config)
    size = sum(tensor.numel() for name, tensor in trained.tensors.items() if name != "kept_ids")
    corpus, options = training["corpus"], training["options"]
    steps = "{num_steps} steps of {rows_per_step} rows".format(**options["schedule"])
    numbers = "\n".join(
        f"| {name.removeprefix('eval_')} | {value:.4g} |"
        for name, value in training["held_out"].items()
    )
    return f"""# {trained.kind} drafter of {training["target"]}

{what}
It shares the target's input embeddings and output projection, which are not in the file. It can
only propose: the output stays the target's own.

- Parameters: {size:,}; output vocabulary: {len(trained.tensors["kept_ids"]):,} ids, which cover
  {training["vocabulary_coverage"]:.1%} of the corpus.
- For the target with fingerprint `{trained.target}`; any other is refused.
- Data: {training["corpus_tokens"]:,} tokens written by the target itself (stage=corpus, seed
  {corpus.get("seed")}, {corpus.get("greedy_share", 0.5):.0%} of the answers greedy, the others
  sampled at temperature {corpus.get("temperature")}); no data set.
- Training: {steps} of {options["row_tokens"]} tokens, seed {options["schedule"]["seed"]}.
- Licence: that of the target, of whose layers and text it is made.

```bash
{training["command"]}
```

Held-out text of the same kind:

| | |
|---|---|
{numbers}
"""


def save_with_card(trained: Trained, path: Path) -> None:
    """The weights, and their card beside them."""
    trained.save(path)
    write_whole(path.parent, {f"{path.stem}.md": model_card(trained)})
