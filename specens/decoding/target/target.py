"""The model whose output is preserved: one forward over a token tree, in either layout."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specens.decoding.target.attention import mask_repeats
from specens.decoding.target.compiled import (
    CannotCompileError,
    CompiledModel,
    CompileOptions,
    widths_for,
)
from specens.decoding.target.kv_cache import KVCache, Masks, attention_windows, tree_masks
from specens.decoding.target.self_check import tolerance, verification_error
from specens.decoding.target.supported import (
    Layout,
    RopeBoundary,
    context_limit,
    model_name,
    refuse_layout,
    refuse_training_mode,
    refuse_unsupported,
    takes,
)
from specens.decoding.types import ROOT, TokenTree
from specens.errors import UserError, one_line


class Target:
    """A causal language model, ready to score trees. Never modified.

    `origin` says how the model was loaded (whatever the loader left there), so that a drafter can
    be built from it. With `exact_width`, every tree is scored as if it had that many nodes, the
    empty one of AR decoding too: the forwards of both are then computed by the same kernels, and in
    half precision round alike far more often.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        origin: Any = None,
        exact_width: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.origin = model, tokenizer, origin
        self.exact_width = exact_width
        self.name = model_name(model)
        refuse_unsupported(model)
        refuse_training_mode(model, "the target")
        self._windows = attention_windows(model.config)
        self._takes_positions = takes(model, "position_ids")
        self._takes_logits_to_keep = takes(model, "logits_to_keep")
        self._rope = RopeBoundary.of(model)
        self.compiled: CompiledModel | None = None

    @property
    def device(self) -> torch.device:
        """Where the input ids go."""
        return self.model.get_input_embeddings().weight.device  # pyright: ignore[reportReturnType]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def is_quantized(self) -> bool:
        return bool(getattr(self.model, "is_quantized", False))

    @property
    def text_config(self) -> Any:
        """The configuration of the decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return int(self.text_config.vocab_size)

    @property
    def context_limit(self) -> int | None:
        """The most tokens of prompt and output together, None when the model sets no limit."""
        return context_limit(self.model)

    def compile(
        self,
        options: CompileOptions | None = None,
        *,
        max_nodes: int = 64,
        hidden_layers: Sequence[int] = (),
        num_tokens: int = 1,
    ) -> None:
        """From now on, score trees of up to `max_nodes` nodes by compiled forwards, and hand out
        the hidden states named. Takes seconds to minutes, for prompts of up to `num_tokens` once
        and for all. Raises CannotCompileError, and then all stays as it was.
        """
        options = options or CompileOptions.of(self.device)
        self._refuse_fixed_shapes()
        try:
            widths = widths_for(max_nodes + 1)
            self.compiled = CompiledModel(self.model, options, widths, hidden_layers)
            self.compiled.reserve(num_tokens)
            error = verification_error(self, "tree")
            if not error <= tolerance(self.dtype, is_quantized=self.is_quantized):
                raise CannotCompileError(f"compiled forwards are off by {error:.2g}")
        except CannotCompileError:
            self.compiled = None
            raise

    def _refuse_fixed_shapes(self) -> None:
        try:
            self.check_layout("tree")
        except UserError as refusal:
            raise CannotCompileError(one_line(refusal)) from refusal
        if self._rope is not None:
            kind = self._rope.kind
            raise CannotCompileError(f"its {kind} rotary positions depend on the length")

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that this model cannot run, by name and with the reason."""
        refuse_layout(self.model, layout)

    def check_prompt(self, prompt_ids: Sequence[int], max_length: int) -> None:
        """Refuse a prompt that is empty, too long, has ids beyond the vocabulary, or whose text
        would cross a length at which the model's positions change.
        """
        num_prompt, limit = len(prompt_ids), self.context_limit
        if num_prompt < 1:
            raise UserError("the prompt is empty: give at least one token")
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < self.vocab_size:
            found = f"{min(prompt_ids)}..{max(prompt_ids)}"
            raise UserError(f"prompt ids must lie in 0..{self.vocab_size - 1}, got {found}")
        if limit is not None and num_prompt >= limit:
            raise UserError(
                f"the prompt has {num_prompt} tokens, and the context of {self.name} is {limit}"
            )
        if self._rope is not None:
            self._rope.check(self.name, num_prompt, max_length)

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int], hidden_layers: Sequence[int] = ()) -> KVCache:
        """The cache of all prompt tokens but the last, with their hidden states on request. Emits
        nothing. Whoever prefills closes the cache.
        """
        cache = self._empty_cache(len(prompt_ids), hidden_layers)
        if len(prompt_ids) > 1:
            ids, positions = list(prompt_ids[:-1]), list(range(len(prompt_ids) - 1))
            try:
                self._forward(cache, [ids], [positions], last_only=True)
            except BaseException:
                cache.close()
                raise
            cache.hidden = {layer: states[0] for layer, states in cache.hidden.items()}
        return cache

    def _empty_cache(self, num_tokens: int, hidden_layers: Sequence[int]) -> KVCache:
        if self.compiled is None:
            return KVCache(hidden_layers)
        try:
            return self.compiled.begin(num_tokens, hidden_layers)
        except CannotCompileError as failure:
            self.compiled = None
            warnings.warn(f"{self.name}: goes on uncompiled: {failure}", stacklevel=2)
            return KVCache(hidden_layers)

    @torch.inference_mode()
    def extend(self, cache: KVCache, token_ids: Sequence[int]) -> torch.Tensor:
        """One more token in every row of a cache of several texts of one length: logits
        `[rows, vocab]`.
        """
        # A mask that hides nothing. Without one, sdpa on a CPU attends head by head, which takes
        # twice the time of a batch.
        masks = self._masks(TokenTree(), cache.length) if self.fits_tree else None
        positions = [[cache.length]] * len(token_ids)
        return self._forward(cache, [[token] for token in token_ids], positions, masks)[:, 0]

    @property
    def fits_tree(self) -> bool:
        """Whether it can run layout=tree."""
        try:
            self.check_layout("tree")
        except UserError:
            return False
        return True

    @torch.inference_mode()
    def score(
        self, cache: KVCache, last_token: int, tree: TokenTree, layout: Layout
    ) -> torch.Tensor:
        """Logits `[num_nodes + 1, vocab]`: row 0 follows the committed text, row i + 1 follows node
        i.

        One forward over [last committed token, nodes]. The cache then holds all of them, until it
        `accept`s a path.
        """
        if self.exact_width is not None and layout == "tree":
            wide = padded(tree, self.exact_width, last_token)
            return self._score(cache, last_token, wide, layout)[: len(tree) + 1]
        return self._score(cache, last_token, tree, layout)

    def _score(
        self, cache: KVCache, last_token: int, tree: TokenTree, layout: Layout
    ) -> torch.Tensor:
        compiled = self.compiled if layout == "tree" else None
        if compiled is not None and compiled.takes(cache, len(tree) + 1):
            return compiled.forward(cache, (last_token, *tree.token_ids), tree.parents)
        if len(tree) == 0:
            cache.open_tree()
            return self._forward(cache, [[last_token]], [[cache.length]])[0]
        score = self._score_tree if layout == "tree" else self._score_rows
        return score(cache, last_token, tree)

    def _score_tree(self, cache: KVCache, last_token: int, tree: TokenTree) -> torch.Tensor:
        base = cache.length
        cache.open_tree()
        positions = [base, *(base + depth for depth in tree.depths)]
        ids = [last_token, *tree.token_ids]
        return self._forward(cache, [ids], [positions], self._masks(tree, base))[0]

    def _masks(self, tree: TokenTree, base: int) -> Masks:
        repeats = mask_repeats(self.model)
        return tree_masks(tree, base, self._windows, self.dtype, self.device, repeats)

    def _score_rows(self, cache: KVCache, last_token: int, tree: TokenTree) -> torch.Tensor:
        base = cache.length
        rows = [tree.path_to(leaf) for leaf in tree.leaves()]
        width = max(len(row) for row in rows)
        cache.open_rows(rows)
        # Padding stands behind a row's own tokens, where causal attention hides it.
        ids = [
            [last_token, *(tree.token_ids[n] for n in row), *[last_token] * (width - len(row))]
            for row in rows
        ]
        positions = [list(range(base, base + 1 + width))] * len(rows)
        logits = self._forward(cache, ids, positions)
        # A shared prefix is read once, from its first row.
        numbered = reversed(list(enumerate(rows)))
        places = {node: (r, i + 1) for r, row in numbered for i, node in enumerate(row)}
        at = [(0, 0), *(places[node] for node in range(len(tree)))]
        at_row, at_column = zip(*at, strict=True)
        return logits[list(at_row), list(at_column)]

    def _forward(
        self,
        cache: KVCache,
        ids: list[list[int]],
        positions: list[list[int]],
        masks: Masks | None = None,
        *,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Logits `[rows, width, vocab]` of one model call that appends to the cache."""
        device = self.device
        inputs: dict[str, Any] = {"input_ids": torch.tensor(ids, device=device)}
        inputs["attention_mask"] = masks
        if self._takes_positions:
            inputs["position_ids"] = torch.tensor(positions, device=device)
        if last_only and self._takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        if cache.hidden_layers:  # the layers named, or all of them from models of the older kind
            inputs["output_hidden_states"] = list(cache.hidden_layers)
        output = self.model(**inputs, cache=cache.dynamic(), use_cache=True)
        cache.hidden = {layer: output.hidden_states[layer] for layer in cache.hidden_layers}
        return output.logits


def padded(tree: TokenTree, num_nodes: int, token: int) -> TokenTree:
    """A tree of `num_nodes` nodes or more: the same, and then nodes that nobody proposed beside it,
    which see no other node.
    """
    extra = max(num_nodes - len(tree), 0)
    return replace(
        tree,
        token_ids=tree.token_ids + (token,) * extra,
        parents=tree.parents + (ROOT,) * extra,
        depths=tree.depths + (1,) * extra,
        owners=tree.owners + (0,) * extra,
    )
