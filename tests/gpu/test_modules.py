"""Features, bags of features and n-grams on a CUDA device: waits, captures, ids that are out of range."""

import pytest
import torch
from cases import take_step

import speedtransfer as st
from gpu.tools import embedding_in, synchronizing
from speedtransfer.errors import RowIndexError

SIZES, DIM = [7, 600, 3, 210], 16
VOCAB = 50


def looked_up(ours, module, ids):
    """Look `ids` up; faults of CUDA kernels are reported when they are waited for, at the latest."""
    with torch.no_grad():
        module(ids)
    ours.table.wait()


def test_ids_out_of_range_of_features(device):
    ours = embedding_in("pinned", None, device, SIZES, DIM, kind=st.MultiEmbedding)
    good = torch.zeros(5, len(SIZES), dtype=torch.int64, device=device)
    for feature, value in ((0, 7), (1, -1), (3, 210), (2, 2**62)):
        ids = good.clone()
        ids[4, feature] = value
        with pytest.raises(RowIndexError, match=rf"index\[{16 + feature}\].* is -1"):
            looked_up(ours, ours, ids)
        with pytest.raises(RowIndexError, match=r"index\[1\].* is -1"):
            looked_up(ours, ours[feature], ids[3:, feature])
        # On the host they are seen at once, and named.
        with pytest.raises(RowIndexError, match=rf"index\[4, {feature}\] of feature '{feature}' is {value}"):
            ours(ids.cpu())
    assert ours(good).shape == (5, 4, DIM)


# --- features one by one, and bags of features ------------------------------------------------------------------------

NAMED = {"a": 40, "b": 600}
BAGS = {"x": ("a", "sum"), "y": ("b", "mean"), "z": ("a", "max")}


def features(module, ids):
    return [module[name](ids[:, number]) for number, name in enumerate(NAMED)]


def bags(module, ids):
    return [*module(ids).values()]


def lazy(device, look_up):
    about = {"kind": st.MultiEmbedding}
    if look_up is bags:
        tables, modes = ({name: bag[part] for name, bag in BAGS.items()} for part in (0, 1))
        about = {"kind": st.MultiEmbeddingBag, "features": tables, "mode": modes}
    return embedding_in("pinned", None, device, NAMED, DIM, padding_idx=3, idle="lazy", **about)


def draw(look_up, seed, device):
    columns = NAMED if look_up is features else BAGS
    ids = torch.randint(40, (32, len(columns)), generator=torch.Generator().manual_seed(seed)).to(device)
    offsets = torch.tensor([0, 0, 7, 9, 20], device=device)
    return ids if look_up is features else {name: (ids[:, n].clone(), offsets) for n, name in enumerate(BAGS)}


@pytest.mark.parametrize("look_up", [features, bags])
def test_the_host_does_not_wait(device, monkeypatch, look_up):
    monkeypatch.setenv("SPEEDTRANSFER_ENGINE", "mapped")
    ours = lazy(device, look_up)
    opt = torch.optim.AdamW(ours.parameters(), fused=True)
    for seed, mode in enumerate(["default"] * 3 + ["error"]):
        ids = draw(look_up, seed, device)
        with synchronizing(mode):
            take_step(opt, sum(rows.square().sum() for rows in look_up(ours, ids)))


def test_a_captured_round(device, monkeypatch):
    """Rows that were read before the capture are not those of its replays."""
    monkeypatch.setenv("SPEEDTRANSFER_ENGINE", "mapped")
    ours = lazy(device, features)
    ids, side = draw(features, 0, device), torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(3):
                features(ours, ids)
            ours["a"](ids[:, 0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ours["b"](ids[:, 1])
        for seed in (1, 2):
            ids.copy_(draw(features, seed, device))
            graph.replay()
            torch.testing.assert_close(found, ours["b"].weight.detach()[ids[:, 1]])


# --- n-grams ----------------------------------------------------------------------------------------------------------


def test_a_token_out_of_range_is_no_row():
    ngrams = st.NgramHash(heads=2, rows=100, vocab_size=VOCAB).cuda()
    rows = ngrams(torch.tensor([1, VOCAB, -1, 2], device="cuda")).cpu()
    assert (rows[1:3] == -1).all()
    assert (rows[[0, 3]] >= 0).all()
    module = st.NgramEmbedding(ngrams, 4, std=1.0, device="cuda")
    wrong = torch.tensor([[1, VOCAB, 2]], device="cuda")

    def look_up():
        module(wrong)
        module.embedding.table.wait()

    with pytest.raises(st.errors.RowIndexError, match="-1"):
        look_up()
