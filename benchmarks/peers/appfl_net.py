"""Updates per second of APPFL's gRPC server and eight workers that train nothing: FedAsync, no TLS.

appfl_net.py run PYTHON MB SECONDS FOLDER starts all with the interpreter of the peer's environment, and prints the
figures; it starts server MB PORT FOLDER, and worker NAME PORT NOTES.
"""

import sys
from pathlib import Path

WORKERS = 8
FAST = {"optimize_memory": False}
"""Its faster setting: otherwise it collects garbage several times for every update."""


def run(python: str, mb: str, seconds: float, folder: Path) -> None:
    """Start server and workers, and count updates."""
    from spawned import Cast, free_ports, lines, listens, tell, watched

    (port,) = free_ports(1)
    notes = [folder / f"worker-{number}.notes" for number in range(WORKERS)]
    program = (python, "-W", "ignore", __file__)
    with Cast(folder) as cast:
        server = cast.start("server", [*program, "server", mb, str(port), str(folder)])
        cast.wait(lambda: listens(port), "the server's start")
        for number, path in enumerate(notes):
            cast.start(path.stem, [*program, "worker", str(number), str(port), str(path)])
        cast.wait(lambda: all(lines([path]) for path in notes), "an update of every worker")
        tell(watched(cast, server, lambda: lines(notes), seconds))


def serve(mb: int, port: str, folder: Path) -> None:
    """Serve until the process is ended."""
    import appfl_agents

    appfl_agents.prepare()
    from appfl.comm.grpc import GRPCServerCommunicator
    from appfl.comm.grpc import serve as listen

    agent = appfl_agents.server({"model_name": "untrained", "model_kwargs": {"mb": mb}}, WORKERS, folder)
    listen(GRPCServerCommunicator(agent, logger=agent.logger, **FAST), server_uri=f"127.0.0.1:{port}")


def work(name: str, port: str, notes: Path) -> None:
    """Send every received model back; a line in `notes` for every answer."""
    import appfl_agents

    appfl_agents.prepare()
    from appfl.comm.grpc import GRPCClientCommunicator

    line = GRPCClientCommunicator(f"worker-{name}", server_uri=f"127.0.0.1:{port}", **FAST)
    line.get_configuration()
    model = line.get_global_model(init_model=True)
    with notes.open("w", buffering=1) as file:
        while True:
            model = model[0] if isinstance(model, tuple) else model
            model = line.update_global_model(model)
            file.write("1\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", python, mb, seconds, folder]:
            run(python, mb, float(seconds), Path(folder))
        case ["server", mb, port, folder]:
            serve(int(mb), port, Path(folder))
        case ["worker", name, port, notes]:
            work(name, port, Path(notes))
        case _:
            raise SystemExit(__doc__)
