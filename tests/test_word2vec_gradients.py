"""What a block does to rows against autograd on the plain loss, prediction by prediction; compiled loops against torch."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import word2vec_oracle
from torch.utils._python_dispatch import TorchDispatchMode

from speedtransfer.word2vec import Block, gradients
from speedtransfer.word2vec.gradients import DRAWS, MODELS, block_gradients
from speedtransfer.word2vec.places import Places

WAYS = ["compiled", "torch"]
NUM_ROWS = 17  # fewer words than positions: rows repeat


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(gradients, "_may_be_compiled", lambda rows: False)
    return request.param


def draw_block(num_words, window, groups=2, k=8, num_rows=NUM_ROWS, seed=0):
    """Windows of other sizes to both sides, cut at the block and at a few edges of sequences."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    edges = torch.cat([torch.tensor([0, num_words]), draw(0, num_words + 1, num_words // 20)]).unique()
    position, windows = torch.arange(num_words), draw(0, window + 1, num_words)
    sequence = torch.searchsorted(edges, position, right=True)
    before = torch.minimum(windows, position - edges[sequence - 1])
    after = torch.minimum(draw(0, window + 1, num_words), edges[sequence] - 1 - position)
    return Block(draw(0, num_rows, num_words), before, after, draw(0, num_rows, groups * k), num_words)


def draw_tables(dim, num_rows=NUM_ROWS, dtype=torch.float64, scale=0.5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(num_rows, dim, dtype=dtype, generator=generator) * scale for _ in range(2)]


def places_of(block, num_rows, model, negative=5):
    return Places.find(block, num_rows, DRAWS[model] * negative)


def by_hand(vectors, output, block, model, negative=5, **options):
    """Return the result, and both gradients spread over whole tables."""
    places = places_of(block, len(vectors), model, negative)
    centers, contexts = places.bags.rows.ids, places.outputs.ids
    result = block_gradients(vectors[centers], output[contexts], places, model=model, negative=negative, **options)
    grads = torch.zeros_like(vectors), torch.zeros_like(output)
    grads[0][centers], grads[1][contexts] = result.center, result.context
    return result, *grads


SHAPES = [
    (0, 3, 1, 4, 5, 2), (1, 3, 1, 4, 5, 5), (2, 1, 1, 1, 3, 5), (3, 5, 2, 4, 8, 1), (31, 2, 3, 7, 4, 5), (70, 16, 4, 9, 5, 2),
    (50, 20, 1, 9, 5, 7), (127, 3, 5, 10, 1, 5), (128, 5, 1, 40, 3, 5), (129, 5, 2, 30, 4, 5), (300, 7, 2, 33, 5, 3)
]  # fmt: skip
# Models, learning rates, and whether predictions have weights.
KINDS = list(itertools.product(MODELS, [1e-6, 0.05, 0.5], [False, True]))


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("way")
def test_rows_move_as_single_steps_move_them(shape):
    check_steps(*shape, *KINDS[SHAPES.index(shape) * 5 % len(KINDS)])


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_rows_of_every_shape_and_kind_move_as_single_steps_move_them():
    for shape, kind in itertools.product(SHAPES, KINDS):
        check_steps(*shape, *kind)


def check_steps(num_words, window, groups, k, dim, negative, model, rate, weighted):
    tables, block = draw_tables(dim), draw_block(num_words, window, groups, k)
    block = dataclasses.replace(block, window=window if weighted else 0)
    result, *grads = by_hand(*tables, block, model, negative=negative, rate=rate)
    *trained, loss, predictions = word2vec_oracle.train(*tables, block, model, negative, rate)
    assert float(result.num_pairs) == pytest.approx(predictions)
    torch.testing.assert_close(float(result.loss), loss)
    for table, grad, expected in zip(tables, grads, trained, strict=True):
        torch.testing.assert_close(table - rate * grad, expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(grad, (table - expected) / rate, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("way")
def test_at_a_rate_of_next_to_nothing_the_gradient_of_skipgram_is_that_of_autograd():
    (vectors, output), block = draw_tables(6), draw_block(300, 5)
    _, *grads = by_hand(vectors, output, block, "skipgram", negative=5, rate=1e-9)
    vectors.requires_grad_(), output.requires_grad_()
    for i, word in enumerate(block.words.tolist()):
        if around := word2vec_oracle.window_of(block, i):
            drawn = word2vec_oracle.draws_of(i, block, "skipgram", 5)
            positives = [int(block.words[j]) for j in around]
            word2vec_oracle.loss_of(vectors[word], output, positives, drawn, 5).backward()
    for grad, table in zip(grads, (vectors, output), strict=True):
        torch.testing.assert_close(grad, table.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("words", "span"), [([], 1), ([3], 1), ([1, 2, 3], 3), ([1, 2, 1, 3], 2), (list(range(17)) * 2, 16),
                                             ([1] * 5, 1), (list(range(100)), 16)])  # fmt: skip
def test_words_at_once(words, span):
    words, zeros = torch.tensor(words, dtype=torch.int64), torch.zeros(len(words), dtype=torch.int64)
    block = Block(words, zeros, zeros, torch.tensor([0, 1, 2, 3]), len(words))
    places = Places.find(block, 100, num_draws=3)
    assert places.span == span
    assert places.draws.shape == (-(-len(words) // span), 3)
    more = Places.find(block, 100, num_draws=9)
    assert more.draws.shape == (len(places.draws), 4)  # the pool has no more


@pytest.mark.usefixtures("way")
def test_one_pair_by_hand():
    # Two words, both windows 1, vectors of one number: scores 0 and 0, one negative (word 1) weighted by 2 a pair.
    rows, at, nobody = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
    places = Places.find(Block(at, at, 1 - at, torch.tensor([1]), 2), 2, num_draws=12)
    result = block_gradients(rows, torch.zeros(2, 1), places, negative=2)
    assert result.num_pairs == 2
    assert result.loss.item() == pytest.approx(2 * (1 + 2) * 0.693147, rel=1e-5)
    assert result.center.tolist() == [[0.0], [0.0]]  # contexts are zero
    # context 0 meets center 1: -2/2; context 1 meets center 0: -1/2; as a negative: 2 * (1 + 2)/2
    torch.testing.assert_close(result.context, torch.tensor([[-1.0], [2.5]]))
    alone = block_gradients(
        rows, torch.ones(2, 1), Places.find(Block(at, nobody, nobody, torch.tensor([1]), 2), 2, 12), negative=2
    )
    assert (alone.num_pairs, alone.loss) == (0, 0)
    assert not alone.center.any()
    assert not alone.context.any()


@pytest.mark.usefixtures("way")
def test_pairs_count_by_their_distance():
    # Three words, window 2: four pairs at a distance of 1, and two at 2, which word2vec would draw every other time.
    at, reach = torch.arange(3), torch.tensor([0, 1, 2])
    places = Places.find(Block(at, reach, reach.flip(0), torch.tensor([3]), 3, window=2), 4, num_draws=12)
    rows = torch.ones(3, 1), torch.zeros(4, 1)
    result = block_gradients(*rows, places, negative=2)
    assert result.num_pairs == 5
    assert result.loss.item() == pytest.approx(5 * (1 + 2) * 0.693147, rel=1e-5)
    # Contexts meet centers of 1 at a slope of 1/2; the negative stands for two of each pair.
    torch.testing.assert_close(result.context, torch.tensor([[-0.75], [-1.0], [-0.75], [5.0]]))


@pytest.mark.usefixtures("way")
def test_one_word_of_cbow_by_hand():
    # Word 0 is predicted from the mean of 1 and 3, which is 2; its output row is 1, and that of the negative is 0.
    rows = torch.tensor([[9.0], [1.0], [3.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    words, one = torch.tensor([1, 0, 2]), torch.tensor([0, 1, 0])
    places = Places.find(Block(words, one, one, torch.tensor([2]), 3), 3, num_draws=10)
    result = block_gradients(rows[0], rows[1], places, model="cbow")
    assert result.num_pairs == 1
    assert result.loss.item() == pytest.approx(0.126928 + 5 * 0.693147, rel=1e-5)
    slope = -1 / (1 + torch.tensor(2.0).exp())
    torch.testing.assert_close(
        result.center[:, 0], torch.stack([torch.tensor(0.0), slope, slope]), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(result.context[:, 0], torch.stack([2 * slope, torch.tensor(0.0), torch.tensor(5.0)]))


@pytest.mark.sweep
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_words", [17, 33, 50, 240])
@pytest.mark.usefixtures("way")
def test_the_last_span_may_be_any_part_of_one(model, num_words):
    """Where few words repeat, spans have 16 words."""
    tables, block = draw_tables(3, num_rows=1000), draw_block(num_words, 3, 1, 40, num_rows=1000)
    assert word2vec_oracle.span_of(block) == 16
    _, *grads = by_hand(*tables, block, model, rate=0.5)
    *trained, _, _ = word2vec_oracle.train(*tables, block, model, 5, 0.5)
    for table, grad, expected in zip(tables, grads, trained, strict=True):
        torch.testing.assert_close(table - 0.5 * grad, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("model", MODELS)
def test_extreme_scores_and_both_ways_agree(model, monkeypatch):
    block = draw_block(300, 5, 2, 16, num_rows=40)
    tables = draw_tables(33, num_rows=40, dtype=torch.float32, scale=5)  # scores up to about +-500
    compiled, *compiled_grads = by_hand(*tables, block, model, rate=1e-3)
    again, *again_grads = by_hand(*tables, block, model, rate=1e-3)
    assert all(map(torch.equal, compiled_grads, again_grads))
    assert torch.equal(compiled.loss, again.loss)
    monkeypatch.setattr(gradients, "_may_be_compiled", lambda rows: False)
    plain, *plain_grads = by_hand(*tables, block, model, rate=1e-3)
    assert plain.loss.isfinite()
    torch.testing.assert_close(compiled.loss, plain.loss)
    for grad, expected in zip(compiled_grads, plain_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=5e-2)


class Operations(TorchDispatchMode):
    """Notes torch's operations: their names, and whether they accumulate."""

    def __init__(self):
        super().__init__()
        self.names, self.overwriting = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.names.add(name)
        if name.startswith("index_put") and not (args[3] if len(args) > 3 else (kwargs or {}).get("accumulate")):
            self.overwriting.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_on_a_device_nothing_is_read_and_nothing_added_in_any_order(model, with_loss):
    """On the device "meta", which has no values: what the host reads there raises."""
    block, device = draw_block(300, 3), torch.device("meta")
    places = places_of(block, NUM_ROWS, model).to(device)
    rows = [torch.empty(len(groups.ids), 4, device=device) for groups in (places.bags.rows, places.outputs)]
    with Operations() as operations:
        result = block_gradients(*rows, places, model=model, with_loss=with_loss)
    assert [result.center.shape, result.context.shape] == [tensor.shape for tensor in rows]
    assert result.num_pairs.device.type == "cpu"
    assert "mm" in operations.names
    in_any_order = ("index_add", "scatter_add", "scatter_reduce", "put_", "cumsum", "bincount")
    assert not [name for name in operations.names if name.startswith(in_any_order)]
    assert not operations.overwriting  # with accumulate index_put_ sorts first
