"""A tied embedding whose two ends lie in different stages.

The first stage owns it; the last holds a copy as its head. Both add up the gradients of both, take the same optimizer
step from the same state, and so stay equal to the last bit without ever sending weights:

    first stage   dE ──╮ exchange ╭── dE + dH ── step ── E
    last stage    dH ──╯          ╰── dH + dE ── step ── H = E
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from atoll.parallel.mesh import ReplicaMesh
from atoll.parallel.sharding import local_rows


def tied_names(model: PreTrainedModel) -> tuple[str, str] | None:
    """Names of the embedding and of the head that is the same parameter; None where they are two."""
    if not model.config.tie_word_embeddings:
        return None
    ((head, embedding),) = model._tied_weights_keys.items()
    return embedding, head


@dataclass(frozen=True)
class TiedEmbedding:
    """The ends of a tied embedding that this worker holds: one, both or none.

    params: what this worker holds, by name. owner, copy: names of the two ends. owner_at, copy_at: places on the axis
    `stage` of the workers that hold them.
    """

    params: Mapping[str, nn.Parameter]
    owner: str
    copy: str
    owner_at: int
    copy_at: int
    mesh: ReplicaMesh

    @torch.no_grad()
    def add_gradients_(self) -> None:
        """Give both ends the sum of their gradients."""
        grads = [_rows_of_gradient(self.params[name]) for name in (self.owner, self.copy) if name in self.params]
        if len(grads) == 1:
            grads[0].add_(self._swap(grads[0]))  # x + y is y + x to the last bit
        if len(grads) == 2:
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])

    @torch.no_grad()
    def copy_weights_(self) -> None:
        """Give the copy the weights of its owner, after those were changed by someone else than the optimizer."""
        ends = {name: local_rows(self.params[name]) for name in (self.owner, self.copy) if name in self.params}
        if len(ends) == 2:
            ends[self.copy].copy_(ends[self.owner])
        elif self.owner in ends and ends[self.owner].numel():
            dist.send(ends[self.owner], group=self.mesh.stage_group, group_dst=self.copy_at)
        elif self.copy in ends and ends[self.copy].numel():
            dist.recv(ends[self.copy], group=self.mesh.stage_group, group_src=self.owner_at)

    def _swap(self, mine: Tensor) -> Tensor:
        """What the worker at the other end holds in the place of `mine`."""
        other = self.copy_at if self.owner in self.params else self.owner_at
        theirs = torch.empty_like(mine)
        if mine.numel():
            group = self.mesh.stage_group
            ends = [
                dist.P2POp(dist.isend, mine.contiguous(), group=group, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
        return theirs


def _rows_of_gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "an embedding and a head have a gradient after every backward"
    return local_rows(param.grad)
