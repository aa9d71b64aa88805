"""Checkpoints: safetensors files and a JSON manifest, written and read in chunks, whole or not at all; deltas between them."""

from speedtransfer.checkpoint.apply_deltas import apply_delta
from speedtransfer.checkpoint.background import BackgroundSave
from speedtransfer.checkpoint.load import load_checkpoint
from speedtransfer.checkpoint.marks import Mark, mark
from speedtransfer.checkpoint.merge_deltas import merge
from speedtransfer.checkpoint.save import save_checkpoint
from speedtransfer.checkpoint.save_deltas import save_delta

__all__ = ["BackgroundSave", "Mark", "apply_delta", "load_checkpoint", "mark", "merge", "save_checkpoint", "save_delta"]
