"""A training run that uses all that a checkpoint saves, and digests of it; imported by the tests of checkpoints."""

import hashlib
import random

import numpy as np
import torch
from optimizer_cases import case_named
from torch import Tensor, nn

import speedtransfer as st

ROWS, DIM = 40, 6


class Net(nn.Module):
    """An embedding, a bag, dropout and a dense part with buffers."""

    def __init__(self, library=st, **options):
        super().__init__()
        # Lazy rows go on bit for bit; exact ones take the steps they missed when they are saved, which rounds.
        lazy = {"idle": "lazy"} if library is st else {}
        self.words = library.Embedding(ROWS, DIM, **{**lazy, **options})
        self.bag = library.EmbeddingBag(9, DIM, mode="sum", **lazy)
        self.drop = nn.Dropout(0.3)
        self.dense = nn.Linear(DIM, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, ids):
        return self.norm(self.dense(self.drop(self.words(ids).mean(1) + self.bag(ids % 9))))


class Run:
    """A model with optimizer, scheduler, scaler, a shuffled loader, and generators of NumPy."""

    def __init__(self, case, seed=0, library=st, **options):
        torch.manual_seed(seed)
        self.model = Net(library, **options)
        self.optimizer = case.make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 9, 9], gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, ROWS - 1, (24, 3), generator=torch.Generator().manual_seed(5))
        self.loader = torch.utils.data.DataLoader(ids, batch_size=6, shuffle=True, generator=self.generator)
        self.losses = []
        kinds = ("Philox", "MT19937", "PCG64")
        self.numpy = {kind: np.random.Generator(getattr(np.random, kind)(seed)) for kind in kinds}

    def epochs(self, count):
        for _ in range(count):
            for ids in self.loader:
                noise = random.random() + np.random.rand()
                self.optimizer.zero_grad()
                loss = (self.model(ids) - noise).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.losses.append(loss.item())

    @property
    def others(self):
        return {"scheduler": self.scheduler, "scaler": self.scaler, "generator": self.generator, **self.numpy}

    def save(self, path, **more):
        st.save_checkpoint(path, self.model, self.optimizer, **self.others, **more)

    def load(self, path):
        return st.load_checkpoint(path, self.model, self.optimizer, **self.others)

    def digest(self):
        """Tell apart runs that differ in a bit, of what is saved or of what the next step depends on."""
        parts = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        parts += [self.scaler.state_dict(), self.generator.get_state(), torch.get_rng_state()]
        parts += [random.getstate(), np.random.get_state(legacy=False)]
        parts += [generator.bit_generator.state for generator in self.numpy.values()]
        return digest(parts)


def trained(epochs, seed=0):
    seed_all(5)
    run = Run(case_named("adamw"), seed)
    run.epochs(epochs)
    return run


def digest(value):
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha, value):
    if isinstance(value, Tensor):
        sha.update(str((value.dtype, tuple(value.shape))).encode())
        if value.numel():
            sha.update(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        _feed(sha, torch.from_numpy(value.copy()))
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            sha.update(repr(key).encode())
            _feed(sha, value[key])
    elif isinstance(value, list | tuple):
        sha.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _feed(sha, item)
    else:
        sha.update(repr(value).encode())


def flip(folder, pattern):
    """Change a bit near the end of a file."""
    (file,) = folder.glob(pattern)
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
