"""What a plan finds out of a CUDA device: free memory and rates."""

import torch

from speedtransfer.planning.this_machine import this_machine


def test_this_machine(device):
    before = torch.cuda.memory_allocated(device)
    machine = this_machine(rates=["device", "link"])
    assert machine.device == torch.cuda.get_device_name(device)
    assert machine.devices == torch.cuda.device_count()
    assert 0 < machine.device_bytes <= torch.cuda.mem_get_info(device)[1]
    for name in ("device_bytes_per_s", "link_up_bytes_per_s", "link_down_bytes_per_s"):
        assert getattr(machine, name) > 0, machine.notes
        assert machine.sources[name].startswith("measured")
    assert torch.cuda.memory_allocated(device) == before
