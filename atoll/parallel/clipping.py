"""One gradient norm for a replica whose parameters lie on many workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.parallel.mesh import ReplicaMesh
from atoll.parallel.sharding import local_rows


@torch.no_grad()
def clip_gradients_(
    params: Mapping[str, nn.Parameter], mesh: ReplicaMesh, *, max_norm: float, copies: Collection[str] = ()
) -> float:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does on one process.

    params: those this worker holds. copies: names of those that another worker counts (a tied embedding's second copy).

    Returns the norm over all workers and stages, the same bits on each of them. Where it is not finite nothing is
    scaled, and all workers know that this step is to be left out.
    """
    grads = {name: local_rows(param.grad) for name, param in params.items() if param.grad is not None}
    counted = [
        grads[name] for name in grads if name not in copies and (mesh.data == 0 or isinstance(params[name], DTensor))
    ]
    norm = mesh.sum(_squares(counted))[0] ** 0.5
    if norm < float("inf"):
        scale = min(1.0, max_norm / (norm + 1e-6))
        if scale < 1:
            torch._foreach_mul_(list(grads.values()), scale)
    return norm


def _squares(grads: list[Tensor]) -> float:
    """Sum of squares over all elements; each tensor's own norm is taken in its dtype, as torch does."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return 0.0
    return float(torch.stack([norm.double() for norm in torch._foreach_norm(grads)]).square().sum())
