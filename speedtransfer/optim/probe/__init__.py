"""What an optimizer keeps for a row and does to it: inferred from steps on a few rows, not from a list of classes."""

from speedtransfer.optim.probe.probe import PlaneSpec, probe

__all__ = ["PlaneSpec", "probe"]
