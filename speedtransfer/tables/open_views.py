"""Know whether somebody outside has a tensor over a plane: it shows rows as they are stored, so that none may miss steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack


class _Made(NamedTuple):
    """A storage over the memory of a plane, at an address: of views; or of whoever gave that memory, which the plane keeps."""

    address: int
    storage: StorageWeakRef
    is_given: bool

    def is_seen(self) -> bool:
        """Tell whether anybody but a plane has a tensor in it."""
        if self.storage.expired():
            return False
        return not self.is_given or _num_holders is None or _num_holders(self.storage.cdata) > _ours()


class OpenViews:
    """The tensors over planes that callers have, and whatever these have made of them: views, NumPy arrays.

    They have a storage of their own over the memory of the plane, which lives as long as any of them.
    """

    def __init__(self) -> None:
        self.made = list[_Made]()
        self._num_asked = 0

    def of(self, plane: Tensor) -> Tensor:
        """Return a view of the whole of a plane; it counts changes together with the plane."""
        if plane.is_meta or not plane.numel():
            return plane
        self._num_asked += 1
        with torch.inference_mode(False), torch.no_grad():
            storage = self._known(plane)
            if storage is None:
                storage = _another_over(plane)
                self._note(_Made(plane.data_ptr(), StorageWeakRef(storage), False))
            return _with_storage(plane, storage)

    def over_given(self, values: Tensor) -> Tensor:
        """Return a plane over the memory of `values`; who has that memory has views of the plane."""
        if not values.numel():
            return values
        self._note(_Made(values.data_ptr(), StorageWeakRef(values.untyped_storage()), True))
        with torch.no_grad():
            return _with_storage(values, _another_over(values))

    def note_other(self, plane: Tensor, other: Tensor) -> None:
        """Note another tensor over the memory of a plane, which somebody has mapped again."""
        self._num_asked += 1
        self._note(_Made(plane.data_ptr(), StorageWeakRef(other.untyped_storage()), False))

    def follow(self, before: Tensor, after: Tensor) -> None:
        """Let the views of a plane be also those of another map of its memory, which is longer."""
        of_plane = [made for made in self.made if before.numel() and made.address == before.data_ptr()]
        self.made = [*self.made, *(made._replace(address=after.data_ptr()) for made in of_plane)]

    def have(self, storage: UntypedStorage) -> bool:
        """Tell whether a storage is one of theirs."""
        return any(made.storage.cdata == storage._cdata for made in self.made)

    def exist(self, planes: Iterable[Tensor]) -> bool:
        """Tell whether there are any, of `planes` where these are now."""
        return bool(self.made and self._alive(planes))

    def _alive(self, planes: Iterable[Tensor]) -> list[_Made]:
        # Nobody gets at a storage any more that nobody has.
        self.made = [made for made in self.made if made.is_seen()]
        places = {plane.data_ptr() for plane in planes}
        return [made for made in self.made if made.address in places]

    def sign(self, planes: Iterable[Tensor]) -> int | None:
        """Return a number that changes when somebody may have written unseen, by an array made of a view; None: at any time.

        Whoever gave the memory of a plane mostly just keeps it; rows are read ahead all the same.
        """
        return None if any(not made.is_given for made in self._alive(planes)) else self._num_asked

    def _known(self, plane: Tensor) -> UntypedStorage | None:
        """Return the storage of views that are alive, so that tensors over one plane have one storage."""
        for made in self.made:
            if made.address == plane.data_ptr() and not made.is_given:
                # None where the last of them is gone.
                alive, own = UntypedStorage._new_with_weak_ptr(made.storage.cdata), plane.untyped_storage()
                # A plane may have grown where it is; the memory of another table may begin elsewhere.
                if alive is not None and (alive.data_ptr(), alive.nbytes()) == (own.data_ptr(), own.nbytes()):
                    return alive
        return None

    def _note(self, made: _Made) -> None:
        self.made = [*(other for other in self.made if not other.storage.expired()), made]


def _another_over(tensor: Tensor) -> UntypedStorage:
    """Return a storage over the memory of that of `tensor`, which it keeps."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return from_dlpack(memory).untyped_storage()


def _with_storage(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Return `tensor` in `storage`, with one count of changes for both."""
    made = tensor.detach()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    # By `data`, which leaves that count alone.
    made.data = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return made


# None where torch does not tell: then somebody may have the memory.
_num_holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@functools.cache
def _ours() -> int:
    """Return how many hold a storage that nobody else has: a plane, and what Python has made of it."""
    assert _num_holders is not None
    views, memory = OpenViews(), torch.empty(1, device="cpu")
    plane = views.over_given(memory)
    del memory
    assert len(plane)
    return _num_holders(views.made[0].storage.cdata)
