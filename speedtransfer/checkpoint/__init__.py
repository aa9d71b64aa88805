"""Checkpoints: a folder of safetensors files and a JSON manifest, written and read in chunks, whole or not at all."""

from speedtransfer.checkpoint.load import load_checkpoint
from speedtransfer.checkpoint.save import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
