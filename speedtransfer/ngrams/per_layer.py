"""Embeddings of tokens for every layer of a model, in one lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.nn import Embedding, TableOptions, check_pretrained, takes_options
from speedtransfer.tables import Table


class PerLayerEmbedding(Embedding):
    """Give each token a vector for each layer of a model: one row of ``layers * dim`` values, one lookup.

    The weight is ``(num_embeddings, layers * dim)``, as the per-layer embeddings of published models have it, layer by layer.

    Parameters
    ----------
    num_embeddings : int
        Tokens.
    layers, dim : int
        Layers of the model, and values for each.
    **kwargs
        As :class:`~speedtransfer.Embedding`, from `padding_idx` on.

    Examples
    --------
    >>> embedding = PerLayerEmbedding(50, layers=4, dim=8)
    >>> embedding(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 4, 8])
    """

    @takes_options
    def __init__(
        self,
        num_embeddings: int,
        layers: int,
        dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | Table | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        layers, dim = check_size(layers, "layers", 1), check_size(dim, "dim", 1)
        given = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight, _freeze, device, dtype)
        super().__init__(num_embeddings, layers * dim, *given, **options)
        self.layers, self.dim = layers, dim

    def forward(self, input: Any) -> Tensor:
        """Return the vectors of `input` for all layers, ``(*input.shape, layers, dim)``.

        Raises
        ------
        RowIndexError, InvalidTypeError
            As :class:`~speedtransfer.Embedding`.
        """
        return super().forward(input).unflatten(-1, (self.layers, self.dim))

    @classmethod
    @takes_options
    def from_pretrained(  # type: ignore[override]
        cls,
        embeddings: Tensor | Table,
        layers: int,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> PerLayerEmbedding:
        """Make one of the rows of a tensor or table, ``(num_embeddings, layers * dim)``; see `Embedding.from_pretrained`."""
        rows, width = check_pretrained(embeddings, dtype)
        if width % check_size(layers, "layers", 1):
            raise InvalidValueError(
                f"embeddings has {width} columns, which {layers} layers cannot share; pass their number"
            )
        given: Any = {"_weight": embeddings, "_freeze": freeze, "device": embeddings.device, "dtype": dtype, **options}
        return cls(rows, layers, width // layers, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, **given)
