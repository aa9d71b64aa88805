"""What an optimizer keeps for a row and does to it: inferred from steps on a few rows, not from a list of classes."""

from speedtransfer.optim.probe.outcomes import Known, one_step
from speedtransfer.optim.probe.probe import Findings, PlaneSpec, leaves_idle_rows, probe_optimizer
from speedtransfer.optim.probe.trajectories import STEPS, sparse_gradient
from speedtransfer.optim.probe.trial import OWN, Trial, without_gradients

__all__ = [
    "OWN",
    "STEPS",
    "Findings",
    "Known",
    "PlaneSpec",
    "Trial",
    "leaves_idle_rows",
    "one_step",
    "probe_optimizer",
    "sparse_gradient",
    "without_gradients",
]
