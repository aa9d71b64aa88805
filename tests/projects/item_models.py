"""Recommenders of items as public code writes them: they use `weight` whole, tied, scaled in place and written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from projects.data import ITEMS, USERS, interactions


class LightGCN(nn.Module):
    """Propagates the whole of two tables over the graph of interactions; its penalty is on the rows of the batch."""

    def __init__(self, dim: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.layers = layers
        self.embedding_user = nn.Embedding(num_embeddings=USERS, embedding_dim=dim)
        self.embedding_item = nn.Embedding(num_embeddings=ITEMS, embedding_dim=dim)
        nn.init.normal_(self.embedding_user.weight, std=0.1)
        nn.init.normal_(self.embedding_item.weight, std=0.1)
        data = interactions()
        user, item = torch.tensor(data.user), torch.tensor(data.item) + USERS
        edges = torch.stack([torch.cat([user, item]), torch.cat([item, user])])
        degree = torch.bincount(edges[0], minlength=USERS + ITEMS).to(torch.get_default_dtype())
        values = (degree[edges[0]] * degree[edges[1]]).rsqrt()
        self.graph = torch.sparse_coo_tensor(edges, values, (USERS + ITEMS, USERS + ITEMS)).coalesce()

    def computer(self) -> tuple[Tensor, Tensor]:
        every = torch.cat([self.embedding_user.weight, self.embedding_item.weight])
        layers = [every]
        for _ in range(self.layers):
            every = torch.sparse.mm(self.graph, every)
            layers.append(every)
        users, items = torch.split(torch.stack(layers, dim=1).mean(1), [USERS, ITEMS])
        return users, items

    def loss(self, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
        all_users, all_items = self.computer()
        user, item, other = all_users[users], all_items[items], all_items[others]
        first = self.embedding_user(users), self.embedding_item(items), self.embedding_item(others)
        penalty = sum(rows.norm(2).pow(2) for rows in first) / 2 / len(users)
        return F.softplus((user * other).sum(1) - (user * item).sum(1)).mean() + 1e-2 * penalty

    def scores(self) -> Tensor:
        users, items = self.computer()
        return torch.sigmoid(users @ items.t())


class MatrixFactorization(LightGCN):
    """BPR on the tables themselves; ranks by `weight` transposed."""

    def computer(self) -> tuple[Tensor, Tensor]:
        return self.embedding_user.weight, self.embedding_item.weight

    def loss(self, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
        user, item, other = self.embedding_user(users), self.embedding_item(items), self.embedding_item(others)
        return F.softplus((user * other).sum(1) - (user * item).sum(1)).mean()


def scaled_embedding() -> type[nn.Embedding]:
    """Return a class with a start of its own, as spotlight has it: written to `weight.data`, by an overridden method."""

    class ScaledEmbedding(nn.Embedding):
        def reset_parameters(self) -> None:
            self.weight.data.normal_(0, 1.0 / self.embedding_dim)
            if self.padding_idx is not None:
                self.weight.data[self.padding_idx].fill_(0)

    return ScaledEmbedding


class BilinearNet(MatrixFactorization):
    """Subclasses of the embedding, and biases of width 1 that start as zero."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__(dim)
        scaled = scaled_embedding()
        self.embedding_user, self.embedding_item = scaled(USERS, dim), scaled(ITEMS, dim, padding_idx=0)
        self.item_biases = nn.Embedding(ITEMS, 1)
        self.item_biases.weight.data.zero_()

    def loss(self, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
        biases = self.item_biases(others) - self.item_biases(items)
        margin = biases.squeeze() + (self.embedding_user(users) * self.embedding_item(others)).sum(1)
        return torch.clamp(margin - (self.embedding_user(users) * self.embedding_item(items)).sum(1) + 1, 0.0).mean()


class SASRec(nn.Module):
    """Causal attention over the last items; the output layer is the table of items, its lookups are scaled in place."""

    def __init__(self, dim: int = 16, length: int = 10) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS + 1, dim, padding_idx=0)
        self.pos_emb = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def hidden(self, history: Tensor) -> Tensor:
        x = self.item_emb(history)
        x *= self.item_emb.embedding_dim**0.5
        x += self.pos_emb(torch.arange(history.shape[1]))
        length = history.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        return self.encoder(x, mask=mask)[:, -1]

    def loss(self, history: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(self.hidden(history) @ self.item_emb.weight.transpose(0, 1), target)
        for param in self.item_emb.parameters():
            loss = loss + 1e-3 * torch.norm(param)
        return loss

    def scores(self, history: Tensor) -> Tensor:
        return self.hidden(history) @ self.item_emb.weight[1:].T
