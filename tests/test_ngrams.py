"""N-gram hashes: against references in plain Python integers, and against the constants of published models."""

from __future__ import annotations

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from late import sympy
from refusals import check_refused, refusals

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError


def window(tokens: list[int], at: int, order: int, ends: set[int], begins: set[int], fill: int) -> list[int]:
    """Return the tokens of the n-gram that ends at a position, the last first, walking back token by token."""
    found = [tokens[at]]
    cut = tokens[at] in begins
    for back in range(1, order):
        place = at - back
        cut = cut or place < 0 or tokens[place] in ends
        found.append(fill if cut else tokens[place])
        cut = cut or (place >= 0 and tokens[place] in begins)
    return found


def reference(ngrams: st.NgramHash, tokens: list[int]) -> list[list[int]]:
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
    rows = data.draw(some.integers(1, 500))
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


def test_every_head_of_every_layer_has_a_prime_of_its_own():
    layers = [st.NgramHash((2, 3), 4, (100, 90), vocab_size=9, layer=layer) for layer in range(3)]
    sizes = [size for layer in layers for size in layer.sizes]
    assert len(set(sizes)) == len(sizes) == 24
    assert all(sympy.isprime(size) for size in sizes)
    assert min(sizes) == 97
    assert layers[0].constants.numbers != layers[1].constants.numbers


def test_rows_beyond_2_to_the_40():
    vocab = 1 << 17
    for options in ({"scheme": "xor"}, {"scheme": "polynomial"}):
        ngrams = st.NgramHash((2, 3), 2, 2**40, vocab_size=vocab, eos=3, **options)
        tokens = [vocab - 1, vocab - 2, 3, 0, vocab - 1]
        found = ngrams(torch.tensor(tokens))
        assert found.tolist() == reference(ngrams, tokens)
        assert found.max() > 2**41


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


def test_made_where_models_have_no_values():
    token_map = torch.arange(50) // 2
    with torch.device("meta"):
        ngrams = st.NgramHash(rows=100, vocab_size=50, token_map=token_map)
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(ngrams(tokens), st.NgramHash(rows=100, vocab_size=50, token_map=token_map)(tokens))


def test_state_dict_of_another_hash_is_refused():
    options = {"orders": (2, 3), "heads": 2, "rows": 100, "vocab_size": 50, "eos": 3}
    state = st.NgramHash(**options).state_dict()
    st.NgramHash(**options).load_state_dict(state)
    for other in ({"eos": 4}, {"seed": 1}, {"rows": 200}, {"token_map": torch.arange(50).flip(0)}):
        with pytest.raises(InvalidValueError, match="another hash"):
            st.NgramHash(**{**options, **other}).load_state_dict(state)
    with pytest.raises(InvalidValueError, match="another hash"):
        st.NgramHash(**options).load_state_dict({"_extra_state": None})


WRONG = {
    "orders is (3, 2) but must be ascending": {"orders": (3, 2)},
    "did you mean 'polynomial'": {"scheme": "polynom"},
    "rows is None and sizes is None": {"rows": None},
    "rows is [5] but there are 2 orders": {"rows": [5]},
    "eos is 50 but vocab_size is 50": {"eos": 50},
    "token_map has -1": {"token_map": torch.arange(50) - 1},
    "multipliers has 1 numbers but an n-gram has up to 3": {"multipliers": [3]},
    "exceeds 63 bits; pass smaller multipliers": {"multipliers": [3, 5, -(-(2**63) // 49)]},
    "rows of a head exceeds 63 bits": {"rows": None, "sizes": [2**57] * 4, "scheme": "polynomial"},
    "rows is '5' (str) but must be an integer": {"rows": "5"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises((InvalidValueError, InvalidTypeError)) as caught:
        st.NgramHash(**{"heads": 2, "rows": 100, "vocab_size": 50, **WRONG[message]})
    assert message in str(caught.value)


WRONG_CALLS = """
ngrams(torch.tensor([[1, 2, 3], [4, 5, 50]])) -> RowIndexError: tokens\\[1, 2\\] is 50 but vocab_size is 50
ngrams(torch.tensor([[1]]), torch.tensor([[77]])) -> RowIndexError: context\\[0, 0\\] is 77
ngrams(torch.tensor([1.0])) -> InvalidTypeError: pass tokens.long\\(\\)
ngrams(torch.tensor([[1]]), torch.tensor([[1], [2]])) -> InvalidValueError: the last tokens before each
engram(100, layers=[1, 15], layer=1) -> InvalidValueError: a number for each order
st.NgramHash((2, 3), 2, 2**50, vocab_size=1 << 17, scheme="polynomial") -> InvalidValueError: 63 bits; pass fewer rows, or
meta_hash() -> InvalidValueError: make it with device="cpu"
"""


@pytest.mark.parametrize("refusal", refusals(WRONG_CALLS), ids=str)
def test_wrong_calls(refusal):
    def meta_hash():
        with torch.device("meta"):
            st.NgramHash(rows=100, vocab_size=50, token_map=torch.arange(50))

    engram = functools.partial(st.NgramHash.engram, token_map=torch.arange(9))
    ngrams = st.NgramHash(rows=100, vocab_size=50)
    check_refused(refusal, ngrams=ngrams, engram=engram, meta_hash=meta_hash, st=st, torch=torch)
