"""Checkpoints of a training run: save it during training, and resume it so that it ends with the same bits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from speedtransfer.checkpoint import load_checkpoint, manifest, save_checkpoint
from speedtransfer.checkpoint.folder import Folder
from speedtransfer.checkpoint.load import open_checkpoint
from speedtransfer.checkpoint.plain_data import decode
from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidValueError, StorageError, check_size
from speedtransfer.ranks import exchange_of, world
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.model import remove_tables, table_files
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.sampler import CHOSEN
from speedtransfer.word2vec.settings import SETTINGS, Settings, check_writable
from speedtransfer.word2vec.trainer import Callback, Trainer

# Settings that may change: the rows are the same, and the words of a vocabulary are compared themselves.
_MAY_CHANGE = ("memory", "path", "vocabulary")
GRADIENTS = 4  # version of what `sampler` draws and `gradients` computes: a run is resumed with the same only


class Checkpoints(Callback):
    """Save a run `every` so many steps (an epoch), at a signal to stop and at the end; restore a trainer from a saved run.

    Making it checks the folder `path` and, where it is to be resumed, the settings; nothing is written. With `resume` the run
    goes on from the checkpoint in `path`, if there is one, and with `overwrite` replaces that of another run when first saved.
    `when_stopped`: it is saved at a signal to stop, and at no other time. `own_tables`: table files in `settings.path` are of
    the saved run, wherever they were when it was saved.
    """

    def __init__(
        self, path: Path, settings: Settings, every: int | None = None, resume: bool = False, overwrite: bool = False,
        when_stopped: bool = False, own_tables: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.own_tables = path, own_tables
        self._settings, self._when_stopped = settings, when_stopped
        exists = os.path.lexists(path / manifest.NAME)
        self.resumes = resume and exists
        self._begins = resume and not exists
        self.every = None if every is None else check_size(every, "checkpoint_every", 1)
        self._saved_step: int | None = None
        self._corpus: dict[str, Any] | None = None
        self._threads = torch.get_num_threads()  # here, since torch has fewer while a trainer runs
        if self.resumes:
            self._facts = _facts_of_run(path)
            self._check_settings()
            return
        Folder(path).check_target()
        check_writable(path, "checkpoints")
        if exists and not overwrite:
            raise InvalidValueError(f"{str(path)!r} holds the checkpoint of a run; resume it, or choose another folder")
        if exists:
            _facts_of_run(path)

    def _check_settings(self) -> None:
        """Raise where the saved run had other settings than this one."""
        if self._facts.get("gradients") != GRADIENTS:
            raise InvalidValueError(
                f"the run in {str(self.path)!r} was begun by another version of speedtransfer, which makes other steps; "
                "begin a new run in another folder, or resume with that version"
            )
        saved, ours = self._facts["settings"], _comparable(self._complete())
        for name in ours:
            before = saved.get(name, SETTINGS[name].default)
            if name not in _MAY_CHANGE and before != ours[name]:
                raise InvalidValueError(
                    f"{name} is {ours[name]!r} but the checkpoint {str(self.path)!r} was made with {before!r}; "
                    f"pass that {name}, or choose another checkpoint"
                )

    def _complete(self) -> Settings:
        """Return the settings with what the saved run chose from its corpus, where they leave it open."""
        chosen = {name: self._facts["settings"][name] for name in CHOSEN if getattr(self._settings, name) is None}
        return dataclasses.replace(self._settings, **chosen)

    def restore(self, corpus: Corpus, progress: TrainingProgress) -> Trainer:
        """Return a trainer over `corpus` in the state that was saved; raise where this is not the corpus of the saved run.

        Table files of the saved run are replaced: they may be ahead of the checkpoint.
        """
        group = world()
        processes = 1 if group is None else exchange_of(group).ranks
        with manifest.damage_told(self.path / manifest.NAME):
            settings, before = self._complete(), self._facts.get("processes", 1)
            if before != processes:
                raise InvalidValueError(
                    f"the run in {str(self.path)!r} is one of {before} processes but there are {processes}, which would make "
                    f"other steps; start {before}, or begin a new run in another folder"
                )
            saved, self._corpus = self._facts["corpus"], corpus.fingerprint()
            if saved != self._corpus:
                said = "{words:,} words, {vocabulary_words:,} distinct".format
                ours, theirs = said(**self._corpus), said(**saved)
                raise InvalidValueError(
                    f"the corpus ({ours}) is not that of checkpoint {str(self.path)!r} ({theirs}); pass the same corpus, or "
                    "choose another checkpoint"
                )
        if self.own_tables or self._facts["settings"]["path"] == _comparable(settings)["path"]:
            self._remove_tables(settings)
        trainer = Trainer(corpus, settings)
        try:
            load_checkpoint(self.path, trainer.model, trainer.optimizer, progress=False)
            with manifest.damage_told(self.path / manifest.NAME):
                trainer.load_state(self._facts["training"])
        except BaseException:
            trainer.model.discard()
            raise
        self._saved_step = trainer.step
        share = trainer.step / trainer.num_steps
        progress.log(f"resumed at {share:.0%} (epoch {trainer.epoch} of {settings.epochs}) from {str(self.path)!r}")
        if self._facts["threads"] != torch.get_num_threads():
            progress.log(
                f"this run has {torch.get_num_threads()} threads but was begun with {self._facts['threads']}: "
                "the last bits of the vectors may differ from those of a run without a break"
            )
        return trainer

    def begin(self, trainer: Trainer, progress: TrainingProgress) -> None:  # noqa: D102
        self._progress = progress
        if self._begins:
            progress.log(f"there is no checkpoint in {str(self.path)!r} yet: training begins at the first step")

    def after_step(self, trainer: Trainer) -> None:  # noqa: D102
        is_due = trainer.step % (self.every or math.ceil(trainer.steps_an_epoch)) == 0
        if is_due and trainer.step < trainer.num_steps and not self._when_stopped:
            self._save(trainer)

    def finish(self, trainer: Trainer) -> None:  # noqa: D102
        if self._saved_step != trainer.step and (trainer.interrupted or not self._when_stopped):
            self._save(trainer)
        if trainer.interrupted and self._saved_step == trainer.step:
            self._progress.log(f"checkpoint in {str(self.path)!r}: resume it to train on from here")

    def _save(self, trainer: Trainer) -> None:
        """Save the trainer; the previous checkpoint stays whole until this one is."""
        if self._corpus is None:
            self._corpus = trainer.corpus.fingerprint()
        facts = {
            "settings": _comparable(trainer.settings),
            "corpus": self._corpus,
            "training": trainer.state(),
            "threads": self._threads,
            "gradients": GRADIENTS,
            "processes": trainer.processes,
        }
        try:
            save_checkpoint(self.path, trainer.model, trainer.optimizer, extra={"word2vec": facts}, progress=False)
            self._saved_step = trainer.step
        except StorageError as error:  # a full disk is no reason to lose the run
            self._progress.log(f"no checkpoint at step {trainer.step}: {error}; training goes on")

    def remove(self) -> None:
        """Remove the checkpoint of an earlier run, which `overwrite` lets this one replace."""
        names = Folder(self.path).named()
        if names and not self.resumes:
            for name in (manifest.NAME, *names):  # the manifest first: without it there is no checkpoint
                (self.path / name).unlink(missing_ok=True)

    def _remove_tables(self, settings: Settings) -> None:
        """Remove the table files of the saved run, once it is sure that the checkpoint can replace them."""
        if any(file.exists() for file in table_files(settings.path).values()):
            with ExitStack() as stack:
                for reader in open_checkpoint(Folder(self.path), stack)[1].values():
                    reader.check(lambda num_bytes: None)
        remove_tables(settings.path)


def _facts_of_run(path: Path) -> dict[str, Any]:
    """Return what a run, of any version, has saved in the checkpoint at `path` beside its tensors."""
    content = manifest.parse(Folder(path).read_manifest(), path / manifest.NAME)
    try:
        facts: dict[str, Any] = decode(content["extra"], {}.__getitem__)["word2vec"]  # a run has no tensors
        is_run = all(isinstance(facts[part], dict) for part in ("settings", "corpus", "training"))
    except (ValueError, TypeError, KeyError):
        is_run = False
    if not is_run:
        raise InvalidValueError(f"the checkpoint in {str(path)!r} is of no word2vec run; choose another folder")
    return facts


def _comparable(settings: Settings) -> dict[str, Any]:
    """Return the settings as two runs can compare them: as JSON, with the device that they mean here."""
    values = settings.as_dict()
    values["optimizer"] = settings.optimizer.lower()
    values["device"] = str(resolve_device(settings.device))
    values["path"] = None if settings.path is None else os.path.abspath(settings.path)
    plain: dict[str, Any] = json.loads(json.dumps(values, default=repr))
    return plain
