"""Tasks per second of APPFL's virtual-time simulator: 100 devices, all in flight, the perceptron on digits.

appfl_sim.py TASKS.
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import appfl_agents
import torch
import work


def main(tasks: int) -> None:
    """Run until this many updates are applied."""
    appfl_agents.prepare()
    from appfl.vsim import AsyncSimDriver, ClientProfile, VsimLogger

    torch.set_num_threads(1)
    rng = random.Random(0)  # noqa: S311 (speeds of devices)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers = [appfl_agents.worker(device, folder) for device in range(work.DEVICES)]
        profiles = {one.get_id(): ClientProfile(rng.uniform(0.5, 1.5), 0.0) for one in workers}
        server = appfl_agents.server({"model_name": "perceptron"}, work.DEVICES, folder, tasks)
        driver = AsyncSimDriver(server, workers, profiles, work.DEVICES, VsimLogger(), base_step_time=0.1)
        begun = perf_counter()
        driver.run()
        took = perf_counter() - begun
    trained = tasks + work.DEVICES - 1  # those in flight at the end were trained when they began
    print(json.dumps({"tasks_per_s": trained / took}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(int(sys.argv[1]))
