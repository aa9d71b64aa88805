"""Product-key memory layers, and which of their rows are used."""

from speedtransfer.memory_layers.memory_layer import MemoryLayer
from speedtransfer.memory_layers.memory_use import MemoryUse
from speedtransfer.memory_layers.product_keys import ProductKeys

__all__ = ["MemoryLayer", "MemoryUse", "ProductKeys"]
