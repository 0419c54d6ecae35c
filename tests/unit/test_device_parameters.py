"""Where a server's parameters go when the models are on a GPU."""

import logging

import pytest
import torch

from paceline.core.modes import parse_mode
from paceline.exceptions import PlanError
from paceline.params import OptimizerSpec, describe
from paceline.ps.config import ServerConfig
from paceline.ps.device_parameters import DeviceParameters, on_device


def adopted(device: str, workers: int, server_device: str = "auto") -> DeviceParameters | None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, _ = describe(model, optimizer)
    config = ServerConfig(
        rank=0,
        servers=1,
        workers=workers,
        mode="asp",
        run_dir="",
        deadline_s=1.0,
        device=device,
        server_device=server_device,
    )
    weights = torch.zeros(layout.nbytes, dtype=torch.uint8)
    spec = OptimizerSpec.of(optimizer)
    return on_device("host:0", config, [parse_mode("asp")], layout, spec, weights)


def test_workers_on_several_gpus_keep_the_servers_in_host_memory(monkeypatch, caplog):
    """They share memory on one GPU only: the second worker was refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with caplog.at_level(logging.WARNING, "paceline.server"):
        assert adopted("cuda", workers=2) is None
    assert "the 2 workers are dealt out to 2 GPUs" in caplog.text
    with pytest.raises(PlanError, match="server_device=cuda: the 2 workers are dealt out .*device=cuda:0"):
        adopted("cuda", workers=2, server_device="cuda")


@pytest.mark.parametrize(("device", "workers", "gpus"), [("cuda", 1, 2), ("cuda:0", 2, 2), ("cuda", 2, 1)])
def test_workers_on_one_gpu_do_not(monkeypatch, caplog, device, workers, gpus):
    """Here no GPU is found, which is looked for next."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with caplog.at_level(logging.WARNING, "paceline.server"):
        assert adopted(device, workers) is None
    assert "this server does not see the workers' device" in caplog.text
