"""Training with rows and state in small forms: near dense float32, reproducible, resumable."""

import copy
import pickle

import pytest
import torch
from cases import take_step
from optimizer_cases import BASE, some
from torch import nn

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.optim.plane_view import PlaneView

FORMS = (
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.uint8),
    (torch.bfloat16, None),
    (torch.int8, torch.uint8),
    (torch.float8_e4m3fn, torch.uint8),
    (torch.float8_e5m2, torch.bfloat16),
    ("split24", torch.uint8),
)


# --- what rounding to the nearest cannot do ---------------------------------------------------------------------------


def test_updates_far_below_a_step_of_the_form_add_up():
    target, ones, found = torch.full((8, 16), 1.5), torch.ones(8, 16), []
    for dtype in ("nearest", torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, "split24"):
        torch.manual_seed(0)
        given = (ones.bfloat16(), None) if dtype == "nearest" else (ones, dtype)
        emb = speedtransfer.Embedding.from_pretrained(given[0], freeze=False, storage_dtype=given[1])
        opt = torch.optim.SGD(emb.parameters(), lr=6e-4)
        for _ in range(100):
            take_step(opt, 0.5 * (emb(torch.arange(8)) - target.to(emb.weight.dtype)).square().sum())
        found.append(float(emb.state_dict()["weight"].float().mean()))
    expected = 1.5 - 0.5 * (1 - 6e-4) ** 100  # 3e-4 a step, of which bfloat16's at 1 is 25 times as large
    assert found == [1.0, *(pytest.approx(expected, abs=wide) for wide in (0.005, 0.01, 0.02, 0.02, 2e-5))]


# --- reproducible -----------------------------------------------------------------------------------------------------


def trained(seed=3, flipped=False, **options):
    torch.manual_seed(seed)
    rows = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    emb = speedtransfer.Embedding.from_pretrained(rows, freeze=False, idle="lazy", **options)
    opt, generator = torch.optim.AdamW(emb.parameters(), lr=0.01), torch.Generator().manual_seed(1)
    for _ in range(12):
        ids = torch.randperm(40, generator=generator)[:16]
        step(emb, opt, ids.flip(0) if flipped else ids)
    return emb, opt


def step(emb, opt, ids):
    take_step(opt, emb(ids).square().sum())


@pytest.mark.parametrize(("storage", "state"), FORMS)
def test_a_seed_gives_a_run_which_goes_on(storage, state):
    options = {"storage_dtype": storage, "state_dtype": state}
    first, again, flipped = (trained(flipped=flipped, **options) for flipped in (False, False, True))
    other = trained(4, **options)
    runs = [again, flipped, copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    found = []
    for emb, opt in (first, *runs, other):
        for ids in (torch.arange(10), torch.arange(5, 40)):
            step(emb, opt, ids)
        planes = opt.state_dict()["state"][0]
        found.append([emb.state_dict()["weight"], planes["exp_avg"], planes["exp_avg_sq"]])
    for run in found[1:-1]:
        assert all(map(torch.equal, run, found[0]))
    assert not any(map(torch.equal, found[-1], found[0]))


# --- state dicts of optimizers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", some(BASE), ids=str)
def test_every_optimizer_steps_and_its_state_crosses_over(case):
    torch.manual_seed(0)
    emb = speedtransfer.Embedding(20, 8, idle="lazy", storage_dtype=torch.int8, state_dtype=torch.uint8)
    dense = nn.Embedding.from_pretrained(emb.state_dict()["weight"], freeze=False)
    sides = [(module, case.make(module.parameters())) for module in (emb, dense)]
    for module, optimizer in sides:
        for _ in range(3):
            step(module, optimizer, torch.arange(20))
    mine, theirs = (optimizer.state_dict() for _, optimizer in sides)
    assert mine["param_groups"] == theirs["param_groups"]
    # Rprop looks at signs alone: a step is a matter of chance then.
    for name in case.planes if case.name != "rprop" else ():
        ours, wanted = mine["state"][0][name], theirs["state"][0][name]
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wanted, rtol=0.5, atol=0.15 * float(wanted.abs().max()))
    for (module, optimizer), state in zip(sides, (theirs, mine), strict=True):
        optimizer.load_state_dict(state)
        step(module, optimizer, torch.arange(5))
    found = sides[0][1].state_dict()["state"].get(0, {})
    for name in case.planes:  # rows that were not touched are those loaded
        expected = theirs["state"][0][name][5:]
        torch.testing.assert_close(found[name][5:], expected, rtol=0.07, atol=1e-4 * float(expected.abs().max()))


def test_nothing_decoded_is_kept():
    emb, opt = trained(state_dtype=torch.uint8)
    kept = opt.state[emb.weight]["exp_avg"]
    assert (type(kept), kept.shape) == (PlaneView, (40, 24))
    loaded = opt.state_dict()
    assert opt.state[emb.weight]["exp_avg"] is kept
    loaded["state"][0]["exp_avg"] += 1
    opt.load_state_dict(loaded)  # which is shown before the next step
    assert torch.equal(opt.state_dict()["state"][0]["exp_avg"], loaded["state"][0]["exp_avg"])
    emb.double()
    with pytest.raises(OptimizerError, match="the table of this state is gone"):
        kept.decode()


@pytest.mark.slow
def test_small_steps_of_idle_rows_in_half_precision():
    """The figures of docs/optimizers.md: a dense optimizer rounds each step to nothing, idle rows take all of them at once."""

    def train(module):
        module.weight.data.fill_(1.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.01)
        for _ in range(1000):
            take_step(optimizer, (module(torch.tensor([0])) * 0).sum())
        return [round(value, 3) for value in module.weight[:, 0].tolist()]

    assert train(nn.Embedding(2, 1)) == [0.368, 0.368]
    assert train(nn.Embedding(2, 1, dtype=torch.bfloat16)) == [1.0, 1.0]
    assert train(speedtransfer.Embedding(2, 1, dtype=torch.bfloat16)) == [1.0, 0.367]
