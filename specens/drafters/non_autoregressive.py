"""The non-autoregressive drafter: one pass of a small network on the target's hidden states guesses all positions at once."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specens.cpu import DRAFTER_KIND, pack, packing
from specens.decoding.sampling import Sampler
from specens.decoding.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan
from specens.drafters.networks import Context, Network, NetworkConfig
from specens.drafters.vocabulary import TrimmedHead
from specens.errors import UserError, check_count, one_line
from specens.trained import Trained, check_weights_path, load_trained

KIND = "non_autoregressive"


class NonAutoregressive:
    """Proposes the most probable nodes of the product tree: at depth i the network's own distribution of the i-th next token,
    whatever was chosen before it, so a path's probability is taken for the product.

    Under coupled sampling the tokens are ranked with the noise that the target will be sampled with. Where drafts are tested
    instead (verifier=residual), the tree is of the most probable tokens, and a row of draws hangs beside it, from the same
    distributions but without the tokens that the tree begins with: certain tokens and one draw do best together.

    `weights` is a file made by stage=non_autoregressive, None takes those that come with the package for this target, and a
    `Trained` in memory is used as it is.
    """

    def __init__(
        self,
        weights: str | Trained | None = None,
        num_draft_tokens: int = 4,
        num_draft_nodes: int = 16,
        name: str = KIND,
    ) -> None:
        check_count(f"{name}.num_draft_tokens", num_draft_tokens)
        check_count(f"{name}.num_draft_nodes", num_draft_nodes)
        if not isinstance(weights, Trained):
            check_weights_path(KIND, weights)
        self._weights = weights
        self.members = (Member(name, num_draft_tokens, num_draft_nodes),)
        self._network: Network | None = None
        self._pending: list[Mapping[int, torch.Tensor]] = []
        self._context = Context()

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._network.config.hidden_layers if self._network is not None else ()

    def facts(self) -> dict[str, Any]:
        if self._network is None:
            return {}
        config = self._network.config
        return {
            "architecture": config.architecture,
            "num_positions": config.num_positions,
            "hidden_layers": list(config.hidden_layers),
            "num_parameters": sum(parameter.numel() for parameter in self._network.parameters()),
            "num_output_ids": len(self._head.kept_ids),
            "training": self._training,
        }

    def bind(self, target: Target) -> None:
        weights = self._weights
        trained = weights if isinstance(weights, Trained) else load_trained(KIND, weights, target.model)
        tensors, member = dict(trained.tensors), self.members[0]
        try:
            kept_ids = tensors.pop("kept_ids")
            config = NetworkConfig(**{**trained.config, "hidden_layers": tuple(trained.config["hidden_layers"])})
            network = config.build()
            network.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise UserError(
                f"drafter {member.name}: {trained.path or 'its weights'} do not fit their own description "
                f"({one_line(error)}); train them again"
            ) from error
        if member.num_draft_tokens > config.num_positions:
            raise UserError(
                f"drafter {member.name}: num_draft_tokens={member.num_draft_tokens}, but its weights were trained for "
                f"{config.num_positions} positions; give at most {config.num_positions}"
            )
        self._head = TrimmedHead(target.model, kept_ids).to(target.device)  # a target may lie on several devices
        self._network = network.to(self._head.weight).eval()
        if packing(target.model) is not None:
            pack(self._network, "float16")
            self._head.pack(DRAFTER_KIND)
        self._embeddings, self._training = target.model.get_input_embeddings(), trained.training

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._pending, self._context, self._is_new = [], Context(), True

    def condition(self, hidden: Mapping[int, torch.Tensor]) -> None:
        self._pending.append(hidden)
        if self._is_new:  # the prompt's share is work that grows with the prompt: it belongs to the prefill
            self._take_in()
            self._is_new = False

    @torch.inference_mode()
    def _take_in(self) -> None:
        assert self._network is not None, "bind comes first"
        if self._pending:
            layers = [[hidden[layer] for hidden in self._pending] for layer in self.hidden_layers]
            states = torch.stack([torch.cat(parts).to(self._head.weight) for parts in layers], dim=1)
            self._context, self._pending = self._network.extend(self._context, states), []

    @torch.inference_mode()
    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        self._take_in()
        if self._context.length == 0 or plan.num_tokens < 1 or plan.num_nodes < 1:
            return Draft()  # a prompt of one token: the target has not read anything yet
        assert self._network is not None
        last = torch.tensor([context_ids[-1]], device=self._head.weight.device)
        hidden = self._network.propose(self._context, self._embeddings(last)[0].to(self._head.weight))
        logits = self._head.logits(hidden[: plan.num_tokens])
        if not sampler.is_plain_greedy:
            logits = self._head.spread(logits)
        num_drawn = min(len(logits), plan.num_nodes // 2) if sampler.tells_laws else 0
        scores = self._scores(context_ids, logits, sampler)
        top = scores.softmax(-1).topk(min(plan.num_nodes - num_drawn, scores.shape[-1]), dim=-1)
        ids = self._head.kept_ids[top.indices] if sampler.is_plain_greedy else top.indices
        tree = product_tree(top.values.tolist(), ids.tolist(), plan.num_nodes - num_drawn)
        return _with_row(tree, _drawn_row(context_ids, logits[:num_drawn], tree, sampler)) if num_drawn else tree

    def _scores(self, context_ids: Sequence[int], logits: torch.Tensor, sampler: Sampler) -> torch.Tensor:
        """What ranks the tokens of each depth: bare logits `[depth, kept]`, or with processors and noise `[depth, vocab]`. The
        text before a deeper token is taken to be the best one.
        """
        if sampler.is_plain_greedy:
            return logits.float()
        prefix, rows = list(context_ids), []
        for row in logits:
            rows.append(sampler.rank(prefix, row).float())
            prefix.append(int(rows[-1].argmax()))
        return torch.stack(rows)

    def observe(self, commit: Commit) -> None: ...


def product_tree(probabilities: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], num_nodes: int) -> Draft:
    """The `num_nodes` most probable paths, when depth i takes token `token_ids[i][k]` with `probabilities[i][k]` (best first),
    whatever stands before it. A path is never more probable than its beginning, so the paths form a tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    claims: list[float] = []
    # (-probability, depth, rank at this depth, parent node, probability of the parent)
    heap: list[tuple[float, int, int, int, float]] = [(-probabilities[0][0], 0, 0, ROOT, 1.0)]
    while heap and len(tokens) < num_nodes:
        negative, depth, rank, parent, above = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token_ids[depth][rank])
        parents.append(parent)
        claims.append(-negative)
        if rank + 1 < len(probabilities[depth]) and probabilities[depth][rank + 1] > 0:
            heapq.heappush(heap, (-above * probabilities[depth][rank + 1], depth, rank + 1, parent, above))
        if depth + 1 < len(probabilities):
            heapq.heappush(heap, (negative * probabilities[depth + 1][0], depth + 1, 0, node, -negative))
    return Draft(tuple(tokens), tuple(parents), claims=tuple(claims))


def _drawn_row(
    context_ids: Sequence[int], logits: torch.Tensor, tree: Draft, sampler: Sampler
) -> list[tuple[int, torch.Tensor | None]]:
    """One draw of each depth from logits `[depth, vocab]`, at the first without the tokens that `tree` begins with."""
    certain = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == ROOT]
    prefix, row = list(context_ids), []
    for depth, scores in enumerate(logits):
        if depth == 0:
            scores = scores.index_fill(0, torch.tensor(certain, device=scores.device), -torch.inf)
        drawn = sampler.draw(prefix, scores)
        if not drawn:
            break
        row += drawn
        prefix.append(drawn[0][0])
    return row


def _with_row(tree: Draft, row: Sequence[tuple[int, torch.Tensor | None]]) -> Draft:
    """A tree of certain tokens with a row of draws beside it."""
    parents = (ROOT, *range(len(tree), len(tree) + len(row) - 1))[: len(row)]
    return Draft(
        tree.token_ids + tuple(token for token, _ in row),
        tree.parents + parents,
        laws=(None,) * len(tree) + tuple(law for _, law in row),
        claims=tree.claims + (None,) * len(row),
    )
