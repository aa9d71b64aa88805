"""Frozen lookups of a few ids, and language models whose large embeddings are served from a table."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import InvalidValueError, RowIndexError
from speedtransfer.nn.tracing import ONE_GRAPH
from speedtransfer.tables import Table

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def frozen(rows: int = 50, dim: int = 4, dtype: torch.dtype = torch.float32, **options) -> st.Embedding:
    torch.manual_seed(0)
    return st.Embedding(rows, dim, dtype=dtype, _freeze=True, **options)


# --- a few ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_kind_of_ids(dtype: torch.dtype, mode) -> None:
    emb = frozen(dtype=dtype)
    table = emb.table.torch().clone()
    grid = torch.randint(0, 50, (6, 8))
    large = torch.randint(0, 50, (300,))
    with mode():
        for ids in (
            torch.tensor(7),
            torch.empty(0, 3, dtype=torch.int32),
            grid.t(),
            grid[:, ::3],
            grid.to(torch.uint8),
            large,
        ):
            found = emb(ids)
            assert torch.equal(found, F.embedding(ids.long(), table)), ids
            assert found.is_contiguous()
            assert not found._is_view()
        for ids in ([[1, 2], [3, 4]], np.array([3, 1]), 3):
            assert torch.equal(emb(ids), table[torch.as_tensor(ids)])
        # Ours, and the caller's to write to.
        emb(grid).zero_()
    assert torch.equal(emb.table.torch(), table)


def test_every_dtype_of_a_table_checks_its_ids() -> None:
    """The check of few ids is that of torch, which every kernel of it has to make."""
    for dtype in (*DTYPES, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        table = Table(50, 3, dtype=dtype, memory="pageable")
        for bad in (50, -1):
            with pytest.raises(RowIndexError, match=f"is {bad}"):
                table.look_up(torch.tensor([0, bad]))
        assert table.look_up(torch.tensor([[1]])).dtype == dtype


def test_rows_are_counted() -> None:
    emb = frozen(dim=8)
    with torch.no_grad():
        for ids in (torch.tensor([1, 1, 2]), torch.tensor(4), torch.tensor([], dtype=torch.int64)):
            emb(ids)
    assert emb.table.stats().gathered_rows == 4
    assert emb.table.stats().gathered_bytes == 4 * 8 * 4


def test_rows_trained_before_are_caught_up_and_read_ahead() -> None:
    emb, plain = (st.Embedding(50, 4, dtype=torch.float64, idle=idle) for idle in ("exact", "exact"))
    plain.load_state_dict(emb.state_dict())
    dense = nn.Embedding.from_pretrained(emb.weight.detach().clone(), freeze=False)
    opts = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (emb, dense)]
    for ids in (torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4])):
        for each, opt in zip((emb, dense), opts, strict=True):
            opt.zero_grad()
            each(ids).sum().backward()
            opt.step()
    ids = torch.tensor([1, 40])
    ticket = emb.prefetch(ids)
    with torch.no_grad():
        torch.testing.assert_close(emb(ids), dense(ids), rtol=1e-12, atol=0)
        assert not ticket.is_waiting
        torch.testing.assert_close(emb(torch.tensor([2])), dense(torch.tensor([2])), rtol=1e-12, atol=0)


def test_a_cache_codes_and_files(tmp_path) -> None:
    ids = torch.tensor([[1, 2], [2, 49]])
    values = torch.randn(50, 4)
    with torch.no_grad():
        for options in (
            {"cache_rows": 5},
            {"memory": "mmap", "path": tmp_path / "rows.npy"},
            {"storage_dtype": torch.int8},
            {"storage_dtype": torch.bfloat16},
        ):
            emb = st.Embedding(50, 4, _weight=values.clone(), **options)
            torch.testing.assert_close(emb(ids), F.embedding(ids, emb.weight), rtol=0, atol=0)
            with pytest.raises(RowIndexError):
                emb(torch.tensor([50]))


# --- language models ---------------------------------------------------------------------------------------------------


class ScaledEmbedding(nn.Embedding):
    """An embedding with a forward of its own, as those of Gemma."""

    def __init__(self, rows: int, dim: int, padding_idx: int, scale: float) -> None:
        super().__init__(rows, dim, padding_idx)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype)


class PerLayerModel(nn.Module):
    """A model of the shape of Gemma 3n: embeddings for every layer from one lookup, and a tied head."""

    LAYERS, WIDTH, PER_LAYER, ROWS = 3, 16, 4, 200

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = ScaledEmbedding(self.ROWS, self.WIDTH, 0, self.WIDTH**0.5)
        self.embed_tokens_per_layer = ScaledEmbedding(self.ROWS, self.LAYERS * self.PER_LAYER, 0, self.PER_LAYER**0.5)
        self.layers = nn.ModuleList(nn.GRUCell(self.WIDTH + self.PER_LAYER, self.WIDTH) for _ in range(self.LAYERS))
        self.lm_head = nn.Linear(self.WIDTH, self.ROWS, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return logits and states after one more token of each of a batch, ``(batch,)``."""
        x = self.embed_tokens(ids)
        mine = self.embed_tokens_per_layer(ids).view(len(ids), self.LAYERS, self.PER_LAYER)
        found = []
        for number, layer in enumerate(self.layers):
            state = layer(torch.cat([x, mine[:, number]], 1), states[number])
            found.append(state)
            x = x + state
        return self.lm_head(x), found

    def generate(self, prompts: Tensor, steps: int) -> Tensor:
        """Return ``(batch, time + steps)``; each prompt begins one token after the one before, so that the batch grows."""
        states = [torch.zeros(len(prompts), self.WIDTH, dtype=self.lm_head.weight.dtype) for _ in self.layers]
        rows = [list(prompt) for prompt in prompts.tolist()]
        for step in range(steps):
            n = min(step + 1, len(rows))
            last = torch.tensor([row[-1] for row in rows[:n]])
            logits, found = self(last, [state[:n] for state in states])
            for state, new in zip(states, found, strict=True):
                state[:n] = new
            for row, token in zip(rows, logits.argmax(1).tolist(), strict=False):
                row.append(token)
        return torch.tensor([row + [0] * (len(rows[0]) - len(row)) for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"memory": "pageable"}, {"cache_rows": 20}], ids=str)
def test_one_line_serves_a_model_from_a_table(dtype: torch.dtype, options) -> None:
    torch.manual_seed(0)
    model = PerLayerModel().to(dtype).eval()
    dense = copy.deepcopy(model)
    report = st.replace_embeddings(model, min_rows=0, names="embed_tokens_per_layer", **options)
    assert report == ["embed_tokens_per_layer"]
    assert report.left == {"embed_tokens": "not among the names asked for"}
    assert not report.notes
    assert isinstance(model.embed_tokens_per_layer, ScaledEmbedding)
    assert model.embed_tokens_per_layer.weight.requires_grad
    prompts = torch.randint(1, 200, (5, 3))
    with torch.no_grad():
        expected = dense.generate(prompts, 12)
        assert torch.equal(model.generate(prompts, 12), expected)
    with torch.inference_mode():
        assert torch.equal(model.generate(prompts, 12), expected)
    assert [*model.state_dict()] == [*dense.state_dict()]


def test_devices_dtypes_and_meta() -> None:
    torch.manual_seed(0)
    model = PerLayerModel().eval()
    dense = copy.deepcopy(model).to(torch.bfloat16)
    st.replace_embeddings(model, min_rows=0, names="*per_layer")
    model = model.to("cpu").to(torch.bfloat16)
    assert model.embed_tokens_per_layer.table.dtype == torch.bfloat16
    prompts = torch.randint(1, 200, (2, 2))
    with torch.inference_mode():
        assert torch.equal(model.generate(prompts, 6), dense.generate(prompts, 6))
    # As large models are loaded: without values first.
    with torch.device("meta"):
        made = PerLayerModel()
    assert st.replace_embeddings(made, min_rows=0, names="*per_layer") == ["embed_tokens_per_layer"]
    made.to_empty(device="cpu").load_state_dict(dense.state_dict())
    made = made.to(torch.bfloat16).eval()
    for name in ("embed_tokens", "embed_tokens_per_layer"):
        getattr(made, name).scale.copy_(getattr(dense, name).scale)
    with torch.inference_mode():
        assert torch.equal(made.generate(prompts, 6), dense.generate(prompts, 6))


def test_embeddings_by_bytes() -> None:
    model = nn.ModuleDict(
        {"words": nn.Embedding(100, 8), "layers": nn.Embedding(100, 64), "halves": nn.Embedding(100, 64).bfloat16()}
    )
    report = st.replace_embeddings(model, min_rows=0, min_bytes=100 * 64 * 4)
    assert report == ["layers"]
    assert report.left["words"] == "its weight has 3,200 bytes, fewer than min_bytes=25,600"
    assert "12,800 bytes" in report.left["halves"]
    with torch.device("meta"):
        waiting = nn.Embedding(100, 64)
    assert st.replace_embeddings(waiting, min_rows=0, min_bytes=25_601) == []
    assert st.replace_embeddings(waiting, min_rows=0, min_bytes=25_600) == [""]
    with pytest.raises(InvalidValueError, match="min_bytes is -1"):
        st.replace_embeddings(model, min_bytes=-1)


@pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph")
def test_a_served_model_compiles_to_one_graph() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = PerLayerModel().double().eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    st.replace_embeddings(model, min_rows=0)
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 7):
            ids = torch.randint(0, 200, (batch,))
            states = [torch.randn(batch, 16, dtype=torch.float64) for _ in model.layers]
            found, expected = run(ids, states), model(ids, states)
            assert torch.equal(found[0], expected[0])
    torch.compiler.reset()
