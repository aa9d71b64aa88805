"""Tickets of a ``MultiEmbedding``, and of one feature, in the place of their ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError

SIZES = {"user": 9, "item": 40}
# What is called, with ids in this form.
FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Any]]] = {
    "columns": (lambda m: m, lambda ids: ids),
    "list": (lambda m: m, lambda ids: [ids[:3, 0].view(3, 1), ids[:, 1]]),
    "names": (lambda m: m, lambda ids: {"item": ids[:, 1], "user": ids[:2, 0]}),
    "some": (lambda m: m, lambda ids: {"item": ids[:, 1].view(2, 4)}),
    "one feature": (lambda m: m["user"], lambda ids: ids[:, 0].view(4, 2)),
}


def multi(**options: Any) -> st.MultiEmbedding:
    torch.manual_seed(0)
    return st.MultiEmbedding(SIZES, 4, padding_idx={"user": 1, "item": None}, memory="pageable", **options)


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.rand(8, 2, generator=draw) * torch.tensor([9, 40])).long() for _ in range(6)]


def flat(rows: Any) -> Tensor:
    if isinstance(rows, dict):
        rows = list(rows.values())
    return torch.cat([part.reshape(-1, 4) for part in rows]) if isinstance(rows, list) else rows.reshape(-1, 4)


def trained(form: str, ahead: Any, **options: Any) -> tuple[list[Tensor], st.MultiEmbedding]:
    """Train, with tickets that `ahead` makes of a module and ids, and return what was seen."""
    emb, (part, given) = multi(**options), FORMS[form]
    opt, module, seen = torch.optim.Adam(emb.parameters(), lr=0.1), part(emb), []
    for ids in batches():
        early = ahead(module, given(ids))
        # Rows that are written meanwhile are read again.
        opt.step()
        opt.zero_grad()
        rows = module(early)
        seen.append(flat(rows).detach().clone())
        (flat(rows) * torch.arange(4)).square().sum().backward()
        with torch.no_grad():
            seen.append(flat(module(ahead(module, given(ids)))))
    return [*seen, emb.weight.detach().clone()], emb


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_rows_of_the_ids(form, options):
    without, _ = trained(form, lambda module, ids: ids, **options)
    found, emb = trained(form, lambda module, ids: module.prefetch(ids), **options)
    assert all(torch.equal(a, b) for a, b in zip(without, found, strict=True))
    ids = FORMS[form][1](batches()[0])
    rows = FORMS[form][0](emb)(FORMS[form][0](emb).prefetch(ids))
    assert type(rows) is type(FORMS[form][0](emb)(ids))
    assert list(rows) == list(ids) if isinstance(ids, dict) else True


def test_a_ticket_serves_activate():
    emb, ids = multi(), batches()[0]
    active, wanted = emb.activate(emb.prefetch(ids)), emb.activate(ids)
    assert torch.equal(active.ids, wanted.ids)
    assert torch.equal(active.rows[active.inverse], wanted.rows[wanted.inverse])


def test_a_ticket_serves_a_weight_that_was_swapped_in():
    emb, ids = multi(), batches()[0]
    weight = torch.randn(49, 4)
    ticket = emb.prefetch(ids)
    rows, wanted = (functional_call(emb, {"weight": weight}, (given,)) for given in (ticket, ids))
    assert torch.equal(rows, wanted)
    with pytest.raises(InvalidTypeError, match="leave prefetch out"):
        torch.func.functional_call(Outer(emb), {"emb.weight": weight}, (ids,))


class Outer(torch.nn.Module):
    def __init__(self, emb: st.MultiEmbedding) -> None:
        super().__init__()
        self.emb = emb

    def forward(self, ids: Tensor) -> Any:
        return self.emb["user"].prefetch(ids[:, 0])


def test_tickets_of_others_are_refused():
    emb, ids = multi(), batches()[0]
    for made, used in ((emb["user"], emb), (emb, emb["user"]), (emb["item"], emb["user"])):
        ticket = made.prefetch(ids if made is emb else ids[:, 0])
        with pytest.raises(InvalidValueError, match="pass it to the module whose prefetch"):
            used(ticket)
    with pytest.raises(InvalidValueError, match="made for"):
        multi()(emb.prefetch(ids))


def test_evaluation_uses_what_was_read_ahead():
    emb, ids = multi(), batches()[0]
    with torch.no_grad():
        ticket = emb.prefetch(ids)
        emb(ids)
    assert not ticket.is_waiting
