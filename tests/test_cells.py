"""No third outcome: what is done with a whole table gives what ``nn.Embedding`` gives, or raises one of our errors."""

from __future__ import annotations

import re

import pytest
from cell_verbs import ALL, BEGIN, END, MAKING, PAGE, REFUSED, VERBS, ends_of, inside, listed, section
from sweeps import cover

# Cells that are wrong, and why. Each has to be wrong: what is mended is taken out.
NOT_INT8 = "float32, bfloat16, cache_rows, mmap, layout"
KNOWN: list[tuple[str, str, str]] = [
    (
        "the rows of this process alone, in its order",
        "Embedding, EmbeddingBag, MultiEmbedding, a feature, NgramEmbedding, PerLayerEmbedding / group of 1, group of 2 / all",
        "st.to_dense(model)",
    ),
    (
        "the features have placeholders; or rows of 16 bits do not fit in a float32 tensor",
        "MultiEmbedding, a feature / all / all; "
        "Embedding, EmbeddingBag, NgramEmbedding, PerLayerEmbedding / group of 1, group of 2 / bfloat16",
        "st.full_state_dict(model)",
    ),
    (
        "the rows of this process, as if they were those of the feature",
        "MultiEmbedding, a feature / group of 1, group of 2 / all",
        "model.state_dict() | torch.save(model.state_dict()) | model.state_dict() in a thread",
    ),
    (
        "the rows of this process, or a wait for the others",
        "MultiEmbedding, a feature / group of 1, group of 2, shared / all",
        "model.state_dict() in one process",
    ),
    (
        "the rows of this process, as if they were those of the feature",
        "a feature / group of 1, group of 2 / all",
        "copy.deepcopy(weight) | pickle.dumps(weight) | weight.detach() | weight.cpu().double() | weight[i] | weight[1:3] | "
        "weight.detach().numpy() | weight.tolist() | weight @ x | F.embedding(at, weight) | weight.data.mul_(2) | "
        "weight.data[i] = 7.0 | weight.data[ids] = rows | weight.data[i].mul_(2) | weight.data.index_add_ | "
        "weight.data.div_(rows) | with torch.no_grad(): weight[i] = 3.0 | with torch.no_grad(): weight.sub_(0.5) | "
        "with torch.no_grad(): weight.mul_(torch.tensor(2.0)) | torch._foreach_mul_ | vector_to_parameters | "
        "nn.init.trunc_normal_(weight) | nn.init.orthogonal_(weight) | weight.detach() in a fork",
    ),
    ("as above", f"a feature / group of 1 / {NOT_INT8}; a feature / group of 2 / all", "weight.norm()"),
    ("as above", f"a feature / group of 1, group of 2 / {NOT_INT8}", "weight.data.clamp_(-0.1, 0.1)"),
    ("as above", f"a feature / group of 2 / {NOT_INT8}; a feature / group of 1 / all", "nn.init.sparse_(weight, 0.5)"),
    (
        "as above",
        f"a feature / group of 2 / {NOT_INT8}",
        "weight.data.fill_(0.5) | weight.data.uniform_(-1, 1) | weight.data.copy_(rows) | "
        "with torch.no_grad(): weight.copy_(rows) | nn.init.normal_(weight) | nn.init.uniform_(weight) | "
        "nn.init.constant_(weight, 0.5) | nn.init.xavier_uniform_(weight) | nn.init.kaiming_uniform_(weight) | "
        "nn.init.eye_(weight) | weight.square().sum().backward()",
    ),
]
WRONG = {(*place, verb): why for why, where, verbs in KNOWN for place in inside(where) for verb in verbs.split(" | ")}
LISTED = listed()
CELLS = [(*place, verb) for place in ALL for verb in (VERBS if place not in LISTED[MAKING] else ["nothing"])]
# Those that always run have every pair of a verb, a kind, an owner and a form.
QUICK = cover({"-".join(it): list(zip("kofv", it, strict=True)) for it in CELLS}, 2)


def places(quick: bool) -> list:
    """Return the parameters of a test of the cells that always run, or of the others."""
    verbs: dict[tuple[str, ...], list[str]] = {}
    for *place, verb in (cell for cell in CELLS if ("-".join(cell) in QUICK) is quick):
        verbs.setdefault(tuple(place), []).append(verb)
    return [pytest.param(place, some, id="-".join(place)) for place, some in verbs.items()]


def wrong(pool, place, verbs, folder) -> list[str]:
    """Run cells and return what is wrong with them."""
    ends = ends_of(pool, *place, verbs, folder)
    found = []
    for verb, end in ends.items():
        known, refuses = WRONG.get((*place, verb)), end.startswith(REFUSED)
        unmade = end.startswith(REFUSED + MAKING)
        if known and (refuses or not end):
            found.append(f"{verb}: is not wrong any more, but KNOWN says that {known}")
        elif not known and end and not refuses:
            found.append(f"{verb}: {end}")
        elif not known and refuses is not (tuple(place) in LISTED[MAKING if unmade else verb]):
            found.append(f"{verb}: docs/limits.md lists another end than {end or 'done'!r}; python tests/cell_verbs.py")
    return found


@pytest.mark.parametrize(("place", "verbs"), places(quick=True))
def test_cells(pool, place, verbs, tmp_path):
    assert not wrong(pool, place, verbs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "verbs"), places(quick=False))
def test_all_other_cells(pool, place, verbs, tmp_path):
    assert not wrong(pool, place, verbs, tmp_path)


def test_the_page_counts_what_it_lists():
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text == section(LISTED)
    assert re.match(r"[\d,]+ of [\d,]+ cells refuse\.\n", text)
