from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.comm.local import drive_together
from atoll.compress import Feedback, TopK, build_compressor, settle, shared_part
from atoll.compress.feedback import RESIDUAL
from atoll.exchange import State


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_round(compressor: Feedback, tensor: Tensor, state: State) -> tuple[Tensor, State]:
    return drive_together([compressor.average(tensor, state)], [1.0])[0]


def test_what_was_left_out_goes_out_later() -> None:
    compressor = Feedback(TopK(k=1, chunk=3))
    state = compressor.init((3,))
    sent = []
    for step in ([4.0, 3.0, -1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
        mean, state = one_round(compressor, torch.tensor(step), state)
        sent.append(mean.tolist())
    assert sent == [[4.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, -1.0]]
    assert state[RESIDUAL].tolist() == [0.0] * 3


def test_beta_fades_what_is_owed() -> None:
    compressor = Feedback(TopK(k=1, chunk=2), beta=0.5)
    _, state = one_round(compressor, torch.tensor([8.0, 4.0]), compressor.init((2,)))
    mean, state = one_round(compressor, torch.tensor([1.0, 0.0]), state)
    assert mean.tolist() == [0.0, 2.0] and state[RESIDUAL].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_held_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    compressor = Feedback(TopK(), residual_dtype=dtype)
    state = compressor.init((100, 100))
    assert state[RESIDUAL].dtype == dtype and state[RESIDUAL].shape == (100, 100)
    _, state = one_round(compressor, noise(100, 100), state)
    assert state[RESIDUAL].dtype == dtype and state[RESIDUAL].any()


def test_a_round_that_did_not_count_leaves_what_is_owed_and_moves_what_is_shared() -> None:
    compressor = build_compressor("lowrank")
    before = compressor.init((300, 400))
    before |= {RESIDUAL: noise(300, 400, seed=3)}
    _, after = one_round(compressor, noise(300, 400), before)
    settled = settle(before, after, counted=False)
    assert settled[RESIDUAL] is before[RESIDUAL]
    assert settled["warm_start"] is after["warm_start"]
    assert settle(before, after, counted=True) is after
    assert set(shared_part(after)) == {"warm_start"}


def test_a_tensor_that_lies_turned_in_memory_owes_the_right_elements() -> None:
    compressor = Feedback(TopK(k=1, chunk=6))
    turned = torch.arange(6.0).view(2, 3).t()
    mean, state = one_round(compressor, turned, compressor.init((3, 2)))
    assert torch.equal(mean + state[RESIDUAL], turned)


def test_feedback_is_as_divisible_as_what_it_wraps() -> None:
    assert build_compressor("stat2").elementwise
    assert not build_compressor("topk").elementwise
