"""Draws token_tree.svg: one step of the default ensemble on the default target.

python docs/images/token_tree.py
"""

from itertools import accumulate
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

import specens
from specens.analysis.figures.tree import token_tree
from specens.decoding.budgets.fixed import FixedBudget
from specens.decoding.types import TokenTree, Verdict
from specens.decoding.verify import Coupled

DRAFTERS = ["ngram", "retrieval", "non_autoregressive", "distilled", "quantized"]
PROMPT = (
    "Repeat this sentence twice, and then explain it: The quick brown fox jumps over the lazy dog "
    "because the dog does not move."
)


class Recorder(Coupled):
    """The default verifier, which also keeps what it verified."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self, tree, scores):
        verdict = super().__call__(tree, scores)
        self.seen.append((tree, verdict))
        return verdict


def main() -> None:
    disable_progress_bar()
    model, tokenizer = specens.load_model("smollm2-135m")
    recorder = Recorder()
    speculative = specens.attach(
        model, tokenizer, DRAFTERS, budget=FixedBudget(max_nodes=12), verifier=recorder
    )
    chat = [{"role": "user", "content": PROMPT}]
    given = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = given["input_ids"]
    output = speculative.generate(ids, max_new_tokens=96)[0].tolist()
    ends = accumulate((len(verdict.path) + 1 for _, verdict in recorder.seen), initial=ids.shape[1])
    steps = [(*seen, end) for seen, end in zip(recorder.seen, ends, strict=False)]
    tree, verdict, committed = max(steps, key=lambda step: telling(*step[:2]))

    def text(token: int) -> str:
        return repr(tokenizer.decode([token]))[1:-1].replace(" ", "\u00b7")

    print(tokenizer.decode(output[ids.shape[1] : committed]))
    figure = token_tree(
        tree,
        verdict,
        [text(token) for token in tree.token_ids],
        DRAFTERS,
        context=text(output[committed - 1]),
        target_text=text(verdict.target_token),
    )
    figure.savefig(Path(__file__).with_name("token_tree.svg"))


def telling(tree: TokenTree, verdict: Verdict) -> int:
    """How much a step shows: several owners along an accepted path of three or four nodes."""
    owners = [tree.owners[node] for node in verdict.path]
    return (3 <= len(owners) <= 4) * (4 * len(set(owners)) + len(set(tree.owners)))


if __name__ == "__main__":
    main()
