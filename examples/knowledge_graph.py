"""Train a knowledge graph with PyKEEN as it is: the vectors of its entities and the optimizer's state are in files.

    pip install pykeen psutil
    python examples/knowledge_graph.py --entities 10000000 --output graph
    python examples/knowledge_graph.py --entities 10000000 --output graph --epochs 2 --resume
    python examples/knowledge_graph.py --entities 100000 --compare

The facts are made up: few entities have many of them and most have few, as Zipf's law has it. After each epoch a checkpoint is
saved, from which ``--resume`` goes on. ``--compare`` trains with PyKEEN's own ``nn.Embedding`` and with tables.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from pykeen.models import DistMult
from pykeen.training import SLCWATrainingLoop, TrainingCallback
from pykeen.triples import CoreTriplesFactory

import speedtransfer as st

RELATIONS, KINDS, DIM, NEGATIVES = 200, 10, 32, 8
most = {"own": 0, "files": 0}  # bytes of memory, of the process itself and of files that are cached


def look() -> None:
    """See how much memory the process has now."""
    now = psutil.Process().memory_info()
    files = getattr(now, "shared", 0)
    most.update(own=max(most["own"], now.rss - files), files=max(most["files"], files))


def make_facts(entities: int, count: int) -> tuple[CoreTriplesFactory, torch.Tensor]:
    """Return facts to train on, and a hundred others (100, 3): head, relation and tail by number."""
    draw = torch.Generator().manual_seed(0)
    # Zipf's law with exponent 1.2, cut off at the last entity.
    least = entities**-0.2
    places = (least + (1 - least) * torch.rand(2, count, generator=draw, dtype=torch.double)) ** -5
    head, tail = (places.long() - 1).unbind()
    relation = torch.randint(RELATIONS, (count,), generator=draw)
    # The kind of an answer follows from the kind of the head and the relation.
    tail = (tail - tail % KINDS + (head + 7 * relation) % KINDS) % entities
    # A prime number takes those with many facts to all places of the table.
    facts = torch.stack([head * 2_654_435_761 % entities, relation, tail * 2_654_435_761 % entities], 1).unique(dim=0)
    facts = facts[torch.randperm(len(facts), generator=draw)]
    return CoreTriplesFactory(facts[100:], entities, RELATIONS), facts[:100]


def make(facts: CoreTriplesFactory, path: Path | None, idle: Any = "lazy") -> tuple[DistMult, Any]:
    """Return PyKEEN's model and the module of its entities, a table in the file `path`; without one the model as it is."""
    # By default PyKEEN would scale the vectors of all entities to length 1 after each step.
    options = {"embedding_dim": DIM, "entity_constrainer": None, "regularizer": None, "random_seed": 0}
    # On the meta device a model takes no memory. PyKEEN draws the weights when training begins.
    with torch.device("meta" if path else "cpu"):
        model = DistMult(triples_factory=facts, **options)
    if not path:
        return model, None
    (name,) = st.replace_embeddings(model, 0, "entity*", strict=True, memory="mmap", path=path, idle=idle)
    return model.to_empty(device="cpu"), model.get_submodule(name)


class Watch(TrainingCallback):
    """Keeps the loss and the seconds of each step, and saves a checkpoint after each epoch."""

    def __init__(self, checkpoint: Path | None, epochs: int) -> None:
        super().__init__()
        self.checkpoint, self.epochs, self.losses, self.seconds = checkpoint, epochs, list[float](), list[float]()
        self.last: float | None = None

    def on_batch(self, epoch: int, batch: Any, batch_loss: float, **others: Any) -> None:
        """Keep them."""
        now, before = time.perf_counter(), self.last
        self.seconds += [] if before is None else [now - before]
        self.losses.append(batch_loss)
        self.last = now
        look()

    def post_epoch(self, epoch: int, epoch_loss: float, **others: Any) -> None:
        """Save all that training needs to go on."""
        self.epochs, self.last = self.epochs + 1, None
        if self.checkpoint:
            st.save_checkpoint(self.checkpoint, self.model, self.optimizer, extra=self.epochs)


def train(model: DistMult, facts: CoreTriplesFactory, given: Any, checkpoint: Path | None) -> Watch:
    """Train with negative samples, from the checkpoint on if that is wanted."""
    negative = {"negative_sampler": "basic", "negative_sampler_kwargs": {"num_negs_per_pos": NEGATIVES}}
    # With memory optimization PyKEEN would draw all weights once more, to try whether a batch fits.
    adam = {"optimizer": given.optimizer, "optimizer_kwargs": {"lr": 0.02}, "automatic_memory_optimization": False}
    loop = SLCWATrainingLoop(model=model, triples_factory=facts, **negative, **adam)
    torch.manual_seed(0)
    done = st.load_checkpoint(checkpoint, model, loop.optimizer) if given.resume else 0
    watch = Watch(checkpoint, done)
    options = {"batch_size": given.batch, "callbacks": watch, "use_tqdm": False, "pin_memory": False}
    loop.train(facts, num_epochs=given.epochs - done, continue_training=done > 0, **options)
    return watch


@torch.no_grad()
def ranks(model: DistMult, facts: torch.Tensor, known: torch.Tensor, width: int = 10_000) -> torch.Tensor:
    """Return the filtered ranks of the tails, then of the heads, of `facts`; `width` entities are scored at a time."""
    model.eval()
    own, number = model.score_hrt(facts), torch.tensor([model.num_entities + RELATIONS, 1])
    found = []
    for score, side, rest in ((model.score_t, "tails", [0, 1]), (model.score_h, "heads", [1, 2])):
        # No answer that is known to be true counts; the fact's own is one of them.
        asked, asked_known = facts[:, rest] @ number, known[:, rest] @ number
        row, which = (asked[:, None] == asked_known).nonzero(as_tuple=True)
        answer, above = known[which, 2 if side == "tails" else 0], torch.zeros(len(facts))
        for entities in torch.arange(model.num_entities).split(width):
            scores = score(facts[:, rest], **{side: entities})
            here = (answer >= entities[0]) & (answer <= entities[-1])
            scores[row[here], answer[here] - entities[0]] = -torch.inf
            above += (scores > own).sum(1) + (scores == own).sum(1) / 2
            look()
        found.append(1 + above)
    return torch.cat(found)


def run(given: Any, path: Path | None, idle: str = "lazy", checkpoint: Path | None = None) -> Watch:
    """Train and evaluate, with the entities in the file `path` or PyKEEN's own; print what came of it."""
    facts, held_out = make_facts(given.entities, given.facts)
    most.update(own=0, files=0)
    model, entities = make(facts, path, idle)
    watch = train(model, facts, given, checkpoint)
    steps, training, start = len(watch.losses), dict(most), time.perf_counter()
    found = ranks(model, held_out, torch.cat([facts.mapped_triples, held_out]))
    size = "" if entities is None else f"{entities.table.nbytes / 1e6:,.0f} MB with the state of {given.optimizer}"
    print(f"a table, idle={idle!r}: {size}" if size else "nn.Embedding")
    if steps:
        losses = ", ".join(f"{loss:.4f}" for loss in watch.training_loop.losses_per_epochs)
        print(f"  {steps} steps, {1 / statistics.median(watch.seconds):.1f} a second; loss of each epoch {losses}")
    print(f"  MRR {found.reciprocal().mean():.4f}, hits@10 {(found <= 10).double().mean():.3f}, filtered: ", end="")
    print(f"{len(found)} questions with {given.entities:,} answers each, in {time.perf_counter() - start:.0f} s")
    own, files = ([memory[name] / 1e6 for memory in (training, most)] for name in ("own", "files"))
    print(
        f"  memory {own[0]:,.0f} MB in training, {own[1]:,.0f} MB at most; files cached {files[1]:,.0f} MB", flush=True
    )
    return watch


def main() -> None:
    """Train once, or with each kind of embedding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entities", type=int, default=100_000)
    parser.add_argument("--facts", type=int, default=200_000, help="some of them twice, which are left out")
    parser.add_argument("--epochs", type=int, default=1, help="those before --resume count")
    parser.add_argument("--batch", type=int, default=512, help="facts in a step")
    parser.add_argument("--optimizer", default="Adam", help="one of torch.optim")
    parser.add_argument("--output", type=Path, default=Path("graph"), help="folder of the table and the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--compare", action="store_true", help="train with nn.Embedding, and with exact and lazy idle rows"
    )
    given = parser.parse_args()
    if given.entities < KINDS:
        parser.error(f"--entities is {given.entities} but there are {KINDS} kinds of them; pass {KINDS} or more")
    path = given.output / "entities.npy"
    if given.compare:
        plain = run(given, None).losses
        for idle in ("exact", "lazy"):
            with tempfile.TemporaryDirectory() as folder:
                losses = run(given, Path(folder) / path.name, idle).losses
            far = max(abs(a / b - 1) for a, b in zip(losses, plain, strict=True))
            print(f"  a loss differs from that with nn.Embedding by {far:.1e} of it at most")
    else:
        given.output.mkdir(parents=True, exist_ok=True)
        checkpoint = given.output / "checkpoint"
        if given.resume and checkpoint.exists():
            path.unlink(missing_ok=True)  # the checkpoint has all rows
        run(given, path, checkpoint=checkpoint)


if __name__ == "__main__":
    main()
