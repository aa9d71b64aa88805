"""N-gram hashes and embeddings: against references in plain Python, ``torch.nn``, and the constants of published models."""

import copy
import functools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from refusals import check_refused, refusals
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.ticket import _open as open_tickets


def window(tokens, at, order, ends, begins, fill):
    """Return the tokens of the n-gram that ends at a position, the last first, walking back token by token."""
    found = [tokens[at]]
    cut = tokens[at] in begins
    for back in range(1, order):
        place = at - back
        cut = cut or place < 0 or tokens[place] in ends
        found.append(fill if cut else tokens[place])
        cut = cut or (place >= 0 and tokens[place] in begins)
    return found


def reference(ngrams, tokens):
    """Return the row numbers of all positions, in Python's integers."""
    known = ngrams.constants
    ends, begins = {*known.eos, *([] if known.pad is None else [known.pad])}, set(known.bos)
    rows = []
    for at in range(len(tokens)):
        row, head = [], 0
        for order in known.orders:
            parts = window(tokens, at, order, ends, begins, known.fill)
            if known.token_map is not None:
                parts = [int(known.token_map[part]) for part in parts]
            for _ in range(known.heads):
                size = known.sizes[head]
                if known.scheme == "xor":
                    number = 0
                    for part, multiplier in zip(parts, known.numbers, strict=False):
                        number ^= part * multiplier
                else:
                    number = sum(part * known.vocab_size**place for place, part in enumerate(parts))
                row.append(sum(known.sizes[:head]) + number % size)
                head += 1
        rows.append([known.padding_row] * head if tokens[at] == known.pad else row)
    return rows


@settings(max_examples=60, deadline=None)
@given(some.data())
def test_rows_are_those_of_the_reference(data):
    vocab = data.draw(some.integers(2, 60))
    token = some.integers(0, vocab - 1)
    options = {
        "orders": tuple(sorted(data.draw(some.sets(some.integers(1, 5), min_size=1, max_size=3)))),
        "heads": data.draw(some.integers(1, 3)),
        "scheme": data.draw(some.sampled_from(["xor", "polynomial"])),
        "eos": data.draw(some.none() | token | some.lists(token, max_size=2)),
        "bos": data.draw(some.none() | token),
        "pad": data.draw(some.none() | token),
        "fill": data.draw(some.none() | token),
        "layer": data.draw(some.integers(0, 2)),
        "token_map": data.draw(some.none() | some.lists(some.integers(0, 9), min_size=vocab, max_size=vocab)),
    }
    rows = data.draw(some.integers(1, 500) | some.just(2**40))
    ngrams = st.NgramHash(rows=rows, vocab_size=vocab, seed=data.draw(some.integers(0, 99)), **options)
    tokens = data.draw(some.lists(token, min_size=1, max_size=12))
    expected = reference(ngrams, tokens)
    assert ngrams(torch.tensor(tokens)).tolist() == expected
    # In two parts, as while a model generates.
    cut = data.draw(some.integers(0, len(tokens) - 1))
    rest = ngrams(torch.tensor([tokens[cut:]]), torch.tensor([tokens[:cut]], dtype=torch.int64))
    assert rest.tolist() == [expected[cut:]]
    assert all(0 <= row < ngrams.num_rows for part in expected for row in part)


def test_constants_of_qwen4_exp():
    """The three multipliers, and 320,001,536 rows of primes from 20 million on, are those in its published weights."""
    ngrams = st.NgramHash((2, 3), 8, 20_000_000, vocab_size=248_320, seed=1234, eos=248_044, divisible_by=128)
    assert ngrams.constants.numbers == [23703573157769, 20109073645365, 8052911324071]
    assert ngrams.num_rows == 320_001_536
    assert ngrams.sizes[:3] == (20_000_003, 20_000_023, 20_000_033)
    assert ngrams.offsets[7:9] == (140_000_297, 160_000_374)
    tokens = [9707, 11, 1879, 248_044, 785, 6722]
    assert ngrams(torch.tensor([tokens])).tolist() == [reference(ngrams, tokens)]
    assert ngrams.constants.fill == 248_044


def test_constants_of_deepseek():
    """Tables of 384,006,168 and 384,016,682 rows, three orders of eight heads, as its configuration says."""
    token_map = torch.arange(129_280) % 99_092
    layers = {"token_map": token_map, "layers": (1, 14)}
    first, second = (st.NgramHash.engram([16_000_000] * 3, layer=layer, **layers) for layer in (1, 14))
    assert (first.num_rows, second.num_rows) == (384_006_168, 384_016_682)
    assert not set(first.sizes) & set(second.sizes)
    # NumPy's generator, of a seed 10007 apart for each layer; the bound is that of compressed tokens.
    drawn = np.random.default_rng(10007 * 14).integers(0, (2**63 - 1) // 99_092 // 2, size=(4,), dtype=np.int64)
    assert second.constants.numbers == [2 * int(value) + 1 for value in drawn]
    tokens = [5, 99_092, 77, 100_000]
    found = second(torch.tensor(tokens))
    assert found.tolist() == reference(second, tokens)
    # Tokens with the same compressed number are one.
    assert torch.equal(found, second(torch.tensor([5, 0, 77, 908])))


def test_rows_of_longcat():
    """Each order of four has four heads of 78 rows a token and the odd distances from there."""
    ngrams = st.NgramHash.longcat(131_072, 78, eos=2)
    least = 78 * 131_072
    assert ngrams.sizes == tuple(least + 2 * head + 1 for head in range(12))
    tokens = [5, 2, 131_071, 2, 2, 9, 8, 7, 6]
    assert ngrams(torch.tensor([tokens])).tolist() == [reference(ngrams, tokens)]
    # Nothing before: the polynomial is the token itself.
    assert ngrams(torch.tensor([[5]]))[0, 0].tolist() == [5 + offset for offset in ngrams.offsets]


def test_shapes_dtypes_and_devices():
    ngrams = st.NgramHash((2, 4), 3, 100, vocab_size=300)
    tokens = torch.randint(0, 256, (2, 3, 5))
    expected = ngrams(tokens)
    assert expected.shape == (2, 3, 5, 6)
    assert expected.dtype == torch.int64
    for dtype in (torch.int16, torch.int32, torch.uint8):
        assert torch.equal(ngrams(tokens.to(dtype)), expected)
    assert torch.equal(ngrams(tokens.transpose(0, 1)), expected.transpose(0, 1))
    assert ngrams(tokens[..., :0]).shape == (2, 3, 0, 6)
    assert ngrams([[1, 2]]).shape == (1, 2, 6)
    for other in (copy.deepcopy(ngrams), pickle.loads(pickle.dumps(ngrams)), ngrams.to(torch.float16)):
        assert torch.equal(other(tokens), expected)
    with torch.device("meta"):
        made = st.NgramHash((2, 4), 3, 100, vocab_size=300)
    assert torch.equal(made.to_empty(device="cpu")(tokens), expected)
    assert torch.equal(torch.func.vmap(ngrams)(tokens), expected)
    with torch.inference_mode():
        assert torch.equal(ngrams(tokens), expected)
    compiled = torch.compile(ngrams, fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens), expected)
    # What the host cannot see becomes no row at all.
    assert (compiled(torch.tensor([[1, 300, 2]]))[0, 1] == -1).all()


def test_statistics_count_what_a_dict_counts():
    ngrams = st.NgramHash((1, 2), 2, 30, vocab_size=50, eos=0)
    tokens = torch.randint(0, 50, (2, 60), generator=torch.Generator().manual_seed(2))
    found = ngrams.statistics(tokens)
    rows = ngrams(tokens)
    assert found.lookups == rows.numel() == 480
    assert found.rows_used == len(set(rows.flatten().tolist()))
    assert found.unique_share == found.rows_used / found.lookups
    for order in (1, 2):
        by_row = [{}, {}]
        for line, series in zip(rows, tokens.tolist(), strict=True):
            for at in range(len(series)):
                words = tuple(window(series, at, order, {0}, set(), 0))
                for head in range(2):
                    by_row[head].setdefault(int(line[at, (order - 1) * 2 + head]), set()).add(words)
        different = sum(len(words) for words in by_row[0].values())
        assert found.ngrams[order - 1] == different
        shared = [sum(len(words) for words in rows.values() if len(words) > 1) / different for rows in by_row]
        assert found.collisions[order - 1] == pytest.approx(sum(shared) / 2)
    assert ngrams.statistics(tokens[:, :0]).rows_used == 0
    # Padding is left out.
    padded = st.NgramHash((1, 2), 2, 1000, vocab_size=50, pad=9).statistics(torch.tensor([[9, 1, 2, 9, 9, 3]]))
    assert (padded.ngrams, padded.collisions, padded.lookups, padded.rows_used) == ((3, 3), (0, 0), 24, 13)


def test_state_dict_of_another_hash_is_refused():
    options = {"orders": (2, 3), "heads": 2, "rows": 100, "vocab_size": 50, "eos": 3}
    state = st.NgramHash(**options).state_dict()
    st.NgramHash(**options).load_state_dict(state)
    for other in ({"eos": 4}, {"seed": 1}, {"rows": 200}, {"token_map": torch.arange(50).flip(0)}):
        with pytest.raises(InvalidValueError, match="another hash"):
            st.NgramHash(**{**options, **other}).load_state_dict(state)
    with pytest.raises(InvalidValueError, match="another hash"):
        st.NgramHash(**options).load_state_dict({"_extra_state": None})


WRONG_CALLS = """
hashed(orders=(3, 2)) -> InvalidValueError: orders is \\(3, 2\\) but must be ascending
hashed(scheme="polynom") -> InvalidValueError: did you mean 'polynomial'
hashed(rows=None) -> InvalidValueError: rows is None and sizes is None
hashed(rows=[5]) -> InvalidValueError: rows is \\[5\\] but there are 2 orders
hashed(eos=50) -> InvalidValueError: eos is 50 but vocab_size is 50
hashed(token_map=torch.arange(50) - 1) -> InvalidValueError: token_map has -1
hashed(multipliers=[3]) -> InvalidValueError: multipliers has 1 numbers but an n-gram has up to 3
hashed(multipliers=[3, 5, -(-(2**63) // 49)]) -> InvalidValueError: exceeds 63 bits; pass smaller multipliers
hashed(rows=None, sizes=[2**57] * 4, scheme="polynomial") -> InvalidValueError: rows of a head exceeds 63 bits
hashed(rows="5") -> InvalidTypeError: rows is '5' \\(str\\) but must be an integer
embedded(combine="concatenate") -> InvalidValueError: did you mean 'concat'
embedded(gate=True) -> InvalidValueError: gate needs out_dim
embedded(conv=3) -> InvalidValueError: conv is 3 but follows the gate
embedded(layers=2, out_dim=8) -> InvalidValueError: each layer projects its own part
embedded(embedding=st.Embedding(890, 4, padding_idx=7))
-> InvalidValueError: padding_idx of embedding is 7 but the row of padding is None
embedded(embedding=st.EmbeddingBag(890, 4)) -> InvalidTypeError: embedding is a EmbeddingBag
ngrams(torch.tensor([[1, 2, 3], [4, 5, 50]])) -> RowIndexError: tokens\\[1, 2\\] is 50 but vocab_size is 50
ngrams(torch.tensor([[1]]), torch.tensor([[77]])) -> RowIndexError: context\\[0, 0\\] is 77
ngrams(torch.tensor([1.0])) -> InvalidTypeError: pass tokens.long\\(\\)
ngrams(torch.nested.nested_tensor([torch.tensor([1])], layout=torch.jagged)) -> InvalidTypeError: to_padded_tensor\\(tokens
ngrams(torch.tensor([1]), torch.tensor([1]).to_sparse()) -> InvalidTypeError: context is nested or sparse
ngrams(torch.tensor([[1]]), torch.tensor([[1], [2]])) -> InvalidValueError: the last tokens before each
engram(100, layers=[1, 15], layer=1) -> InvalidValueError: a number for each order
meta_hash() -> InvalidValueError: make it with device="cpu"
"""


@pytest.mark.parametrize("refusal", refusals(WRONG_CALLS), ids=str)
def test_wrong_calls(refusal):
    def meta_hash():
        with torch.device("meta"):
            st.NgramHash(rows=100, vocab_size=50, token_map=torch.arange(50))

    names = {"engram": functools.partial(st.NgramHash.engram, token_map=torch.arange(9)), "meta_hash": meta_hash}
    names["hashed"] = functools.partial(st.NgramHash, **{"heads": 2, "rows": 100, "vocab_size": 50})
    names["embedded"] = functools.partial(st.NgramEmbedding, make_hash(), 4)
    check_refused(refusal, ngrams=st.NgramHash(rows=100, vocab_size=50), st=st, torch=torch, **names)


VOCAB = 50


def make_hash(**options):
    return st.NgramHash(**{"orders": (2, 3), "heads": 2, "rows": 200, "vocab_size": VOCAB, "eos": 0, **options})


def tokens_of(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def weight_of(module):
    return module.embedding.weight.detach().clone()


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("combine", ["concat", "sum", "mean"])
@pytest.mark.parametrize("head_scale", [False, True])
@pytest.mark.parametrize(("out_dim", "layers"), [(None, None), (7, None), (None, 3)])
def test_combines_the_rows_of_the_heads(combine, head_scale, out_dim, layers):
    torch.manual_seed(0)
    module = st.NgramEmbedding(make_hash(), 5, out_dim, combine, head_scale, layers=layers, std=0.5)
    tokens = tokens_of(3, 6)
    rows = F.embedding(module.ngrams(tokens), weight_of(module))
    if head_scale:
        with torch.no_grad():
            module.head_scale.normal_()
        rows = rows * module.head_scale.detach()
    # The layers share a lookup: a row of a head has a part for each.
    rows = rows.unflatten(-1, (layers or 1, 5)).transpose(2, 3)
    expected = {"concat": rows.flatten(3), "sum": rows.sum(3), "mean": rows.mean(3)}[combine]
    if layers is None:
        expected = expected.squeeze(2)
    if out_dim:
        expected = expected @ module.value.weight.detach().T
    torch.testing.assert_close(module(tokens), expected)
    assert module(tokens).shape[-1] == module.out_dim


def test_gate_and_convolution_are_those_of_the_paper():
    torch.manual_seed(0)
    module = st.NgramEmbedding(make_hash(), 5, 8, gate=True, conv=3, std=0.5).double()
    with torch.no_grad():
        for part in module.gate.parameters():
            part.normal_()
    tokens, hidden = tokens_of(2, 20), torch.randn(2, 20, 8, dtype=torch.float64)
    x = F.embedding(module.ngrams(tokens), weight_of(module)).flatten(2)

    def norm(values, weight):
        return values / (values.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * weight

    gate = module.gate
    keys = norm(x @ gate.key.weight.T, gate.key_norm.weight)
    fit = (keys * norm(hidden, gate.hidden_norm.weight)).sum(-1) / math.sqrt(8)
    y = torch.sigmoid(fit.sign() * fit.abs().clamp(min=1e-6).sqrt())[..., None] * (x @ module.value.weight.T)
    normed, mixed = norm(y, gate.conv_norm.weight), torch.zeros_like(y)
    for back in range(3):
        moved = F.pad(normed, (0, 0, 3 * back, 0))[:, :20]
        mixed = mixed + moved * gate.conv.weight[:, 0, 2 - back]
    torch.testing.assert_close(module(tokens, hidden), y + F.silu(mixed))
    # One series is as good as a batch of one.
    torch.testing.assert_close(module(tokens[0], hidden[0]), module(tokens, hidden)[0])


def test_nothing_is_added_at_first():
    module = st.NgramEmbedding(make_hash(), 5, 8, gate=True, conv=3)
    assert not module(tokens_of(2, 6), torch.randn(2, 6, 8)).any()
    assert not module.embedding.weight.any()
    module(tokens_of(2, 6), torch.randn(2, 6, 8)).sum().backward()
    assert module.embedding.weight.grad.any()


def test_padding_reads_zeros_and_is_not_trained():
    module = st.NgramEmbedding(make_hash(pad=49), 4, combine="sum", std=1.0)
    tokens = torch.tensor([[49, 49, 3, 4], [3, 4, 5, 49]])
    out = module(tokens)
    assert not out[0, :2].any()
    assert not out[1, 3].any()
    assert out[0, 2:].any()
    out.sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert not module.embedding.weight[module.ngrams.padding_row].any()


def test_the_lookup_finds_what_was_read_ahead():
    module = st.NgramEmbedding(make_hash(), 4, 8, std=1.0)
    tokens, context = tokens_of(2, 6), tokens_of(2, 2, seed=1)
    for before in (None, context):
        expected = module(tokens, context=before)
        ticket = module.prefetch(tokens, before)
        assert ticket.is_waiting
        assert torch.equal(module(tokens.clone(), context=before), expected)
        assert not ticket.is_waiting
    pairs = [(tokens_of(2, 6, seed=seed), tokens_of(2, 3, seed=9)) for seed in range(4)]
    handle = module.embedding._handle
    for batch, before in st.prefetch(pairs, lambda pair: {module: pair}):
        waiting = len(open_tickets[handle])
        module(batch)
        assert len(open_tickets[handle]) == waiting
        module(batch, context=before)
        assert len(open_tickets[handle]) == waiting - 1


@pytest.mark.parametrize("std", [0.0, 0.5])
@pytest.mark.parametrize("way", ["made here", "copied", "made on the meta device"])
def test_reset_parameters(std, way):
    with torch.device("meta" if "meta" in way else "cpu"):
        module = st.NgramEmbedding(make_hash(), 6, 8, gate=True, conv=2, head_scale=True, std=std)
    module = copy.deepcopy(module) if way == "copied" else module.to_empty(device="cpu")
    for param in module.parameters() if "meta" not in way else ():
        nn.init.constant_(param, 3.0)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert (module.head_scale == 1).all()
    assert not module.gate.conv.weight.any()
    assert weight_of(module).square().mean().sqrt() == pytest.approx(std, rel=0.05)
    # Zeros are not written to a table that is new, whose pages take no memory.
    assert bool(module.embedding.table.version) == (std > 0 or "meta" not in way)


WRONG_EMBEDDINGS = """
gated(tokens) -> InvalidValueError: pass hidden
gated(tokens, torch.zeros(2, 1, 8)) -> InvalidValueError: hidden has shape \\(2, 1, 8\\) but what is looked up \\(2, 3, 8\\)
plain(tokens + 40) -> RowIndexError: vocab_size is 50
plain(gated.prefetch(tokens)) -> InvalidValueError: was made for
make(table(890), memory="pageable") -> InvalidValueError: so are \\['memory'\\]
make(table(891)) -> InvalidValueError: but the hash has
other.load_state_dict(plain.state_dict()) -> InvalidValueError: another hash
"""


@pytest.mark.parametrize("refusal", refusals(WRONG_EMBEDDINGS), ids=str)
def test_wrong_calls_of_embeddings(refusal):
    gated, plain = st.NgramEmbedding(make_hash(), 4, 8, gate=True), st.NgramEmbedding(make_hash(), 4, 8)

    def make(embedding, pad=None, **options):
        st.NgramEmbedding(make_hash(pad=pad), 4, embedding=embedding, **options)

    def table(rows, dim=4):
        return st.Embedding(rows, dim)

    other = st.NgramEmbedding(make_hash(seed=1), 4, 8)
    names = {"gated": gated, "plain": plain, "other": other, "make": make, "table": table, "st": st, "torch": torch}
    check_refused(refusal, tokens=tokens_of(2, 3), **names)
    assert not other.embedding.weight.any()


def test_per_layer_embedding_of_pretrained_rows():
    rows = torch.randn(VOCAB, 12)
    module = st.PerLayerEmbedding.from_pretrained(rows, layers=3)
    assert torch.equal(module(torch.tensor([4]))[0], rows[4].view(3, 4))
    assert not module.weight.requires_grad
    with pytest.raises(InvalidValueError, match="12 columns, which 5 layers cannot share"):
        st.PerLayerEmbedding.from_pretrained(rows, layers=5)
