"""Updates per second of APPFL's gRPC server and eight workers that train nothing: FedAsync, no TLS.

appfl_net.py run PYTHON MB SECONDS FOLDER starts all with the interpreter of the peer's environment, and prints what it
found; server MB PORT FOLDER, and worker NAME PORT NOTES, are started by it.
"""

import socket
import sys
from pathlib import Path

WORKERS = 8


def run(python: str, mb: str, seconds: float, folder: Path) -> None:
    """Start all, let them work, count."""
    from spawned import Cast, lines, tell, watched

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    notes = [folder / f"worker-{number}.notes" for number in range(WORKERS)]
    with Cast(folder) as cast:
        server = cast.start("server", [python, "-W", "ignore", __file__, "server", mb, port, str(folder)])
        cast.wait((folder / "ready").exists, "the server's start")
        for number, path in enumerate(notes):
            cast.start(path.stem, [python, "-W", "ignore", __file__, "worker", str(number), port, str(path)])
        cast.wait(lambda: lines(notes) >= WORKERS, "the first updates")
        tell(watched([server], lambda: lines(notes), seconds))


def serve(mb: int, port: str, folder: Path) -> None:
    """A server until it is ended."""
    import appfl_agents

    appfl_agents.prepare()
    from appfl.comm.grpc import GRPCServerCommunicator
    from appfl.comm.grpc import serve as listen

    agent = appfl_agents.server({"model_name": "untrained", "model_kwargs": {"mb": mb}}, WORKERS, folder)
    (folder / "ready").touch()
    listen(GRPCServerCommunicator(agent, logger=agent.logger), server_uri=f"127.0.0.1:{port}")


def work(name: str, port: str, notes: Path) -> None:
    """Send back what comes, again and again; a line for every answer."""
    import appfl_agents

    appfl_agents.prepare()
    from appfl.comm.grpc import GRPCClientCommunicator

    line = GRPCClientCommunicator(f"worker-{name}", server_uri=f"127.0.0.1:{port}")
    line.get_configuration()
    model = line.get_global_model(init_model=True)
    with notes.open("w", buffering=1) as file:
        while True:
            model = model[0] if isinstance(model, tuple) else model
            model = line.update_global_model(model)
            file.write("1\n")


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "run":
        run(rest[0], rest[1], float(rest[2]), Path(rest[3]))
    elif role == "server":
        serve(int(rest[0]), rest[1], Path(rest[2]))
    else:
        work(rest[0], rest[1], Path(rest[2]))
