"""AdamW whose moments are in host memory, and visit the GPU for the update, a part at a time (`offload_optimizer`).

    parameter  0       1         2        moments of all parameters: one block of host memory, pinned for a GPU
    part       0 1 2 | 3 4 5 6 | 7        fetch part 3 | update part 2 | send part 2 back, while part 3 comes

The kernel of AdamW updates each part, so that weights and moments have the same bits as without offload.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adamw import adamw

from treepack.errors import TreepackError
from treepack.memory.device_memory import local_part
from treepack.memory.host_pages import PAGE, PageCopies, copies_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with `options` of torch's; the moments of a sharded parameter are sharded like it, in host memory.

    Parameters are contiguous, float32, and on `device`; `size` bytes of each moment are there at a time, twice.
    """

    def __init__(
        self,
        params: Any,
        *,
        device: torch.device,
        copies: Callable[[torch.device], PageCopies] = copies_of,
        size: int = PAGE,
        **options: Any,
    ) -> None:
        """Start without moments; `copies` makes the copies to the device, and those back."""
        super().__init__(params, fused=True, **options)
        self._device, self._length = device, size // 4
        self._coming, self._going = copies(device), copies(device)

    @property
    def _parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def prepare(self) -> None:
        """Allocate the moments that the next update needs.

        Raises:
            TreepackError: the driver does not pin so much host memory.
        """
        self._allocate([each for each in self._parameters if each.grad is not None and not self.state[each]])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients; complete in host memory when the method returns."""
        self.prepare()
        parts = [part for group in self.param_groups for each in group["params"] for part in self._parts(each, group)]
        room = torch.empty(2, 2, self._length if parts else 0, device=self._device)
        fetched, sent = [self._fetch(part, room[0]) for part in parts[:1]], None
        for number, (own, home, update) in enumerate(parts):
            moments, arrived = fetched.pop()
            self._coming.wait(arrived)
            if number:  # two parts have room, so the part before this one leaves before the next one comes
                self._going.wait(sent)
            fetched += [self._fetch(part, room[(number + 1) % 2]) for part in parts[number + 1 : number + 2]]
            update(*own, *moments)
            for moment, there in zip(moments, home, strict=True):
                sent = self._going.to_pages(moment.view(torch.uint8), [there.view(torch.uint8)])
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.state[parameter]["step"] += 1
        if sent is not None:
            sent.synchronize()  # a checkpoint reads the moments without asking the GPU

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of torch's AdamW, whose moments may be anywhere, into host memory."""
        # The base class would put moments on the device.
        super().load_state_dict({**state_dict, "state": {}})
        loaded = {self._parameters[number]: values for number, values in state_dict["state"].items()}
        self._allocate(list(loaded))
        for parameter, values in loaded.items():
            for name in (*_MOMENTS, "step"):
                local_part(self.state[parameter][name]).copy_(local_part(values[name]))

    def _allocate(self, parameters: Sequence[Tensor]) -> None:
        block, begin = zeros_in_host(2 * sum(local_part(each).numel() for each in parameters), self._device), 0
        for parameter in parameters:
            own = local_part(parameter)
            self.state[parameter]["step"] = torch.zeros((), device=self._device)
            for name in _MOMENTS:
                # empty_like keeps the mesh. Checkpoints make deep copies, which copy all of the storage of a tensor.
                self.state[parameter][name] = moment = torch.empty_like(parameter, device="cpu", requires_grad=False)
                part = torch.from_numpy(block[begin : (begin := begin + own.numel())])
                local_part(moment).set_(part.untyped_storage(), 0, own.shape, own.stride())

    def _parts(self, parameter: Tensor, group: dict[str, Any]) -> list[tuple[Any, Any, Callable[..., None]]]:
        """Return weights and gradients [n], moments [n] in host memory, and the update, of each part."""
        if parameter.grad is None:
            return []
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}

        def update(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
            step = state["step"].clone()  # the kernel counts in place
            adamw([weight], [grad], [first], [second], [], [step], beta1=beta1, beta2=beta2, **options)

        whole = (parameter, parameter.grad, *(state[name] for name in _MOMENTS))
        split = [torch.split(local_part(each).view(-1), self._length) for each in whole]
        return [((w, g), (first, second), update) for w, g, first, second in zip(*split, strict=True)]

    def _fetch(self, part: tuple[Any, Any, Any], room: Tensor) -> tuple[list[Tensor], Any]:
        """Start to copy the moments of a part to `room` [2, N]; return them, and the event of the last copy."""
        _, home, _ = part
        moments, arrived = [row[: len(there)] for row, there in zip(room, home, strict=True)], None
        for moment, there in zip(moments, home, strict=True):
            arrived = self._coming.to_tensor([there.view(torch.uint8)], moment.view(torch.uint8))
        return moments, arrived


def zeros_in_host(count: int, device: torch.device) -> NDArray[np.float32]:
    """Return zeros, float32 [count], in host memory that a GPU reads and writes by itself while a view of it lives.

    Raises:
        TreepackError: the driver does not pin so much.
    """
    if device.type != "cuda" or not count:
        return np.zeros(count, np.float32)
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # Separate pages, because the driver pins no page twice. Not pin_memory=True, which rounds up to a power of two.
    block = np.frombuffer(mmap(-1, 4 * count, flags=MAP_PRIVATE | MAP_ANONYMOUS), np.float32)
    logging.getLogger("treepack").info("pinning %.1f GiB of host memory for the optimiser", block.nbytes / 2**30)
    if int(driver.cudaHostRegister(block.ctypes.data, block.nbytes, 0)):
        raise TreepackError(
            f"the GPU driver does not pin {block.nbytes / 2**30:.1f} GiB of host memory for the optimiser (ulimit -l, "
            "or a limit of the container); train with --no-offload-optimizer"
        )
    # The driver must forget the pages before they are free.
    weakref.finalize(block, driver.cudaHostUnregister, block.ctypes.data).atexit = False
    return block
