"""Train a small GPT with hashed n-gram tables in several ways, on the same batches, and compare losses, speed and memory.

A model of your own needs the lines of `make_model` and one of `GPT.forward`. What such tables are, and how to size them:
docs/ngrams.md.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, SparseAdam

import speedtransfer as st


class Way(NamedTuple):
    """How tables are held and trained: "none", "dense", "sparse" or "ours", whose idle rows are lazy or exact.

    With `prefetch` the rows of the next batch are read while this one is computed.
    """

    title: str
    kind: str
    idle: str = "lazy"
    prefetch: bool = False


WAYS = {
    "none": Way("no tables", "none"),
    "dense": Way("nn.Embedding + AdamW", "dense"),
    "sparse": Way("nn.Embedding(sparse=True) + SparseAdam", "sparse"),
    "lazy": Way('speedtransfer, idle="lazy"', "ours", "lazy"),
    "lazy-prefetch": Way('speedtransfer, idle="lazy", prefetch', "ours", "lazy", prefetch=True),
    "exact": Way('speedtransfer, idle="exact"', "ours", "exact"),
    "exact-prefetch": Way('speedtransfer, idle="exact", prefetch', "ours", "exact", prefetch=True),
}
# What is held against what, and what should be the case.
PAIRS = (
    ("exact", "dense", "the same to rounding"),
    ("lazy-prefetch", "lazy", "the same bits"),
    ("exact-prefetch", "exact", "the same bits"),
    ("lazy", "dense", "different: idle rows stay put"),
    ("sparse", "dense", "different: idle rows stay put"),
)
# Each is a flag.
SIZES = {
    "steps": (200, "training steps"),
    "batch": (16, "windows of a batch"),
    "context": (64, "tokens of a window"),
    "vocabulary": (8192, "words, the most frequent ones"),
    "width": (128, "values of a hidden state"),
    "layers": (4, "blocks of the model"),
    "attention_heads": (4, "attention heads of a block"),
    "heads": (16, "rows that a token looks up, of all n-grams together"),
    "rows": (50_000, "rows of a head"),
    "dim": (16, "values of a row"),
}
ORDERS = (2, 3)  # words of the n-grams that have tables
LR, TABLE_LR, LEAST_LR, WEIGHT_DECAY = 1e-3, 5e-3, 0.1, 0.01
WARM_STEPS = 5  # that are not timed: kernels are compiled, and pages of tables are touched for the first time
VALIDATIONS, VALIDATION_BATCHES = 6, 8


# --- the text ---------------------------------------------------------------------------------------------------------

UNKNOWN, END = 0, 1  # tokens that are no words: all words outside the vocabulary, and the end of a line


def read_tokens(path: Path | None, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Return the tokens of a text to train and to validate on, and how many different ones there are.

    Words are lower-case, between spaces; the frequent ones of the first nine tenths, which are trained on, have a number. The
    text is a file, by default the World Factbook, which comes with the package.
    """
    shipped = resources.files("speedtransfer.word2vec").joinpath("corpora", "world_factbook.words.txt.gz")
    data = gzip.decompress(shipped.read_bytes()) if path is None else path.read_bytes()
    words: list[str] = []
    for line in data.decode("utf-8", errors="replace").lower().split("\n"):
        found = line.split()
        words += [*found, ""] if found else []
    split = len(words) - len(words) // 10
    counts = collections.Counter(word for word in words[:split] if word)
    numbers = {word: number for number, (word, _) in enumerate(counts.most_common(vocabulary - 2), start=2)}
    numbers[""] = END
    tokens = torch.tensor([numbers.get(word, UNKNOWN) for word in words])
    return tokens[:split], tokens[split:], len(numbers) + 1


def batches(windows: Tensor, size: int) -> Iterator[Tensor]:
    """Yield batches ``(size, length + 1)`` without end, all windows once in an epoch, the same each time."""
    draw = torch.Generator().manual_seed(0)
    while True:
        for places in torch.randperm(len(windows), generator=draw).split(size):
            if len(places) == size:
                yield windows[places]


# --- the model --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and a network, each on the normalised hidden states and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without a bias: attention does not depend on that of the keys, and Adam would follow the rounding of its gradient.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden states of ``(batch, time, width)``."""
        batch, time, width = hidden.shape
        parts = self.qkv(self.norm1(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(found.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.mlp(self.norm2(hidden))


class GPT(nn.Module):
    """Predict each next token; `ngrams`, if any, takes tokens and returns what is added before the last half of the blocks."""

    ngrams: nn.Module | None

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        self.head.weight = self.tokens.weight
        self.ngrams = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, time, vocabulary)`` for the token after each of ``(batch, time)``."""
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            if self.ngrams is not None and number == len(self.blocks) // 2:
                hidden = hidden + self.ngrams(tokens)
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy of ``(batch, time + 1)`` tokens, each predicted from those before it."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def make_model(way: Way, args: argparse.Namespace, vocabulary: int) -> GPT:
    """Return the model, whose first numbers are the same in every way."""
    torch.manual_seed(0)
    model = GPT(vocabulary, args.width, args.layers, args.attention_heads, args.context)
    if way.kind != "none":
        heads = args.heads // len(ORDERS)
        hashes = st.NgramHash(ORDERS, heads, args.rows, vocab_size=vocabulary, eos=END)
        model.ngrams = st.NgramEmbedding(hashes, args.dim, out_dim=args.width, idle=way.idle)
        if way.kind != "ours":
            model.ngrams.embedding = nn.Embedding(hashes.num_rows, args.dim, sparse=way.kind == "sparse")
            nn.init.zeros_(model.ngrams.embedding.weight)  # as a table begins
    return model.to(getattr(torch, args.dtype))


def make_optimizers(way: Way, model: GPT) -> list[Optimizer]:
    """Return what trains the model: AdamW, and SparseAdam beside it for sparse gradients."""
    tables = [] if model.ngrams is None else list(model.ngrams.embedding.parameters())
    others = [one for one in model.parameters() if all(one is not table for table in tables)]
    options: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY, "fused": True}
    if way.kind == "sparse":
        return [AdamW(others, **options), SparseAdam(tables, lr=TABLE_LR)]
    return [AdamW([{"params": others}, {"params": tables, "lr": TABLE_LR}], **options)]


# --- training ---------------------------------------------------------------------------------------------------------


def train(way: Way, args: argparse.Namespace, text: tuple[Tensor, Tensor, int]) -> tuple[dict[str, Any], Tensor | None]:
    """Return losses, times and bytes of one way, and the numbers of its table."""
    training, validation, vocabulary = text
    model, steps = make_model(way, args, vocabulary), args.steps
    optimizers = make_optimizers(way, model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: rate(step, steps)) for one in optimizers]
    # Stretches of the text, ``(n, context + 1)``; the last token of each is the first of the next.
    windows, held_out = (part.unfold(0, args.context + 1, args.context) for part in (training, validation))
    held_out = held_out[: VALIDATION_BATCHES * args.batch]
    stream: Iterable[Tensor] = itertools.islice(batches(windows, args.batch), steps)
    if way.prefetch:
        # Rows of the next batches move while one is computed. What a step changes of them is read again: the numbers stay.
        stream = st.prefetch(stream, lambda windows: {model.ngrams: windows[:, :-1]})
    losses, validations, seconds = [], [], []
    start = time.perf_counter()
    for step, batch in enumerate(stream, start=1):
        loss = model.loss(batch)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if step % max(1, steps // VALIDATIONS) == 0 or step == steps:
            with torch.no_grad():
                sums = [float(model.loss(part)) * len(part) for part in held_out.split(args.batch)]
            validations.append([step, sum(sums) / len(held_out)])
            print(f"{way.title}: step {step:,}, loss {losses[-1]:.4f}, validation {validations[-1][1]:.4f}")
        start = time.perf_counter()
    # Rows that are idle catch up now.
    table = None if model.ngrams is None else model.ngrams.embedding.state_dict()["weight"].clone()
    step_s = statistics.median(seconds[WARM_STEPS:] or seconds)
    found = {
        "losses": losses,
        "validation": validations,
        "step_s": step_s,
        "table_bytes": table_bytes(model, optimizers),
    }
    tokens, size = args.batch * args.context, found["table_bytes"] / 1e6
    print(f"{way.title}: {tokens / step_s:,.0f} tokens/s, {size:,.0f} MB of tables and their state")
    return found, table


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rates: up within the first steps, and down along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return LEAST_LR + (1 - LEAST_LR) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def table_bytes(model: GPT, optimizers: list[Optimizer]) -> int:
    """Return the bytes of the n-gram tables and their state; a dense gradient comes on top of them."""
    if model.ngrams is None:
        return 0
    embedding = model.ngrams.embedding
    if isinstance(embedding, st.Embedding):
        return embedding.table.nbytes
    state = [value for one in optimizers for value in one.state.get(embedding.weight, {}).values()]
    return sum(value.nbytes for value in (embedding.weight, *state) if torch.is_tensor(value))


# --- what was found ---------------------------------------------------------------------------------------------------


def compare(found: dict[str, dict[str, Any]], tables: dict[str, Tensor | None]) -> list[dict[str, Any]]:
    """Return how far losses and tables are apart, for the pairs that are there."""
    made = []
    for name, other, wanted in PAIRS:
        ours, theirs = tables.get(name), tables.get(other)
        if ours is not None and theirs is not None:
            losses = max(abs(a - b) for a, b in zip(found[name]["losses"], found[other]["losses"], strict=True))
            table = float((ours - theirs).abs().max() / theirs.abs().max())
            about = {"contender": name, "to": other, "wanted": wanted}
            made.append({**about, "loss_difference": losses, "table_difference": table})
    return made


def sentence(one: dict[str, Any]) -> str:
    """Return what a comparison has found."""
    names = " and ".join(WAYS[one[key]].title for key in ("contender", "to"))
    if not one["loss_difference"] and not one["table_difference"]:
        return f"{names}: all losses and the table are the same bits"
    losses = f"apart by at most {one['loss_difference']:.1e}" if one["loss_difference"] else "the same bits"
    table = f"by {one['table_difference']:.1e} of its largest number" if one["table_difference"] else "the same bits"
    return f"{names}: losses {losses}, the table {table} (wanted: {one['wanted']})"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the command line; return settings, losses, times, bytes and comparisons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text, a document a line (default: the shipped one)")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="these ways alone", metavar="NAME")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    for name, (default, about) in SIZES.items():
        text = f"{about} (default: %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=text, metavar="N")
    args = parser.parse_args(arguments)
    for name in SIZES:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)} but must be at least 1")
    try:
        training, validation, vocabulary = read_tokens(args.data, args.vocabulary)
    except OSError as error:
        parser.error(f"{args.data} cannot be read ({error}); pass a text file")
    if len(training) <= args.batch * args.context or len(validation) <= args.context:
        parser.error(f"the text has {len(training):,} tokens; pass a longer one, or a smaller --batch or --context")
    found: dict[str, dict[str, Any]] = {}
    tables: dict[str, Tensor | None] = {}
    for name in args.only:
        found[name], tables[name] = train(WAYS[name], args, (training, validation, vocabulary))
    comparisons = compare(found, tables)
    print(*map(sentence, comparisons), sep="\n")
    return {
        "settings": {"orders": list(ORDERS), "dtype": args.dtype, **{name: getattr(args, name) for name in SIZES}},
        "data": "world_factbook" if args.data is None else args.data.name,
        "vocabulary": vocabulary,
        "tokens": {"train": len(training), "validation": len(validation)},
        "contenders": found,
        "comparisons": comparisons,
    }


if __name__ == "__main__":
    main()
