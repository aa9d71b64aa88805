"""Know whether somebody outside has a tensor over a plane: it shows rows as they are stored, so that none may miss steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack


class OpenViews:
    """The tensors over planes that callers have, and whatever these have made of them: views, NumPy arrays.

    They have a storage of their own over the memory of the plane, which lives as long as any of them.
    """

    def __init__(self) -> None:
        # The name of a plane, the address of its memory, and a storage over it: of views, whose it is alone, or of the caller
        # whose memory it was, which the plane keeps too.
        self.made = list[tuple[str, int, StorageWeakRef | int]]()

    def of(self, name: str, plane: Tensor) -> Tensor:
        """Return a view of the whole of a plane; it counts changes together with the plane."""
        if plane.is_meta or not plane.numel():
            return plane
        with torch.inference_mode(False), torch.no_grad():
            return _with_storage(plane, self._known(name, plane) or self._new(name, plane))

    def _known(self, name: str, plane: Tensor) -> UntypedStorage | None:
        """Return the storage of views that are alive, so that tensors over one plane have one storage."""
        for other, address, storage in self.made:
            if other == name and address == plane.data_ptr() and isinstance(storage, StorageWeakRef):
                # None where the last of them is gone.
                alive = UntypedStorage._new_with_weak_ptr(storage.cdata)
                if alive is not None and alive.nbytes() == plane.untyped_storage().nbytes():
                    return alive
        return None

    def _new(self, name: str, plane: Tensor) -> UntypedStorage:
        storage = _another_over(plane)
        self.made.append((name, plane.data_ptr(), StorageWeakRef(storage)))
        return storage

    def over_given(self, name: str, values: Tensor) -> Tensor:
        """Return a plane over the memory of `values`; who has that memory has views of the plane."""
        if not values.numel():
            return values
        self.made.append((name, values.data_ptr(), values.untyped_storage()._cdata))
        with torch.no_grad():
            return _with_storage(values, _another_over(values))

    def exist(self, planes: Mapping[str, Tensor]) -> bool:
        """Tell whether there are any, of `planes` where these are now."""

        def alive(name: str, address: int, storage: StorageWeakRef | int) -> bool:
            if isinstance(storage, StorageWeakRef):
                return not storage.expired()
            return name in planes and planes[name].data_ptr() == address

        self.made = [each for each in self.made if alive(*each)]
        return any(
            name in planes and planes[name].data_ptr() == address and _is_seen(storage)
            for name, address, storage in self.made
        )


def _is_seen(storage: StorageWeakRef | int) -> bool:
    return isinstance(storage, StorageWeakRef) or _num_holders is None or _num_holders(storage) > _ours()


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
    views, memory = OpenViews(), torch.empty(1, device="cpu")
    plane = views.over_given("", memory)
    storage = views.made[0][2]
    del memory
    assert len(plane)
    assert isinstance(storage, int)
    return _num_holders(storage) if _num_holders is not None else 0
