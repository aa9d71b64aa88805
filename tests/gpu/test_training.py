"""Training on a CUDA device: every kind of table to the same bits in every memory, and as on the host, which equals torch."""

from typing import Any, NamedTuple

import pytest
import torch
from cases import take_step
from checkpoint_cases import digest
from lazy_oracle import LazyOracle, skewed_batches, squared_loss
from optimizer_cases import ALL, COUPLED, case_named
from reading_ahead import at_once, by_loader, by_ticket
from test_training_loops import PROGRAMS, run
from torch import nn

import speedtransfer as st
from gpu.tools import check_same, embedding_in
from speedtransfer.optim import find_handle

MEMORIES = ["pinned", "pageable", "mmap", "device"]
NUM_ROWS, DIM = 41, 16


# --- every kind of table ----------------------------------------------------------------------------------------------


def ngrams(_, dim, **options):
    return st.NgramEmbedding(st.NgramHash(heads=2, rows=100, vocab_size=NUM_ROWS, eos=0), dim, combine="sum", **options)


def features(num_rows, dim, of=st.MultiEmbedding, **options):
    return of([num_rows, 300, num_rows, 7 * num_rows, num_rows, 60], dim, **options)


class OneByOne(st.MultiEmbedding):
    def forward(self, ids):
        return torch.stack([feature(ids[:, number]) for number, feature in enumerate(self)], 1)


def bags_of_features(num_rows, dim, **options):
    mode = {str(number): mode for number, mode in enumerate(["sum", "mean", "max"] * 2)}
    return features(num_rows, dim, st.MultiEmbeddingBag, concatenate=True, mode=mode, **options)


class Case(NamedTuple):
    """How a module is made and trained.

    `apart`: how far results may be from those of the host, where sums have another order; None: rounding to few bits, which
    that may change by a step.
    """

    options: dict[str, Any] = {}
    optimizer: str = "adamw"
    kind: Any = st.Embedding
    apart: float | None = 1e-4
    memories: tuple[str, ...] = tuple(MEMORIES)


def stored(dtype, **options):
    return Case({"idle": "lazy", "storage_dtype": dtype, "state_dtype": torch.uint8, **options}, apart=None)


def vocabulary(**about):
    return {"vocabulary": {"capacity": 8, "max_capacity": 20, "evict": "lru", "seed": 3, **about}}


HOST = ("pinned", "pageable", "mmap")
LAZY = ("adamw", "adamw-fused", "adam-foreach", "adamax", "sgd-momentum", "adagrad", "rmsprop-centered", "nadam")
CASES = {name: Case({"idle": "lazy"}, name, memories=("pageable", "device")) for name in LAZY}
CASES |= {f"exact, {case}": Case({"idle": "exact"}, case.name, memories=()) for case in (*ALL, *COUPLED)}
CASES |= {
    "exact": Case({"idle": "exact", "padding_idx": 3}),
    "max_norm": Case({"idle": "lazy", "max_norm": 1.2}),
    "by frequency": Case({"idle": "lazy", "scale_grad_by_freq": True}),
    "records": Case({"idle": "exact", "layout": "rows"}, "adamw-fused"),
    "cache": Case({"idle": "exact", "cache_rows": 9}, memories=HOST),
    "cache for good": Case({"idle": "lazy", "cache_rows": 9, "cache_counts": -torch.arange(NUM_ROWS)}, memories=HOST),
    "float64": Case({"dtype": torch.float64, "idle": "lazy"}, apart=1e-9),
    "half": Case({"dtype": torch.bfloat16, "idle": "lazy"}, apart=0.05),
    "float16": Case({"dtype": torch.float16, "idle": "lazy"}, "sgd-momentum", apart=0.05),
    "int8": stored(torch.int8),
    "bfloat16": stored(torch.bfloat16),
    "float8": stored(torch.float8_e4m3fn, scale_block=4),
    "split24": stored("split24"),
    "split24, exact": stored("split24", idle="exact"),
    "int8 in a cache": stored(torch.int8, cache_rows=9)._replace(memories=HOST),
    "bags": Case({"mode": "sum", "padding_idx": 3}, kind=st.EmbeddingBag),
    "bags of means": Case({"mode": "mean", "idle": "lazy"}, "sgd-momentum", st.EmbeddingBag),
    "bags of maxima": Case({"mode": "max"}, kind=st.EmbeddingBag),
    "features": Case({"padding_idx": 1}, kind=features),
    "features one by one": Case({"padding_idx": 1, "of": OneByOne}, kind=features, memories=("device",)),
    "bags of features": Case({"padding_idx": 1}, kind=bags_of_features),
    "n-grams": Case({"std": 1.0}, kind=ngrams, memories=("pinned", "pageable")),
    "vocabulary": Case(vocabulary()),
    "vocabulary, lazy": Case({"idle": "lazy", **vocabulary(unseen="row", admit=2)}),
    "vocabulary, zeros": Case({"padding_idx": 0, **vocabulary(unseen="zeros", admit=2)}),
    "vocabulary of bags": Case({"mode": "mean", **vocabulary(admit=3)}, kind=st.EmbeddingBag),
    "vocabulary, deferred": Case({"idle": "exact", **vocabulary(deferred=True, unseen="row", admit=2)}),
    "vocabulary of bags, deferred": Case({"mode": "max", **vocabulary(deferred=True)}, kind=st.EmbeddingBag),
    "vocabulary, deferred, of int8": stored(torch.int8, **vocabulary(deferred=True)),
    "vocabulary in a cache": Case({"cache_rows": 4, **vocabulary()}, memories=HOST),
}


def trained(case, memory, folder, device, ids_on="cpu", ahead=at_once):
    """Return what training leaves, as tensors of the host by name."""
    options, about = dict(case.options), case.options.get("vocabulary")
    if about is not None:
        options["vocabulary"] = st.Vocabulary(**about)
    module = embedding_in(memory, folder, device, NUM_ROWS, DIM, kind=case.kind, **options)
    optimizer = case_named(case.optimizer).make(module.parameters())
    draw, outs = torch.Generator().manual_seed(1), []
    batches = [(torch.rand(8, 6, generator=draw) ** 3 * NUM_ROWS).long() for _ in range(8)]
    if about is not None:
        batches = [(ids // 2 + step) * -(2**58) for step, ids in enumerate(batches)]
    for _, given in ahead(module, [ids.to(ids_on) for ids in batches]):
        out = module(given)
        take_step(optimizer, (out.float() - 1).square().mean())
        outs.append(out.detach().cpu())
    found = dict(enumerate(outs))
    state = optimizer.state_dict()["state"].get(0, {})
    found |= {name: torch.as_tensor(value).cpu() for name, value in state.items()}
    if about is None:
        return found | {name: value.cpu() for name, value in module.state_dict().items()}
    ids, rows = module.vocabulary.export()
    # In the order of ids: that of rows need not be the same.
    return {**dict(enumerate(outs)), "ids": ids.sort().values, "rows": rows[ids.argsort()].cpu()}


@pytest.mark.parametrize("name", CASES)
def test_every_memory_to_the_same_bits_and_as_on_the_host(device, tmp_path, name):
    case = CASES[name]
    on_host = trained(case, "pageable", tmp_path, "cpu")
    expected = trained(case, "pinned", tmp_path, device, device)
    assert expected.keys() == on_host.keys()
    for key, value in on_host.items():
        if key == "ids":
            assert torch.equal(expected[key], value)
        elif case.apart is not None:
            rtol = 1e-4 if case.apart < 0.05 else 0.05
            torch.testing.assert_close(
                expected[key], value, rtol=rtol, atol=case.apart, msg=lambda m, k=key: f"{k}: {m}"
            )
    for memory in case.memories:
        ways = (at_once, at_once) if memory == "device" else (by_ticket, by_loader)
        for ids_on, ahead in zip(("cpu", device), ways, strict=True):
            found = trained(case, memory, tmp_path, device, ids_on, ahead)
            # The gradients of bags are summed in another order where the host knows the ids.
            near = 1e-4 if case.kind in (st.EmbeddingBag, bags_of_features) else 0
            what = memory, ids_on, ahead.__name__
            torch.testing.assert_close(found, expected, rtol=near, atol=near, msg=lambda m, w=what: f"{w}: {m}")


# --- a module of rows beside nn.Embedding -----------------------------------------------------------------------------


def embedding(memory, folder, device, num_rows=NUM_ROWS, dim=DIM, **kwargs):
    return embedding_in(memory, folder, device, num_rows, dim, **{"idle": "lazy", **kwargs})


def dense_embedding(device, num_rows=NUM_ROWS, dim=DIM, **kwargs):
    torch.manual_seed(3)
    return nn.Embedding(num_rows, dim, **kwargs).to(device)


def planes_of(emb, opt):
    """Return weights and state of all rows on the CPU, and what all rows share, by name."""
    state = opt.state.get(emb.weight, {})
    weight = emb.table.torch() if hasattr(emb, "table") else emb.weight.detach()
    return {"": weight.cpu().clone(), **{key: torch.as_tensor(value).cpu().clone() for key, value in state.items()}}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_by_offsets(device, mode):
    flat = torch.tensor([3, 1, 3, 0, 11, 7, 3, 1])
    inputs = [(flat, torch.tensor([0, 0, 3, 3, 8])), (flat.int(), torch.tensor([0, 2], dtype=torch.int32))]
    if mode == "sum":
        inputs.append((flat, torch.tensor([0, 3, 5]), torch.arange(8.0)))
    for arguments in inputs:
        ours = st.EmbeddingBag(12, 5, mode=mode, padding_idx=3, memory="pinned", device=device)
        dense = nn.EmbeddingBag(12, 5, mode=mode, padding_idx=3, _weight=ours.table.torch().clone())
        out, expected = ours(*(argument.to(device) for argument in arguments)), dense(*arguments)
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(ours.weight.grad.cpu().to_dense(), dense.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_large_batch_of_few_rows(device, tmp_path):
    """Gradients of thousands of ids a row: another kernel of torch's backward, and one of ours in every lane."""
    emb, dense = embedding("pinned", tmp_path, device, 5000, 48), dense_embedding(device, 5000, 48)
    ids = torch.randint(5000, (64, 1000), generator=torch.Generator().manual_seed(0)) % 777 * 6
    weight = torch.randn(48, generator=torch.Generator().manual_seed(1)).to(device)
    for module in (emb, dense):
        (module(ids.to(device)) * weight).sum().backward()
    find_handle(emb.weight).pending.trim()
    assert torch.equal(find_handle(emb.weight).pending.ids.cpu(), ids.unique())
    torch.testing.assert_close(emb.weight.grad.to_dense(), dense.weight.grad, rtol=1e-4, atol=1e-3)


# --- loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("memory", MEMORIES)
# Where a kernel makes the step, one that torch has ended with an error has not been counted.
@pytest.mark.parametrize(
    "program", [program for program in PROGRAMS if "fail()" not in program.code], ids=lambda it: it.title
)
def test_loops(device, tmp_path, program, memory):
    make = case_named("adamw").make
    emb, dense = embedding(memory, tmp_path, device), dense_embedding(device)
    opt, oracle = make([emb.weight]), LazyOracle(make([dense.weight]), dense)
    batches = [(ids.to(device), target.to(device)) for ids, target in skewed_batches(NUM_ROWS, DIM, 24)]
    seen = run(program, emb, opt, batches), run(program, dense, oracle.optimizer, batches, oracle)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(planes_of(emb, opt), planes_of(dense, oracle.optimizer), rtol=1e-5, atol=1e-5)


def test_one_model_of_every_memory_on_two_streams(device, tmp_path):
    """Forward and backward on a stream of their own, the step on the default one, as some loops have it."""
    embs = [embedding(memory, tmp_path, device) for memory in MEMORIES]
    opt = torch.optim.AdamW([emb.weight for emb in embs], lr=0.05)
    side = torch.cuda.Stream()
    for ids, target in skewed_batches(NUM_ROWS, DIM, 8):
        opt.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for emb in embs:
                squared_loss(emb(ids.to(device)), target.to(device)).backward()
        torch.cuda.current_stream().wait_stream(side)
        opt.step()
    first = planes_of(embs[0], opt)
    for emb in embs[1:]:
        check_same(planes_of(emb, opt).values(), list(first.values()))


@pytest.mark.parametrize("memory", [*MEMORIES, "auto"])
@pytest.mark.parametrize(
    ("name", "idle"), [("adamw", "exact"), ("adadelta", "auto"), ("asgd", "exact"), ("sgd-momentum", "lazy")]
)
def test_a_gradient_and_state_move_with_the_table(device, tmp_path, name, idle, memory):
    """There and back between backward and step: the weight stays the same object, and what pads unique rows is not seen."""
    make, batches = case_named(name).make, skewed_batches(NUM_ROWS, DIM, 8)
    emb, stays = embedding(memory, tmp_path, device, idle=idle), st.Embedding(NUM_ROWS, DIM, idle=idle, device="cpu")
    stays.load_state_dict(emb.state_dict())
    weight, opt, expected = emb.weight, make([emb.weight]), make([stays.weight])
    for number, (ids, target) in enumerate(batches):
        for module, optimizer in ((emb, opt), (stays, expected)):
            optimizer.zero_grad()
            loss = squared_loss(module(ids.to(module.table.device)), target.to(module.table.device))
            (loss + module.weight.square().sum() if number == 3 else loss).backward()
        if number % 2:
            there = torch.device("cpu") if number in (1, 5) else device
            emb.to(there)
            assert emb.weight is weight
            assert weight.device == weight.data.device == weight.grad.device == there
        opt.step()
        expected.step()
        # Not before: who looks at a gradient trims it.
        grads = [module.weight.grad.to_dense().cpu() for module in (emb, stays)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
        found = opt.state_dict()["state"][0]
        assert found.keys() == expected.state_dict()["state"][0].keys()
        torch.testing.assert_close(planes_of(emb, opt), planes_of(stays, expected), rtol=1e-4, atol=1e-5)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def model_on(device, memory, seed):
    torch.manual_seed(seed)
    emb = st.Embedding(3000, 20, device=device, memory=memory, idle="lazy")
    model = nn.Sequential(emb, nn.Linear(20, 3, device=device))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train_on_random_rows(model, opt, device):
    for _ in range(3):
        take_step(opt, model(torch.randint(0, 3000, (64,), device=device)).square().sum())


@pytest.mark.parametrize("memory", ["pinned", "pageable", "device"])
def test_checkpoints(memory, device, tmp_path):
    """They go to the host and back to the bit, and training goes on from them with the generator of the device."""

    def bits(model, opt):
        return digest([dict(model.state_dict()), opt.state_dict()])

    there = model_on(device, memory, 0)
    train_on_random_rows(*there, device)
    st.save_checkpoint(tmp_path / "cuda", *there)
    expected = bits(*there)
    host, back = model_on("cpu", "pageable", 1), model_on(device, memory, 2)
    st.load_checkpoint(tmp_path / "cuda", *host)
    assert bits(*host) == expected
    st.save_checkpoint(tmp_path / "host", *host)
    st.load_checkpoint(tmp_path / "host", *back)
    assert bits(*back) == expected
    st.load_checkpoint(tmp_path / "cuda", *there)
    train_on_random_rows(*there, device)
    torch.cuda.manual_seed(9)
    st.load_checkpoint(tmp_path / "cuda", *back)
    train_on_random_rows(*back, device)
    # Sums on a GPU come in any order.
    torch.testing.assert_close(there[0].state_dict(), back[0].state_dict(), rtol=1e-5, atol=1e-6)
