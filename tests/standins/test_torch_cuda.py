"""The tensors that stand in for CUDA count what CUDA would do, and refuse what it would refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from standins.torch_cuda import CUDA, cuda_tensors, get, put  # noqa: E402

WORK: dict[str, tuple[Callable[[Any], Any], tuple[int, int, int]]] = {
    "a view": (lambda x: x[..., :1, :].mT, (0, 0, 0)),
    "an operation": (lambda x: x + 1.0, (0, 0, 1)),
    "in place": (lambda x: x.add_(1.0), (0, 0, 1)),
    "a product": (lambda x: x @ x.mT, (0, 0, 1)),
    "a number in `where`": (lambda x: torch.where(x > 1, x, 0.0), (0, 0, 3)),
    "a list of numbers": (lambda x: torch.asarray([1, 2], device=x.device), (0, 1, 0)),
    "a range": (lambda x: torch.arange(3, device=x.device), (0, 0, 1)),
    "to the device": (lambda x: torch.zeros(3).to(x.device), (0, 1, 0)),
    "from the device": (lambda x: x.cpu(), (1, 0, 0)),
    "to a dtype": (lambda x: x.to(torch.float64), (0, 0, 1)),
    "a number": (lambda x: float(x[0, 0]), (1, 0, 0)),
    "numbers": (lambda x: x.tolist(), (1, 0, 0)),
    "a condition": (lambda x: bool(torch.any(x > 1)), (1, 0, 2)),
    "as many as are True": (lambda x: x[x > 1], (1, 0, 2)),
    "an index in a list": (lambda x: x[[1, 0]], (0, 1, 1)),
    "where it is": (lambda x: torch.asarray(x, device=x.device), (0, 0, 0)),
}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", WORK)
def test_work_is_counted(name: str) -> None:
    function, expected = WORK[name]
    x = torch.arange(6.0).reshape(2, 3)
    with cuda_tensors() as counts:
        on_device = function(put(x.clone()))
        assert (counts.waits.total(), counts.copies.total(), counts.launches.total()) == expected, counts
        if isinstance(on_device, torch.Tensor) and on_device.device == CUDA:
            on_device = get(on_device)
    torch.testing.assert_close(on_device, function(x.clone()), rtol=0, atol=0)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.zeros(2, 3),
        lambda x: torch.zeros(2, 3) * x,
        lambda x: torch.concat([x, torch.zeros(2, 3)]),
        lambda x: torch.index_select(x, 0, torch.tensor([1])),
        lambda x: torch.zeros(2, 3)[x > 1],
    ],
)
def test_two_devices_are_refused(mixed: Callable[[Any], Any]) -> None:
    with cuda_tensors(), pytest.raises(RuntimeError, match=r"the same device; got cuda:0, cpu"):
        mixed(put(torch.ones(2, 3)))


@pytest.mark.needs("torch")
def test_a_number_may_be_on_the_cpu() -> None:
    with cuda_tensors():
        assert get(put(torch.ones(3)) + torch.tensor(1.0)).tolist() == [2, 2, 2]


@pytest.mark.needs("torch")
def test_numpy_cannot_read_the_device() -> None:
    with cuda_tensors(), pytest.raises(TypeError, match="cuda:0 device type tensor to numpy"):
        put(torch.ones(3)).numpy()


@pytest.mark.needs("torch")
def test_autograd_computes_gradients_on_the_device() -> None:
    with cuda_tensors():
        x = put(torch.ones(3)).requires_grad_()
        (x * x).sum().backward()
        assert get(x.grad).tolist() == [2, 2, 2]
