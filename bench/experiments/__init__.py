"""Experiments about hardware, declared as the suites of ``speedtransfer bench`` are, and those of a training step on a GPU."""
