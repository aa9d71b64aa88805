"""``to_dense``: a copy with modules of torch.nn that exporters know."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from cases import Doubled, take_step
from torch import nn

import speedtransfer as st
from speedtransfer import to_dense
from speedtransfer.errors import HostMemoryError, InvalidTypeError
from speedtransfer.nn.tracing import ONE_GRAPH

IDS = torch.tensor([[1, 7, 2], [0, 7, 19]])


class Model(nn.Module):
    def __init__(self, embedding=st.Embedding, bag=st.EmbeddingBag, **options):
        super().__init__()
        self.words = embedding(20, 4, padding_idx=0, **options)
        self.again = self.words
        self.bags = nn.Sequential(bag(20, 4, mode="sum", **options))
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.words(ids).sum(1) + self.again(ids[:, 0]) + self.bags(ids))


def trained(steps=3, **options):
    torch.manual_seed(0)
    model = Model(**options)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for shift in range(steps):
        take_step(opt, model((IDS + shift) % 20).square().sum())
    return model


@pytest.mark.parametrize(
    "options",
    [{"idle": "exact"}, {"idle": "lazy"}, *({"storage_dtype": d} for d in (torch.int8, torch.float8_e5m2, "split24"))],
)
def test_modules_and_rows(options):
    model = trained(**options).eval()
    dense = to_dense(model)
    assert type(dense) is Model
    assert type(dense.words) is nn.Embedding
    assert type(dense.bags[0]) is nn.EmbeddingBag
    assert dense.words is dense.again
    assert (dense.words.padding_idx, dense.bags[0].mode, dense.words.training) == (0, "sum", False)
    assert vars(dense.words).keys() == vars(nn.Embedding(1, 1)).keys()
    assert list(dense.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(dense.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(dense(IDS), model(IDS))
    # Nothing is shared, and what is frozen stays so.
    before = model.words.weight.detach().clone()
    dense.words.weight.data.zero_()
    assert torch.equal(model.words.weight, before)
    model.words.weight.requires_grad_(False)
    there, ours = ([*each.parameters()] for each in (to_dense(model, device="meta"), model))
    assert [param.requires_grad for param in there] == [param.requires_grad for param in ours]
    assert {param.device.type for param in there} == {"meta"}
    assert type(to_dense(model.words)) is nn.Embedding


class Scaled(st.Embedding):
    def forward(self, ids):
        return super().forward(ids) * self.embedding_dim**0.5


class ScaledByName(st.Embedding):
    def forward(self, ids):
        return super(ScaledByName, self).forward(ids) * 2  # noqa: UP008 - the old way, which many models have


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", [Scaled, ScaledByName])
def test_subclasses_keep_their_forward(kind):
    model = trained(embedding=kind, idle="exact")
    dense = to_dense(model)
    assert isinstance(dense.words, kind)
    torch.testing.assert_close(dense(IDS), model(IDS))
    assert torch.equal(torch.jit.trace(dense.words, IDS)(IDS), dense.words(IDS))
    assert torch.equal(dense.state_dict()["words.weight"], model.words.table.torch())
    dense.words.weight.data.zero_()
    assert not dense.words(IDS).any()
    for again in (copy.deepcopy(dense), pickle.loads(pickle.dumps(dense)), to_dense(dense)):
        assert isinstance(again.words, kind)
        assert torch.equal(again(IDS), dense(IDS))
    assert st.summary(dense).tables == ()


@pytest.mark.parametrize("kind", [nn.Embedding, Doubled])
def test_replaced_modules_are_what_they_were_and_ties_stay(kind):
    model = Model(kind, nn.EmbeddingBag)
    model.decoder = nn.Linear(4, 20, bias=False)
    model.decoder.weight = model.words.weight
    expected = model(IDS)
    st.replace_embeddings(model, min_rows=0)
    dense = to_dense(model)
    assert type(dense.words) is kind
    torch.testing.assert_close(dense(IDS), expected)
    assert torch.equal(pickle.loads(pickle.dumps(dense))(IDS), dense(IDS))
    assert dense.decoder.weight is dense.words.weight
    assert type(dense.decoder.weight) is nn.Parameter
    assert len(list(dense.parameters())) == len(list(model.parameters()))


TOOLS = {
    "torch.jit.trace": lambda model: torch.jit.trace(model, (IDS,)),
    "torch.jit.script": torch.jit.script,
    "torch.onnx": lambda model: torch.onnx.export(model, (IDS,), io.BytesIO(), dynamo=False),
    "torch.fx": torch.fx.symbolic_trace,
    "torch.ao": lambda model: torch.ao.quantization.quantize_dynamic(
        model, {nn.Embedding: torch.ao.quantization.float_qparams_weight_only_qconfig}
    ),
    "torch.export": lambda model: torch.export.export(model, (IDS,), strict=True),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_would_record_the_rows_of_one_batch_raise(tool):
    if tool == "torch.export" and torch.__version__ < "2.7":
        pytest.skip("torch.export raises by itself, and does not say that it is the one who traces")
    model = trained().requires_grad_(False)
    expected = model(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match=r"speedtransfer\.to_dense\(model\)"):
            TOOLS[tool](model)
    assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize(
    "options", [{"idle": "exact"}, {"storage_dtype": torch.int8}, {"storage_dtype": "split24"}, {"memory": "mmap"}]
)
def test_torch_export_takes_the_weights_along(options, tmp_path):
    if "memory" in options:
        options = {**options, "path": tmp_path / "table.safetensors", "bag": lambda *_, **given: nn.EmbeddingBag(20, 4)}
    model = trained(**options).eval()
    program = torch.export.export(model, (IDS,), strict=False)
    torch.testing.assert_close(program.module()(IDS + 0), model(IDS))
    torch.export.save(program, str(tmp_path / "model.pt2"))
    expected = model(IDS)
    for param in model.parameters():
        nn.init.zeros_(param)
    program = torch.export.load(str(tmp_path / "model.pt2"))
    torch.testing.assert_close(program.module()(IDS + 0), expected)
    with pytest.raises(IndexError):
        program.module()(IDS + 1)


@pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph at a lookup")
def test_torch_export_of_a_condition():
    class Either(Model):
        def forward(self, ids):
            return torch.cond(ids.sum() > 30, lambda ids: self.words(ids), lambda ids: self.words(ids) * 2, (ids,))

    model = Either()
    program = torch.export.export(model, (IDS,), strict=False).module()
    assert all(torch.equal(program(ids), model(ids)) for ids in (IDS, IDS * 0 + 1))


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch.export raises by itself, and does not say that it traces")
@pytest.mark.parametrize("strict", [False, True])
def test_what_torch_export_cannot_take_raises(strict):
    ids = torch.tensor([[1, 2, 0]])
    with pytest.raises(Exception, match=r"speedtransfer\.to_dense\(model\)"):
        torch.export.export(st.MultiEmbedding([3, 4, 5], 4), (ids,), strict=strict)
    if not strict:
        known = st.Embedding(20, 4, vocabulary=st.Vocabulary())
        with pytest.raises(InvalidTypeError, match=r"not row numbers.*torch\.export"):
            torch.export.export(known, (ids,), strict=strict)


def test_what_does_not_fit(monkeypatch):
    model = Model()
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", str(3 * 20 * 4 * 4))
    with pytest.raises(HostMemoryError, match=r"take 640 bytes.*'words', 320 bytes.*cpu has 320 bytes left"):
        to_dense(model)
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", str(4 * 20 * 4 * 4))
    assert type(to_dense(model).words) is nn.Embedding
