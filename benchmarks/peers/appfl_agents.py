"""APPFL's agents for the work here, and a stand-in for a library that they import and the work does not need."""

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import work

FILES = str(Path(__file__).parent / "appfl_files.py")
EPOCHS_MAX = 10**9


def prepare() -> None:
    """Call before APPFL is imported: its agents import piq, which rates images and needs torchvision."""
    stand_in = ModuleType("piq")
    stand_in.brisque = stand_in.total_variation = None  # type: ignore[attr-defined]
    sys.modules["piq"] = stand_in
    logging.disable(logging.CRITICAL)


def server(model: dict[str, Any], devices: int, folder: Path, epochs: int = EPOCHS_MAX) -> Any:
    """FedAsync with polynomial staleness, mixing models as the paper does."""
    from appfl.agent import ServerAgent
    from omegaconf import OmegaConf

    config = {
        "client_configs": {
            "train_configs": {"send_gradient": False, "trainer": "VanillaTrainer"},
            "model_configs": {"model_path": FILES, **model},
        },
        "server_configs": {
            "num_clients": devices,
            "num_global_epochs": epochs,
            "optimize_memory": False,
            "scheduler": "AsyncScheduler",
            "scheduler_kwargs": {"num_clients": devices, "optimize_memory": False},
            "aggregator": "FedAsyncAggregator",
            "aggregator_kwargs": {
                "alpha": 0.6,
                "staleness_fn": "polynomial",
                "staleness_fn_kwargs": {"a": 0.5},
                "optimize_memory": False,
            },
            "logging_output_dirname": str(folder),
            "logging_output_filename": "server",
        },
    }
    return ServerAgent(server_agent_config=OmegaConf.create(config))


def worker(device: int, folder: Path) -> Any:
    """The perceptron and H steps on this device's data; APPFL calls it a client."""
    from appfl.agent import ClientAgent
    from omegaconf import OmegaConf

    config = {
        "client_id": f"device-{device}",
        "optimize_memory": False,
        "train_configs": {
            "trainer": "VanillaTrainer",
            "mode": "step",
            "num_local_steps": work.ITERATIONS,
            "train_batch_size": work.BATCH,
            "optim": "SGD",
            "optim_args": {"lr": work.GAMMA},
            "device": "cpu",
            "do_validation": False,
            "send_gradient": False,
            "optimize_memory": False,
            "loss_fn_path": FILES,
            "loss_fn_name": "Loss",
            "metric_path": FILES,
            "metric_name": "accuracy",
            "logging_output_dirname": str(folder),
            "logging_output_filename": f"device-{device}",
        },
        "model_configs": {"model_path": FILES, "model_name": "perceptron"},
        "data_configs": {
            "dataset_path": FILES,
            "dataset_name": "dataset",
            "dataset_kwargs": {"device": device},
        },
    }
    return ClientAgent(client_agent_config=OmegaConf.create(config))
