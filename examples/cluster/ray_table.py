"""Teach a table of documents on a Ray cluster. An actor holds the base; Ray gives it documents and restarts it.

All nodes must see the library's folder, with file locks. What is finished is skipped, so the same command goes on.

pip install ray
python examples/cluster/ray_table.py notes.jsonl users --model smollm2 --study          # two actors on this machine
python examples/cluster/ray_table.py notes.jsonl /shared/users --address auto --actors 8 --gpus 1
"""

import argparse
import json
import socket
import sys
from pathlib import Path

import ray
from ray.exceptions import RayActorError
from ray.util import ActorPool

from locas_peft import backbone
from locas_peft.bases import load_base
from locas_peft.library import Library
from locas_peft.library.table import FAILURES, Document, load_table
from locas_peft.reading import ReadingSettings
from locas_peft.text import unwrap

RETRIES = 3
"""How often a document is tried again whose actor ended: one that needs too much memory would end all of them."""

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("table", help="JSON Lines with name, text or path, and settings of the line's own")
parser.add_argument("library", help="a folder that all nodes see")
parser.add_argument("--model", default=backbone.NAME, help="a folder, a name on the hub, a GGUF file, or smollm2")
parser.add_argument("--study", action="store_true")
parser.add_argument("--r", type=int)
parser.add_argument("--address", help="of the cluster, or auto; a cluster on this machine where it is left out")
parser.add_argument("--actors", type=int, default=2)
parser.add_argument("--cpus", type=int, default=1, help="of each actor")
parser.add_argument("--gpus", type=float, default=0, help="of each actor")


@ray.remote(max_restarts=-1, max_task_retries=RETRIES)
class Teacher:
    """A base, and the library that it writes memories into."""

    def __init__(self, model: str, folder: str):
        self._base, self._tokenizer = load_base(model)
        self._library, self._embedded = Library(folder), backbone.is_embedded(model)

    def teach(self, document: Document) -> dict | None:
        """Teach one document; return a row of failures.jsonl where that fails."""
        try:
            text = unwrap(document.load()) if self._embedded else document.load()
            self._library.add(self._base, self._tokenizer, text, document.name, document.settings, resume=True)
        except Exception as error:
            return {"line": document.line, "name": document.name, "error": f"{type(error).__name__}: {error}"}
        return None


def main() -> int:
    arguments = parser.parse_args()
    settings = ReadingSettings(study=arguments.study, r=arguments.r, model=backbone.name_of(arguments.model))
    try:
        documents = load_table(arguments.table, settings)
        host, _, port = (arguments.address or "").removeprefix("ray://").rpartition(":")
        if host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        local = {"num_cpus": arguments.actors * arguments.cpus, "object_store_memory": 80 * 2**20}
        ray.init(address=arguments.address, log_to_driver=False, **({} if arguments.address else local))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    folder = str(Path(arguments.library).resolve())
    each_gets = {"num_cpus": arguments.cpus, "num_gpus": arguments.gpus}
    pool = ActorPool([Teacher.options(**each_gets).remote(arguments.model, folder) for _ in range(arguments.actors)])
    for document in documents:
        pool.submit(lambda actor, document: actor.teach.remote(document), document)
    failures, done = [], 0
    while pool.has_next():
        try:
            failure = pool.get_next_unordered()
            failures += [failure] if failure else []
        except RayActorError as error:
            reason = " ".join(str(error).split())[:200]
            failures.append({"line": 0, "name": None, "error": f"an actor ended {RETRIES + 1} times: {reason}"})
        done += 1
        print(f"\r{done} of {len(documents)}, {len(failures)} failed", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    Path(folder, FAILURES).write_text("".join(json.dumps(each) + "\n" for each in failures), encoding="utf-8")
    ray.shutdown()
    return 3 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
