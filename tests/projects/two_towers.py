"""A model that each framework's test trains, users by items, and its data as a `Dataset` of (user, item, rating)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import speedtransfer as st
from projects.data import ITEMS, USERS, interactions
from projects.pairs import DENSE, classes, hand_over


class Net(nn.Module):
    """Ratings from the rows of a user and an item; `weight` starts as its author likes it."""

    def __init__(self, dim=8):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.layers = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, users, items):
        user, item = self.user(users), self.item(items)
        return self.layers(torch.cat([user, item], 1)).squeeze(1) + (user * item).sum(1)


def make(way, seed=0):
    torch.manual_seed(seed)
    with classes(way):
        model = Net()
    hand_over(model, way)
    return model


def columns():
    data = interactions()
    rating = torch.tensor(data.rating).to(torch.get_default_dtype())
    return torch.tensor(data.user), torch.tensor(data.item), rating - 3


def loader(batch_size=64, seed=0, num_workers=0):
    generator = torch.Generator().manual_seed(seed)
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return DataLoader(TensorDataset(*columns()), batch_size, shuffle=True, generator=generator, **workers)


def ahead(net, way, batches):
    return batches if way == DENSE else st.prefetch(batches, lambda batch: [(net.user, batch[0]), (net.item, batch[1])])


@torch.no_grad()
def scores(model):
    """Return what the model answers for all users and one item each."""
    training = model.training
    model.eval()
    users = torch.arange(USERS)
    answer = model(users, users % ITEMS)
    model.train(training)
    return answer
