"""The non-autoregressive drafter: a small network on the target's hidden states predicts several
tokens in one pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specens.decoding.sampling import Sampler
from specens.decoding.target.target import Target
from specens.decoding.types import ROOT, Commit, Draft, Member, Plan
from specens.drafters.trained.networks import Context, Network, NetworkConfig
from specens.drafters.trained.trimmed_head import TrimmedHead
from specens.drafters.trained.weights import Trained, check_weights_path, load_trained
from specens.errors import UserError, check_count, one_line
from specens.models.cpu_linear import DRAFTER_KIND, pack, packing

KIND = "non_autoregressive"


class NonAutoregressive:
    """Proposes the most probable nodes of the product tree: at depth i the network's distribution
    of the i-th next token, whatever stands before it, so a path's probability is taken to be the
    product.

    Under coupled sampling the tokens are ranked with the noise that the target will be sampled
    with. Where drafts are tested instead (verifier=residual), the tree is of the most probable
    tokens, and a chain of samples hangs beside it, from the same distributions but without the
    tokens that the tree begins with: deterministic tokens and one sample do best together.

    `weights` is a file made by stage=non_autoregressive, None takes those that come with the
    package for this target, and a `Trained` in memory is used as it is.
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

    @property
    def network(self) -> Network:
        assert self._network is not None, "bind comes first"
        return self._network

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
            "num_parameters": sum(part.numel() for part in self._network.parameters()),
            "num_output_ids": len(self.head.kept_ids),
            "training": self._training,
        }

    def bind(self, target: Target) -> None:
        weights = self._weights
        is_loaded = isinstance(weights, Trained)
        trained = weights if is_loaded else load_trained(KIND, weights, target.model)
        tensors, member = dict(trained.tensors), self.members[0]
        try:
            kept_ids = tensors.pop("kept_ids")
            layers = tuple(trained.config["hidden_layers"])
            config = NetworkConfig(**{**trained.config, "hidden_layers": layers})
            network = config.build()
            network.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            what = trained.path or "its weights"
            problem = f"do not fit their own description ({one_line(error)}); train them again"
            raise UserError(f"drafter {member.name}: {what} {problem}") from error
        most = config.num_positions
        if member.num_draft_tokens > most:
            given = f"num_draft_tokens={member.num_draft_tokens}"
            problem = f"its weights were trained for {most} positions; give at most {most}"
            raise UserError(f"drafter {member.name}: {given}, but {problem}")
        self.head = TrimmedHead(target.model, kept_ids)
        self.head.to(target.device)  # a target may lie on several devices
        self._network = network.to(self.head.weight).eval()
        if packing(target.model) is not None:
            pack(self._network, "float16")
            self.head.pack(DRAFTER_KIND)
        self._training = trained.training
        self.embeddings = target.model.get_input_embeddings()

    def begin(self, prompt_ids: Sequence[int]) -> NonAutoregressiveProposer:
        return NonAutoregressiveProposer(self)


class NonAutoregressiveProposer:
    """One sequence: the network's context, and hidden states that it has not read yet."""

    def __init__(self, drafter: NonAutoregressive) -> None:
        self._drafter = drafter
        self._context: Context | None = None
        self._pending: list[Mapping[int, torch.Tensor]] = []

    def condition(self, hidden: Mapping[int, torch.Tensor]) -> None:
        self._pending.append(hidden)
        if self._context is None:  # the prompt's are part of prefill, as their number grows with it
            self._read()

    @torch.inference_mode()
    def _read(self) -> Context:
        drafter, context = self._drafter, self._context or Context()
        if self._pending:
            layers = [[part[layer] for part in self._pending] for layer in drafter.hidden_layers]
            joined = [torch.cat(parts).to(drafter.head.weight) for parts in layers]
            context = drafter.network.extend(context, torch.stack(joined, dim=1))
            self._pending = []
        self._context = context
        return context

    @torch.inference_mode()
    def propose(self, context_ids: Sequence[int], plan: Plan, sampler: Sampler) -> Draft:
        context, head = self._read(), self._drafter.head
        if context.length == 0 or plan.num_tokens < 1 or plan.num_nodes < 1:
            return Draft()  # a prompt of one token: the target has not read anything yet
        last = torch.tensor([context_ids[-1]], device=head.weight.device)
        embedded = self._drafter.embeddings(last)[0].to(head.weight)
        logits = head.logits(self._drafter.network.propose(context, embedded)[: plan.num_tokens])
        if not sampler.is_plain_greedy:
            logits = head.spread(logits)
        num_samples = min(len(logits), plan.num_nodes // 2) if sampler.needs_draft_probs else 0
        scores = _ranking(context_ids, logits, sampler)
        num_nodes = plan.num_nodes - num_samples
        top = scores.softmax(-1).topk(min(num_nodes, scores.shape[-1]), dim=-1)
        ids = head.kept_ids[top.indices] if sampler.is_plain_greedy else top.indices
        tree = product_tree(top.values.tolist(), ids.tolist(), num_nodes)
        if not num_samples:
            return tree
        return _with_chain(tree, _samples(context_ids, logits[:num_samples], tree, sampler))

    def observe(self, commit: Commit) -> None: ...


def _ranking(context_ids: Sequence[int], logits: torch.Tensor, sampler: Sampler) -> torch.Tensor:
    """What ranks the tokens of each depth: bare logits `[depth, kept]`, or with processors and
    noise `[depth, vocab]`. The text before a deeper token is taken to be the best one.
    """
    if sampler.is_plain_greedy:
        return logits.float()
    prefix, rows = list(context_ids), []
    for row in logits:
        rows.append(sampler.rank(prefix, row).float())
        prefix.append(int(rows[-1].argmax()))
    return torch.stack(rows)


def product_tree(
    probabilities: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], num_nodes: int
) -> Draft:
    """The `num_nodes` most probable paths, when depth i takes token `token_ids[i][k]` with
    `probabilities[i][k]` (best first), whatever stands before it. A path is never more probable
    than its beginning, so the paths form a tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    # (-probability, depth, rank at this depth, parent node, probability of the parent)
    heap: list[tuple[float, int, int, int, float]] = [(-probabilities[0][0], 0, 0, ROOT, 1.0)]
    while heap and len(tokens) < num_nodes:
        negative, depth, rank, parent, above = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token_ids[depth][rank])
        parents.append(parent)
        confidences.append(-negative)
        if rank + 1 < len(probabilities[depth]) and probabilities[depth][rank + 1] > 0:
            sibling = -above * probabilities[depth][rank + 1]
            heapq.heappush(heap, (sibling, depth, rank + 1, parent, above))
        if depth + 1 < len(probabilities):
            child = negative * probabilities[depth + 1][0]
            heapq.heappush(heap, (child, depth + 1, 0, node, -negative))
    return Draft(tuple(tokens), tuple(parents), confidences=tuple(confidences))


def _samples(
    context_ids: Sequence[int], logits: torch.Tensor, tree: Draft, sampler: Sampler
) -> list[tuple[int, torch.Tensor | None]]:
    """One sample of each depth from logits `[depth, vocab]`, at the first without the tokens that
    `tree` begins with.
    """
    pairs = zip(tree.token_ids, tree.parents, strict=True)
    taken = [token for token, parent in pairs if parent == ROOT]
    prefix, row = list(context_ids), []
    for depth, scores in enumerate(logits):
        if depth == 0:
            index = torch.tensor(taken, device=scores.device)
            scores = scores.index_fill(0, index, -torch.inf)
        samples = sampler.sample(prefix, scores)
        if not samples:
            break
        row += samples
        prefix.append(samples[0][0])
    return row


def _with_chain(tree: Draft, row: Sequence[tuple[int, torch.Tensor | None]]) -> Draft:
    """A tree of deterministic tokens with a chain of samples beside it."""
    parents = (ROOT, *range(len(tree), len(tree) + len(row) - 1))[: len(row)]
    return Draft(
        tree.token_ids + tuple(token for token, _ in row),
        tree.parents + parents,
        draft_probs=(None,) * len(tree) + tuple(probs for _, probs in row),
        confidences=tree.confidences + (None,) * len(row),
    )
