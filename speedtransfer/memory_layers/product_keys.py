"""Find the values whose keys fit a hidden state best, where a key is a pair of two half-keys."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from speedtransfer.errors import InvalidValueError, check_choice, check_size

NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "rms": nn.RMSNorm}


class ProductKeys(nn.Module):
    """Choose `k` of ``num_values = n * n`` keys for each head: the part of a `MemoryLayer` that finds rows.

    Each head makes a query of `key_dim` numbers. Key i * n + j is the i-th half-key of its first codebook and the j-th of its
    second, so that its score is the sum of two products with the halves of the query. The best k of all num_values sums are
    among the k * k of the best of either half.

    Parameters
    ----------
    dim, num_values, heads, k, key_dim, query_norm
        As :class:`~speedtransfer.MemoryLayer`, which passes them.
    **place
        `device` and `dtype` of the parameters.

    Attributes
    ----------
    query : Linear
    query_norm : Module, optional
    halves : Parameter
        ``(heads, 2, n, key_dim / 2)``, the half-keys.
    """

    def __init__(
        self,
        dim: int,
        num_values: int,
        heads: int,
        k: int,
        key_dim: int,
        query_norm: Literal["batch", "layer", "rms"] | None,
        **place: Any,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.k = check_size(dim, "dim", 1), check_size(heads, "heads", 1), check_size(k, "k", 1)
        self.key_dim, num_halves = (
            check_size(key_dim, "key_dim", 2),
            math.isqrt(check_size(num_values, "num_values", 1)),
        )
        if num_halves**2 != num_values:
            raise InvalidValueError(
                f"num_values is {num_values} but must be a square number, as keys are pairs of half-keys; pass "
                f"{num_halves**2} or {(num_halves + 1) ** 2}"
            )
        if self.k > num_halves:
            raise InvalidValueError(
                f"k is {k} but {num_values} values have {num_halves} half-keys to choose from; pass at most {num_halves}"
            )
        if self.key_dim % 2:
            raise InvalidValueError(f"key_dim is {key_dim} but a key has two halves; pass an even number")
        if query_norm is not None:
            check_choice(query_norm, "query_norm", NORMS)
        # Not asked of the module: convert_sync_batchnorm puts another in its place.
        self._over_batch = query_norm == "batch"
        width = self.heads * self.key_dim
        self.query = nn.Linear(self.dim, width, **place)
        normed = width if self._over_batch else self.key_dim
        self.query_norm = None if query_norm is None else NORMS[query_norm](normed, **place)
        self.halves = nn.Parameter(torch.empty(self.heads, 2, num_halves, self.key_dim // 2, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the half-keys as ``nn.Linear`` draws its weight; the modules within have parameters of their own to reset."""
        bound = self.halves.shape[-1] ** -0.5
        nn.init.uniform_(self.halves, -bound, bound)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return which values are to be read for `x`, ``(..., dim)``, and their weights.

        Returns
        -------
        tuple of Tensor
            Row numbers (int64) and weights, ``(..., heads, k)`` both; the weights of a head add up to 1.

        Raises
        ------
        InvalidValueError
            `x` has another width.
        """
        if x.shape[-1:] != (self.dim,):
            raise InvalidValueError(
                f"x has shape {tuple(x.shape)} but its last dimension must be dim={self.dim}; pass a state of that width"
            )
        query = self.query(x.reshape(-1, self.dim))
        if self.query_norm is not None:
            query = self.query_norm(query if self._over_batch else query.unflatten(-1, (self.heads, self.key_dim)))
        query = query.reshape(-1, self.heads, 2, self.key_dim // 2)
        best, places = torch.einsum("bhcd,hcnd->bhcn", query, self.halves).topk(self.k)
        sums = best[:, :, 0, :, None] + best[:, :, 1, None, :]
        scores, pairs = sums.flatten(-2).topk(self.k)
        first, second = places.unbind(2)
        rows = first.gather(-1, pairs // self.k) * self.halves.shape[2] + second.gather(-1, pairs % self.k)
        shape = (*x.shape[:-1], self.heads, self.k)
        return rows.view(shape), scores.softmax(-1).view(shape)

    def extra_repr(self) -> str:
        """Describe the keys."""
        return f"heads={self.heads}, k={self.k}, key_dim={self.key_dim}"
