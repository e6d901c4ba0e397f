"""The registers of a program while a step runs in torch."""

from torch import Tensor

from ..models.program import View


class Registers:
    """The registers of a step as tensors [tokens, width]."""

    def __init__(self, tensors: list[Tensor] | None = None) -> None:
        """tensors: fixed memory for each register, which every result is copied to; None: results are kept as they
        come."""
        self._fixed = tensors is not None
        self._tensors: dict[int, Tensor] = {} if tensors is None else dict(enumerate(tensors))

    def get(self, view: View) -> Tensor:
        whole = self._tensors[view.register]
        return whole if view.width == whole.shape[1] else whole[:, view.first : view.first + view.width]

    def put(self, view: View, width: int, value: Tensor) -> None:
        """width: of the register."""
        if not self._fixed and view.width == width:
            self._tensors[view.register] = value
            return
        if view.register not in self._tensors:
            self._tensors[view.register] = value.new_empty((value.shape[0], width))
        target = self.get(view)
        if target.data_ptr() != value.data_ptr():
            target.copy_(value)

    def put_adjacent(self, views: tuple[View, ...], width: int, value: Tensor) -> None:
        """Views that together are adjacent columns."""
        whole = View(views[0].register, views[0].first, sum(view.width for view in views))
        self.put(whole, width, value)

    def drop(self, register: int) -> None:
        if not self._fixed:
            self._tensors.pop(register, None)
