"""Models in training, whose deltas copies follow: tables stored and trained in all ways, with state or without."""

import json
import tempfile

import torch
from checkpoint_cases import digest
from torch import nn

import speedtransfer as st

ROWS, DIM = 100, 8
ADAMW, SGD = torch.optim.AdamW, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def vocabulary(**options):
    return {"vocabulary": st.Vocabulary(max_capacity=30, seed=1, **options), "idle": "lazy"}


# Options of the embedding, and the optimizer.
CASES = {
    "sgd": (lambda: {"idle": "lazy"}, SGD),
    "sgd exact": (lambda: {"idle": "exact"}, SGD),
    "adamw exact": (lambda: {"idle": "exact"}, ADAMW),
    "adamw lazy": (lambda: {"idle": "lazy"}, ADAMW),
    "adagrad": (lambda: {}, torch.optim.Adagrad),
    "amsgrad": (lambda: {"idle": "lazy"}, lambda params: ADAMW(params, amsgrad=True)),
    "rows": (lambda: {"idle": "lazy", "layout": "rows"}, ADAMW),
    "cached": (lambda: {"idle": "lazy", "cache_rows": 8}, ADAMW),
    "file": (lambda: {"idle": "lazy", "memory": "mmap"}, ADAMW),
    "dtype bfloat16": (lambda: {"idle": "lazy", "dtype": torch.bfloat16}, ADAMW),
    "bfloat16": (lambda: {"idle": "lazy", "storage_dtype": torch.bfloat16}, ADAMW),
    "bfloat16 exact": (lambda: {"idle": "exact", "storage_dtype": torch.bfloat16}, ADAMW),
    "int8": (lambda: {"idle": "lazy", "storage_dtype": torch.int8}, ADAMW),
    "float8": (lambda: {"idle": "lazy", "storage_dtype": torch.float8_e4m3fn, "scale_block": 3}, ADAMW),
    "split24": (lambda: {"idle": "exact", "storage_dtype": "split24"}, ADAMW),
    "8-bit state": (lambda: {"idle": "lazy", "state_dtype": torch.uint8}, ADAMW),
    "8-bit state exact": (lambda: {"idle": "exact", "state_dtype": torch.uint8}, ADAMW),
    "8 bits exact": (lambda: {"idle": "exact", "storage_dtype": torch.int8, "state_dtype": torch.uint8}, ADAMW),
    "vocabulary": (lambda: vocabulary(evict="lru"), ADAMW),
    "vocabulary exact": (lambda: {**vocabulary(evict="lru"), "idle": "exact"}, ADAMW),
    "vocabulary counts": (lambda: {**vocabulary(evict="lfu", admit=2), "padding_idx": 7}, SGD),
    "vocabulary int8": (lambda: {**vocabulary(evict="lru"), "storage_dtype": torch.int8}, ADAMW),
    "vocabulary split24": (lambda: {**vocabulary(evict="lru"), "storage_dtype": "split24", "idle": "exact"}, ADAMW),
}
VOCABULARIES = [name for name in CASES if "vocabulary" in name]


class Net(nn.Module):
    """A table of options, in two places, one that grows, one of several features, and the rest."""

    def __init__(self, options):
        torch.manual_seed(0)
        super().__init__()
        by_id = "vocabulary" in options
        self.emb = st.Embedding(8 if by_id else ROWS, DIM, **options)
        self.again = self.emb
        table = st.Table(10, DIM, memory="pageable", max_rows=200).normal_()
        self.more = st.Embedding.from_pretrained(table, freeze=False, idle="lazy")
        known = (
            {"vocabulary": st.Vocabulary(max_capacity=200, seed=2)} if by_id else {"idle": options.get("idle", "lazy")}
        )
        self.many = st.MultiEmbedding({"a": 20, "b": 10}, 4, **{"idle": "lazy"} | known)
        self.head = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))

    def forward(self, ids):
        rows = self.emb(ids).to(torch.float32) + self.more(ids % self.more.num_embeddings)
        a, b = self.many({"a": ids % 20, "b": ids % 10}).values()
        return self.head(rows) + a + (b.detach() if ids[0] % 3 else b)  # some steps leave a feature out


class World:
    def __init__(self, name, with_state=True, folder=None):
        options, optimizer = CASES[name][0](), CASES[name][1]
        if "memory" in options:
            options["path"] = tempfile.mktemp(prefix="net.", suffix=".npy", dir=folder)
        self.net = Net(options)
        self.opt = optimizer(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 3)
        self.state = {"optimizer": self.opt, "scheduler": self.scheduler} if with_state else {}
        self.by_id = name in VOCABULARIES and not with_state

    def steps(self, count, seed, first=0):
        torch.manual_seed(seed)
        for _ in range(count):
            self.opt.zero_grad()
            self.net(torch.randint(first, first + 40, (5,))).square().sum().backward()
            self.opt.step()
            self.scheduler.step()

    def forget(self, ids):
        self.opt.zero_grad()
        self.net.emb.vocabulary.forget(self.net.emb.vocabulary.ids()[ids])

    def save(self, path, **more):
        return st.save_checkpoint(path, self.net, **self.state, **more)

    def load(self, path):
        return st.load_checkpoint(path, self.net, **self.state)

    def mark(self):
        return st.mark(self.net, self.state.get("optimizer"))

    def save_delta(self, path, since):
        return st.save_delta(path, self.net, since, **self.state)

    def apply(self, path, known=None):
        # The default device has no part in it.
        with torch.device("meta"):
            return st.apply_delta(path, self.net, known, **self.state)

    def digest(self):
        """Tell apart those that differ in a bit, of what a delta brings: without state, the rows of ids may be others."""
        if self.by_id:
            return digest([by_id(self.net), self.net.head.state_dict(), self.net.more.state_dict()])
        # By an origin vocabularies are told apart.
        state = {name: value for name, value in self.net.state_dict().items() if not name.endswith(".origin")}
        return digest([state, *(each.state_dict() for each in self.state.values())])


def by_id(net):
    """Return what is known of ids, whatever rows they have, and what is looked up for others."""
    found = []
    for vocabulary in (net.emb.vocabulary, net.many.vocabulary):
        ids, rows = vocabulary.export()
        order = ids.argsort()
        found += [ids[order], rows[order], vocabulary.clock]
    with torch.no_grad():
        found.append(net.emb.eval()(torch.tensor([-1, -2, 7])))
    net.emb.train()
    return found


def known_by_id(net):
    """Return the row of each id, when it was used last, and how often."""
    state = net.state_dict()
    at = (state["emb.vocabulary.last_use"] >= 0).nonzero().flatten().tolist()
    names = [f"emb.{name}" for name in ("weight", "vocabulary.last_use", "vocabulary.counts") if f"emb.{name}" in state]
    return {int(state["emb.vocabulary.ids"][row]): [state[name][row].tolist() for name in names] for row in at}


def files_of(folder):
    """Return all that a manifest says but for the names of files."""
    content = json.loads((folder / "manifest.json").read_text())
    for facts in content["files"].values():
        del facts["name"]
    return {name: value for name, value in content.items() if name != "sha256"}


def chain(folder, name="adamw lazy", with_state=True):
    """Save a base, three deltas and, after each, a full checkpoint; return the paths of the deltas."""
    one, paths = World(name, with_state), [folder / f"{number}.safetensors" for number in range(3)]
    one.steps(1, 1)
    one.save(folder / "base")
    mark = one.mark()
    for number, path in enumerate(paths):
        one.steps(1, 2 + number, 10 * number)
        mark = one.save_delta(path, mark)
        one.save(folder / f"full{number}")
    return one, paths
