"""How fast rows move on this machine, against what PyTorch offers and against the roof."""
