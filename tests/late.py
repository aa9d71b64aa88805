"""Modules that are imported when they are used: importing gensim takes a second of every worker, and few run its tests."""

import importlib


class Late:
    """A module that is imported when an attribute of it is asked for."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest asks whatever it finds in a file whether it is a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


sympy = Late("sympy")
models = Late("gensim.models")
fasttext = Late("gensim.models.fasttext")
