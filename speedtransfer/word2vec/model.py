"""Skip-gram with negative sampling (Mikolov et al. 2013) on two tables: `input` for centers, `output` for contexts."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from speedtransfer.device import resolve_device
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.nn import Embedding
from speedtransfer.word2vec.gradients import BlockGradients, skipgram_gradients
from speedtransfer.word2vec.sampler import Block


class SkipGram(nn.Module):
    """Two tables and the loss over a block of words. Each step touches the rows of the block's words alone.

    Parameters
    ----------
    num_words, dim : int
        Shape of both tables.
    window : int
        The largest window that blocks are drawn with.
    negative : int
        Negatives a pair.
    memory : {"auto", "pinned", "pageable", "mmap", "device"}
        Where the rows live.
    path : path-like, optional
        For memory "mmap": the folder for the files ``input.safetensors`` and ``output.safetensors``, made if missing.
    device : torch.device, optional
        The compute device; default: a CUDA device if there is one, else the CPU.
    generator : torch.Generator, optional
        For the first weights: `input` even in ±0.5 / dim, `output` zero, as in word2vec.c.
    """

    def __init__(
        self,
        num_words: int,
        dim: int,
        window: int = 5,
        negative: int = 5,
        memory: str = "auto",
        path: str | os.PathLike[str] | None = None,
        device: torch.device | str | int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.window, self.negative = window, negative
        self.input, self.output = (
            Embedding(num_words, dim, device=resolve_device(device), memory=memory, path=file)
            for file in _table_files(memory, path)
        )
        self.input.table.uniform_(-0.5 / dim, 0.5 / dim, generator=generator)
        self.output.table.zero_()

    @torch.no_grad()
    def deposit_gradients(self, block: Block, with_loss: bool = True) -> BlockGradients:
        """Compute the summed loss of `block` and deposit its gradients for ``optimizer.step()``.

        Parameters
        ----------
        block : Block
        with_loss : bool
            False leaves the loss out, which is faster.

        Returns
        -------
        BlockGradients
            Their memory belongs to the optimizer from now on.
        """
        words = block.words
        num_words = len(words)
        center = self.input.activate(words)
        context = self.output.activate(torch.cat([words, block.negatives.flatten()]))
        result = skipgram_gradients(
            center.rows,
            context.rows,
            center.inverse,
            context.inverse[:num_words],
            context.inverse[num_words:].view_as(block.negatives),
            block.before,
            block.after,
            self.negative,
            with_loss,
        )
        center.add_grad(result.center)
        context.add_grad(result.context)
        return result

    def forward(self, centers: Tensor, contexts: Tensor) -> Tensor:
        """Return the scores of single pairs, shape of `centers`, through autograd: for a loss of your own.

        Parameters
        ----------
        centers, contexts : Tensor of int64, same shape
            Word numbers.
        """
        scores: Tensor = (self.input(centers) * self.output(contexts)).sum(-1)
        return scores


def _table_files(memory: str, path: str | os.PathLike[str] | None) -> list[Path | None]:
    if path is None:
        if memory == "mmap":
            raise InvalidValueError("memory='mmap' needs path, the folder for the table files; pass path='tables'")
        return [None, None]
    folder = Path(path)
    if memory == "mmap":
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make folder {str(folder)!r} ({error.strerror}); choose another path") from error
    return [folder / "input.safetensors", folder / "output.safetensors"]
