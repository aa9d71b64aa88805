"""Ids without bound: which row of a table an id has, which ids are admitted, and which have to go."""

from speedtransfer.vocabulary.changes import Changes
from speedtransfer.vocabulary.id_rows import PADDING_ROW, UNSEEN_ROW
from speedtransfer.vocabulary.ids import FeatureKeys, NotedIds, as_ids
from speedtransfer.vocabulary.loaded_state import LoadPlan
from speedtransfer.vocabulary.mixing import owners_of
from speedtransfer.vocabulary.string_ids import hash_ids
from speedtransfer.vocabulary.vocabulary import Vocabulary, VocabularyStats

__all__ = [
    "PADDING_ROW",
    "UNSEEN_ROW",
    "Changes",
    "FeatureKeys",
    "LoadPlan",
    "NotedIds",
    "Vocabulary",
    "VocabularyStats",
    "as_ids",
    "hash_ids",
    "owners_of",
]
