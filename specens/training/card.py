"""A model card for trained weights: what they are, from which data, by which command, with which numbers."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from specens.trained import Trained

WHAT = {
    "distilled": "A small model of {layers} layers, begun from the target's own layers {layers_list} and trained on the target's "
    "distribution. It shares the target's input embeddings and output projection, which are not in the file.",
    "non_autoregressive": "A network (`{architecture}`) that guesses {num_positions} tokens in one pass from the target's hidden "
    "states (layers {hidden_layers}). It shares the target's input embeddings and output projection, which are not in the file.",
}


def command_line() -> str:
    """The command that runs now, as a user would type it."""
    module = Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"specens.{module}", *sys.argv[1:]])


def model_card(trained: Trained) -> str:
    """Markdown."""
    training, config = trained.training, trained.config
    layers = config.get("layers", [])
    what = WHAT[trained.kind].format(**{**config, "layers": len(layers), "layers_list": layers})
    size = sum(tensor.numel() for name, tensor in trained.tensors.items() if name != "kept_ids")
    corpus, schedule = training["corpus"], training["options"]["schedule"]
    numbers = "\n".join(
        f"| {name.removeprefix('eval_')} | {value:.4g} |" for name, value in training["held_out"].items()
    )
    return f"""# {trained.kind} drafter of {training["target"]}

{what} It can only propose: the output stays the target's own.

- Parameters: {size:,}; output vocabulary: {len(trained.tensors["kept_ids"]):,} ids, which cover
  {training["vocabulary_coverage"]:.1%} of the corpus.
- For the target with fingerprint `{trained.target}`; any other is refused.
- Data: {training["corpus_tokens"]:,} tokens written by the target itself (stage=corpus, seed {corpus.get("seed")}, half of the
  answers greedy, half sampled at temperature {corpus.get("temperature")}); no data set.
- Training: {schedule["num_steps"]} steps of {schedule["rows_per_step"]} rows of {training["options"]["row_tokens"]} tokens, seed
  {schedule["seed"]}.
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
    partial = path.with_name(f".{path.stem}.md.{os.getpid()}")
    partial.write_text(model_card(trained))
    os.replace(partial, path.with_suffix(".md"))
