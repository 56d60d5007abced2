"""Starts a training script on the workers of a Ray cluster, one process per worker.

    python examples/ray_train.py --workers 2 train_vqgan.py --image_folder photos/

Each worker of Ray starts the script as a process of its own, because a script handles signals in its main thread, which
is Ray's in a worker. The process gets the variables that torchrun sets, and a port of its own: Ray's TorchTrainer has
opened a process group on the port of its own MASTER_PORT.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
from typing import Any

import ray
from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer

MISTAKE = 2  # the exit code of a mistake in the flags: starting again does not help


def start_script(config: dict[str, Any]) -> int:
    """Run by each worker: the script's exit code if it finished or refused its flags. Any other code raises an error,
    after which Ray starts all workers again."""
    context = train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        address = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free.getsockname()[1]))
    environment = {
        "RANK": context.get_world_rank(), "LOCAL_RANK": context.get_local_rank(),
        "WORLD_SIZE": context.get_world_size(), "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address[0], "MASTER_PORT": address[1],
    }  # fmt: skip
    # If Ray ends this worker, the script gets SIGTERM and saves; otherwise it would keep the run folder.
    command = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    command += [sys.executable, *config["command"]]
    variables = {name: str(value) for name, value in environment.items()}
    code = subprocess.run(command, cwd=config["folder"], env={**os.environ, **variables}).returncode
    if code not in (0, MISTAKE):
        raise RuntimeError(f"rank {context.get_world_rank()} ended with code {code}")
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description="Start a training script on the workers of a Ray cluster.")
    parser.add_argument("--workers", type=int, required=True, help="processes in all")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--cpus", type=int, default=1, help="CPU cores of each worker (1)")
    parser.add_argument("--max_failures", type=int, default=3, help="how often Ray starts the workers again (3)")
    parser.add_argument("--storage", default="runs/ray", help="Ray's own records, on a shared disk (runs/ray)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a training script and its flags")
    args = parser.parse_args()
    trainer = TorchTrainer(
        start_script,
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own group, in which nothing is computed
        train_loop_config={"command": args.command, "folder": os.getcwd()},
        scaling_config=train.ScalingConfig(
            num_workers=args.workers, use_gpu=args.gpu, resources_per_worker={"CPU": args.cpus, "GPU": int(args.gpu)}
        ),
        run_config=train.RunConfig(
            storage_path=os.path.abspath(args.storage),
            failure_config=train.FailureConfig(max_failures=args.max_failures),
        ),
    )
    sys.exit(trainer.fit().return_value)


if __name__ == "__main__":
    main()
