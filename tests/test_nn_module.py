"""``speedtransfer.Embedding`` as a module: autograd around it, conversion, copies, pickles, state dicts."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.utils.checkpoint
from lazy_oracle import (
    dense_grad,
    one_thread,  # noqa: F401 - a fixture
)
from torch import nn

import speedtransfer
from speedtransfer.nn.lookup import lookup


def both(num_rows: int = 12, dim: int = 5, **options) -> tuple[speedtransfer.Embedding, nn.Embedding]:
    torch.manual_seed(2)
    ours = speedtransfer.Embedding(num_rows, dim, **options)
    torch.manual_seed(2)
    return ours, nn.Embedding(num_rows, dim, **options)


IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


# --- autograd -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradgradcheck_through_the_active_rows(padding_idx: int | None) -> None:
    emb = speedtransfer.Embedding(12, 5, dtype=torch.float64)
    active = emb.activate(IDS)
    padding = -1 if padding_idx is None else active.ids.tolist().index(padding_idx)

    def look_up(rows: torch.Tensor) -> torch.Tensor:
        active.rows = rows
        return lookup(active, padding).sin()

    rows = active.rows.detach().clone().requires_grad_()
    if padding_idx is None:  # with it the gradient is another by definition
        assert torch.autograd.gradcheck(look_up, rows)
    assert torch.autograd.gradgradcheck(look_up, rows)


def test_a_penalty_on_the_gradient_equals_torch() -> None:
    """Double backward through the output, and the gradient of the penalty reaches the rows."""
    ours, dense = both(dtype=torch.float64)
    for module in (ours, dense):
        out = module(IDS)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), out, create_graph=True)
        (out.sum() + grad.square().sum()).backward()
    torch.testing.assert_close(dense_grad(ours), dense.weight.grad, rtol=1e-14, atol=0)


def test_backward_with_create_graph() -> None:
    ours, dense = both(dtype=torch.float64)
    with pytest.warns(UserWarning, match="create_graph=True"):
        ours(IDS).pow(3).sum().backward(create_graph=True)
    dense(IDS).pow(3).sum().backward()
    assert torch.equal(dense_grad(ours), dense.weight.grad)
    assert not ours.weight.grad.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_tracked(context: type) -> None:
    ours, dense = both()
    with context():
        out = ours(IDS)
        assert torch.equal(out, dense(IDS))
        assert not out.requires_grad
        assert not ours.activate(IDS).rows.requires_grad
    assert ours(IDS).requires_grad
    opt = torch.optim.SGD(ours.parameters(), lr=0.1)  # training after inference
    ours(IDS).sum().backward()
    opt.step()


def test_a_step_in_inference_mode_is_no_business_of_ours_but_a_table_made_there_trains() -> None:
    with torch.inference_mode():
        table = speedtransfer.Table(4, 2)
    emb = speedtransfer.Embedding.from_pretrained(table.torch(), freeze=False)
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert table.torch()[1].tolist() == [-1.0, -1.0]


def test_retain_graph_and_two_backwards() -> None:
    ours, dense = both()
    for module in (ours, dense):
        loss = module(IDS).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(dense_grad(ours), dense.weight.grad)


def test_gradient_of_the_output_alone() -> None:
    ours, dense = both()
    grads = []
    for module in (ours, dense):
        out = module(IDS)
        grads.append(torch.autograd.grad(out.square().sum(), out)[0])
    assert torch.equal(*grads)
    assert ours.weight.grad is None


def test_one_graph_with_two_lookups_of_the_same_table() -> None:
    ours, dense = both()
    for module in (ours, dense):
        (module(IDS[0]) * module(IDS[1])).sum().backward()
    torch.testing.assert_close(dense_grad(ours), dense.weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_deposits_the_gradient_once(reentrant: bool) -> None:
    ours, dense = both()
    for module in (ours, dense):
        torch.manual_seed(0)
        head = nn.Linear(5, 5)
        scale = torch.ones(1, requires_grad=True)

        def block(scale: torch.Tensor, module=module, head=head) -> torch.Tensor:
            return head(module(IDS) * scale).square()

        torch.utils.checkpoint.checkpoint(block, scale, use_reentrant=reentrant).sum().backward()
    assert torch.equal(dense_grad(ours), dense.weight.grad)


def test_autocast_leaves_the_rows_alone() -> None:
    ours, dense = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(IDS).dtype == dense(IDS).dtype == torch.float32


def test_output_outlives_the_step() -> None:
    """A step updates the memory of the active rows; what forward returned must not change with it."""
    emb = speedtransfer.Embedding(12, 64)
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    out = emb(IDS)
    before = out.detach().clone()
    out.sum().backward()
    opt.step()
    assert torch.equal(out, before)


def test_rows_written_between_forward_and_backward() -> None:
    emb = speedtransfer.Embedding(12, 5)
    out = emb(IDS)
    emb.table[[3]] = torch.zeros(1, 5)
    emb.table.torch()[1] = 7.0
    out.sum().backward()
    assert emb.weight.data[1].tolist() == [7.0] * 5
    assert emb.weight.data[2].tolist() == [0.0] * 5


# --- conversion ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["half", "double", "bfloat16", "float"])
def test_conversion_converts_the_table(how: str) -> None:
    ours, dense = both(dtype=torch.float64 if how == "float" else torch.float32)
    ours(IDS).sum().backward()  # a gradient pending goes
    getattr(ours, how)()
    getattr(dense, how)()
    assert ours.weight.dtype == ours.table.dtype == dense.weight.dtype
    assert ours.weight.grad is None
    assert torch.equal(ours.table.torch(), dense.weight)
    opt = torch.optim.SGD(ours.parameters(), lr=0.5)
    dense_opt = torch.optim.SGD(dense.parameters(), lr=0.5)
    for module in (ours, dense):
        module(IDS).sum().backward()
    opt.step()
    dense_opt.step()
    assert torch.equal(ours.table.torch(), dense.weight)


def test_conversion_inside_a_model() -> None:
    model = nn.Sequential(speedtransfer.Embedding(12, 5), nn.Linear(5, 2))
    assert model.to(torch.float64)[0].table.dtype == torch.float64
    assert model(IDS).dtype == torch.float64
    assert model.to("cpu")[0].table.device == torch.device("cpu")
    table = model[0].table
    assert model.to("cpu", torch.float64)[0].table is table


def test_conversion_that_makes_new_parameters() -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        emb = speedtransfer.Embedding(12, 5).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert emb.table.dtype == torch.float64
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    before = emb.table.torch().clone()
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(emb.table.torch()[1], before[1] - 1)


def test_modes() -> None:
    emb = speedtransfer.Embedding(12, 5)
    assert emb.training
    assert not emb.eval().training
    assert emb(IDS).requires_grad  # as torch: eval is not no_grad


# --- copies -------------------------------------------------------------------------------------------------------------


def test_deepcopy_is_a_table_of_its_own() -> None:
    emb = speedtransfer.Embedding(12, 5, padding_idx=1)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
    emb(IDS).sum().backward()
    opt.step()
    duplicate = copy.deepcopy(emb)
    assert duplicate.padding_idx == 1
    assert duplicate.table.planes == ("weight",)  # the state belongs to the optimizer
    assert torch.equal(duplicate.table.torch(), emb.table.torch())
    before = emb.table.torch().clone()
    opt = torch.optim.AdamW(duplicate.parameters(), lr=0.1)
    duplicate(IDS).sum().backward()
    opt.step()
    assert torch.equal(emb.table.torch(), before)
    assert not torch.equal(duplicate.table.torch(), before)


@pytest.mark.parametrize("memory", ["pageable", "mmap", "device"])
def test_pickle_by_torch_save(memory: str, tmp_path) -> None:
    path = tmp_path / "rows.npy" if memory == "mmap" else None
    model = nn.Sequential(speedtransfer.Embedding(12, 5, padding_idx=1, memory=memory, path=path), nn.Linear(5, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    opt.step()
    model(IDS).sum().backward()  # a gradient pending is left behind, as torch leaves it
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded[0].padding_idx == 1
    assert loaded[0].weight.shape == (0, 5)
    assert torch.equal(loaded[0].table.torch(), model[0].table.torch())
    assert torch.equal(loaded(IDS), model(IDS))
    before = model[0].table.torch().clone()
    new = torch.optim.AdamW(loaded.parameters(), lr=0.1)
    loaded(IDS).sum().backward()
    new.step()
    assert not torch.equal(loaded[0].table.torch()[3], before[3])
    assert torch.equal(model[0].table.torch(), before)


# --- state dicts --------------------------------------------------------------------------------------------------------


def test_state_dict_holds_every_row_as_a_view() -> None:
    ours, dense = both()
    state = ours.state_dict()
    assert list(state) == list(dense.state_dict()) == ["weight"]
    assert torch.equal(state["weight"], dense.weight)
    assert state["weight"].data_ptr() == ours.table.torch().data_ptr()
    assert ours.state_dict(prefix="a.b.")["a.b.weight"].shape == (12, 5)
    assert ours.state_dict(keep_vars=True)["weight"].shape == (12, 5)


def models() -> tuple[nn.Module, nn.Module]:
    def make(library: object) -> nn.Module:
        return nn.Sequential(
            nn.ModuleDict({"words": library.Embedding(12, 5)}),  # type: ignore[attr-defined]
            library.EmbeddingBag(7, 3),  # type: ignore[attr-defined]
            nn.BatchNorm1d(3),
        )

    return make(speedtransfer), make(nn)


def test_state_dicts_cross_over_in_nested_models() -> None:
    ours, dense = models()
    assert list(ours.state_dict()) == list(dense.state_dict())
    ours.load_state_dict(dense.state_dict())
    for key, value in dense.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    other_ours, other_dense = models()
    other_dense.load_state_dict(ours.state_dict())
    other_ours.load_state_dict(other_dense.state_dict(), strict=True, assign=True)
    assert torch.equal(other_ours[0]["words"].table.torch(), dense[0]["words"].weight)
    assert torch.equal(other_ours[1].table.torch(), dense[1].weight)
    # assign=True copies too: the table keeps its memory, and the tensor that was loaded stays the caller's.
    assert other_ours[1].table.torch().data_ptr() != other_dense[1].weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_loading_another_dtype_converts_as_torch_does(dtype: torch.dtype) -> None:
    ours, dense = both()
    state = {"weight": torch.randn(12, 5).to(dtype)}
    for module in (ours, dense):
        module.load_state_dict(state)
    assert ours.table.dtype == dense.weight.dtype == torch.float32
    assert torch.equal(ours.table.torch(), dense.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_missing_and_unexpected_keys(strict: bool) -> None:
    def load(model: nn.Module, change: str) -> object:
        state = dict(model.state_dict())
        if change == "missing":
            del state["0.words.weight"]
        else:
            state["0.words.more"] = torch.zeros(1)
            state["0.words.deeper.more"] = torch.zeros(1)
        try:
            return model.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            return str(error)

    for change in ("missing", "unexpected"):
        ours, dense = (load(model, change) for model in models())
        assert str(ours) == str(dense)
        assert ("0.words" in str(ours)) or not strict


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("shape", [(11, 5), (12, 4), (60,)])
def test_size_mismatch(strict: bool, shape: tuple[int, ...]) -> None:
    ours = nn.Sequential(speedtransfer.Embedding(12, 5))
    before = ours[0].table.torch().clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight: .*\[12, 5\]") as caught:
        ours.load_state_dict({"0.weight": torch.zeros(shape)}, strict=strict)
    assert str(torch.Size(shape)) in str(caught.value)
    assert torch.equal(ours[0].table.torch(), before)


def test_hooks_of_state_dicts_run() -> None:
    emb = speedtransfer.Embedding(4, 2)
    calls = []
    emb.register_state_dict_post_hook(lambda module, state, prefix, meta: calls.append("saved"))
    emb.register_load_state_dict_pre_hook(lambda module, state, *rest: calls.append("loading"))
    emb.load_state_dict(emb.state_dict())
    assert calls == ["saved", "loading"]


class WithBias(speedtransfer.Embedding):
    """A subclass with a parameter and a buffer of its own."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.zeros(self.embedding_dim))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.bias


def test_a_subclass_keeps_what_it_adds() -> None:
    emb, other = WithBias(4, 2), WithBias(4, 2)
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    emb(torch.tensor([1, 2])).sum().backward()
    opt.step()
    emb.count += 3
    assert list(emb.state_dict()) == ["weight", "bias", "count"]
    other.load_state_dict(emb.state_dict())
    assert torch.equal(other.bias, torch.full((2,), -2.0))
    assert other.count == 3
    assert torch.equal(other.table.torch(), emb.table.torch())
    assert list(dict(other.named_parameters())) == ["weight", "bias"]
    assert torch.equal(copy.deepcopy(emb)(torch.tensor([1])), emb(torch.tensor([1])))


def test_a_hook_may_rename_keys() -> None:
    emb = speedtransfer.Embedding(4, 2)

    def rename(module, state, prefix, *rest) -> None:
        state[prefix + "weight"] = state.pop(prefix + "vectors")

    emb.register_load_state_dict_pre_hook(rename)
    emb.load_state_dict({"vectors": torch.ones(4, 2)})
    assert torch.equal(emb.table.torch(), torch.ones(4, 2))


def test_loading_counts_as_a_write() -> None:
    emb = speedtransfer.Embedding(4, 2)
    version = emb.table.version
    emb.load_state_dict({"weight": torch.zeros(4, 2)})
    assert emb.table.version > version
