"""A gradient whose rows are padded, as lookups on a CUDA device leave them: it reads as the dense one all the same."""

import threading

import pytest
import torch

import speedtransfer as st
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.tables import padded_unique

NUM_ROWS, DIM = 7, 3


def padded_gradient(index, sparse=False, changed=None):
    """Return a gradient of padded rows and the dense one."""
    ids, *_, known = padded_unique(torch.tensor(index), NUM_ROWS)
    rows = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(0)) - 5
    rows[ids == NUM_ROWS] = 0
    dense = torch.zeros(NUM_ROWS, DIM)
    dense[ids[ids < NUM_ROWS]] = rows[ids < NUM_ROWS]
    return RowGradient(NUM_ROWS, ids, rows, changed, sparse, known), dense


def _clipped(grad):
    param = torch.nn.Parameter(torch.zeros(NUM_ROWS, DIM))
    param.grad = grad
    return torch.nn.utils.clip_grad_norm_([param], 0.5)


READS = {
    "dense": lambda g: g + 0,
    "max": lambda g: g.max(),
    "min": lambda g: g.min(),
    "sum": lambda g: g.sum(),
    "count_nonzero": lambda g: g.count_nonzero(),
    "norm": lambda g: g.norm(),
    "scaled": lambda g: dense_of(g * 3),
    "masked by row": lambda g: dense_of(g * torch.arange(NUM_ROWS).view(-1, 1)),
    "added": lambda g: dense_of(g + g),
    "indexed": lambda g: g[2],
    "clipped": _clipped,
    "times infinity": lambda g: dense_of(g * float("inf")),
    "times NaN": lambda g: dense_of(g * float("nan")),
}


def dense_of(grad):
    return grad.to_dense() if isinstance(grad, RowGradient) else grad


@pytest.mark.parametrize("index", [[5, 2, 2, 5, 2], [1], [*range(NUM_ROWS), 3, 3, 0], [-1, 2, 40]], ids=str)
def test_reads_as_the_dense_one(index):
    for name, read in READS.items():
        grad, dense = padded_gradient(index)
        torch.testing.assert_close(
            read(grad), read(dense), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
        torch.testing.assert_close(grad.to_dense(), dense)


def test_a_sparse_one_has_no_padding():
    grad, dense = padded_gradient([5, 2, 2], sparse=True)
    assert grad.known.length is not None
    assert grad.detach()._nnz() == 2
    assert grad._indices().tolist() == [[2, 5]]
    assert grad._values().shape == (2, DIM)
    assert torch.equal(grad.coo().to_dense(), dense)


def test_its_owner_hears_of_what_changes():
    heard = []
    grad, _ = padded_gradient([5, 2, 2], changed=lambda before, ids, rows, how: heard.append((ids.tolist(), how)))
    grad.max()
    grad.add_(1)
    grad.zero_()
    torch._foreach_zero_([grad])
    every = list(range(NUM_ROWS))
    assert heard == [([2, 5], "trimmed"), (every, "dense"), (every, "zeroed"), (every, "zeroed")]


def test_an_old_gradient_that_changes_does_not_become_the_new_one():
    emb = st.Embedding(10, 4, idle="lazy")
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1)
    emb(torch.tensor([1, 1, 2])).sum().backward()
    old = emb.weight.grad
    optimizer.zero_grad()
    (emb(torch.tensor([5, 6, 6])) * 10).sum().backward()
    wanted = emb.weight.grad.to_dense()
    old.add_(1)
    assert torch.equal(emb.weight.grad.to_dense(), wanted)
    assert old.to_dense()[0, 0] == 1


def test_a_result_written_to_the_gradient_itself_stays_one_of_rows():
    grad, dense = padded_gradient([5, 2, 2])
    assert torch.clamp(grad, -5, 5, out=grad) is grad
    assert not grad.is_full()
    assert torch.equal(grad.to_dense(), dense.clamp(-5, 5))


def test_backwards_of_several_threads_are_added():
    emb, rounds = st.Embedding(50, 8, idle="lazy"), 200
    ids = torch.arange(50)

    def run():
        for _ in range(rounds):
            emb(ids).sum().backward()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert emb.weight.grad.to_dense().eq(4 * rounds).all()


@pytest.mark.parametrize("table", [{}, {"cache_rows": 3}], ids=str)
@pytest.mark.parametrize("data", [False, True])
def test_updates_of_many_weights_by_their_gradients_are_written(table: dict, data: bool) -> None:
    dense = torch.nn.Embedding(7, 3)
    ours = st.Embedding.from_pretrained(dense.weight.detach().clone(), freeze=False, **table)
    for emb in (dense, ours):
        emb(torch.tensor([1, 5])).pow(2).sum().backward()
        with torch.no_grad():
            weights = [emb.weight.data if data else emb.weight]
            grads = [emb.weight.grad]
            torch._foreach_add_(weights, grads, alpha=-0.1)
            torch._foreach_addcmul_(weights, grads, grads, value=-0.1)
            torch._foreach_lerp_(weights, grads, 0.25)
    assert torch.equal(ours.weight.detach(), dense.weight.detach())
    with torch.no_grad():
        torch._foreach_copy_([ours.weight], [ours.weight.grad])
    assert torch.equal(ours.weight.detach(), ours.weight.grad + 0)


def test_writes_of_gradients_into_a_list_of_tensors_are_counted() -> None:
    emb, value = st.Embedding(7, 3), torch.ones(7, 3, requires_grad=True)
    emb(torch.tensor([1, 5])).sum().backward()
    copy = value * 1
    loss = copy.pow(2).sum()
    with torch.no_grad():
        torch._foreach_add_([copy], [emb.weight.grad])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
