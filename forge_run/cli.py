"""Define the commands `forge-run MESH.yaml ...` and `forge COMMAND ...` in one table.

Only argparse is imported here, so `--help` and a bad spec take well under a second. Each command
imports the rest: pydantic for the spec, torch and Monarch for a run, gRPC for the control plane.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from cartridge_forge.forge_run.arguments import (
    GRACE_SECONDS,
    ElsewhereParser,
    ExistingPath,
    ShowVersion,
    whole_number,
)
from cartridge_forge.protocols.errors import DataError, ForgeError

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
INTERRUPTED = 130  # a shell's code for a process that Ctrl-C ended
FORMATS = ("forge", "hazy", "peft", "tokasaurus")
DTYPES = ("float32", "bfloat16", "float16")
ENGINES = ("transformers", "llama.cpp", "vllm", "sglang", "lmcache")

# The modules of commands that are not in forge_run.commands, by the name in `Command.handler`.
ELSEWHERE = {
    "compare": "cartridge_forge.plugins.evaluate.compare",
    "control": "cartridge_forge.plugins.watch.commands.control",
    "runs": "cartridge_forge.plugins.watch.commands.runs",
    "experiments.ablation": "cartridge_forge.forge_run.experiments.ablation",
    "experiments.env_check": "cartridge_forge.forge_run.experiments.env_check",
    "experiments.sweep": "cartridge_forge.forge_run.experiments.sweep",
    "ui.command": "cartridge_forge.plugins.watch.ui.command",
}

Option = tuple[str, dict[str, Any]]  # its name, and the arguments of add_argument


@dataclass(frozen=True)
class Command:
    """Describe a command, or with `verbs` a family of commands. `handler` is module:function; that
    of a plug-in, whose module is imported by then, may be the function. It gets the options by
    name, and returns the exit code or the tables to print."""

    help: str
    handler: str | Callable[..., Any] = ""
    options: Sequence[Option] = ()
    verbs: Mapping[str, Command] = field(default_factory=dict)


def _option(name: str, metavar: str | None = None, help: str | None = None, **more: Any) -> Option:
    return name, {"metavar": metavar, "help": help, **more}


def _there(name: str, metavar: str, help: str, **more: Any) -> Option:
    """Return an option that takes paths of files or directories that exist."""
    return _option(name, metavar, help, type=Path, action=ExistingPath, **more)


def _flag(name: str, help: str, **more: Any) -> Option:
    return name, {"action": "store_true", "help": help, **more}


def _sets(help: str) -> Option:
    return _option("--set", "KEY.PATH=VALUE", help, dest="sets", action="append", default=[])


MESH_AND_SETS = (
    _option(
        "mesh",
        "MESH.yaml",
        "which roles run, where, with which config: a file, or a shipped one's name",
    ),
    _sets("override a key of the mesh or the config; VALUE is YAML; repeatable"),
)
MESH = (
    *MESH_AND_SETS,
    _option("--config", "FILE", "lay a YAML file over the config, before --set; repeatable",
            dest="overlays", action="append", default=[]),
    _option("--run-dir", "DIR", "where runs are kept, as DIR/<mesh name>/<run> (default: runs)",
            type=Path),
)  # fmt: skip
RUN = (
    *MESH,
    _option("--resume", "RUN", "go on with a run: its id or path, the latest, or `unfinished`: the "
            "latest if it did not finish, else a new one; write it after MESH.yaml",
            nargs="?", const=""),
    _option("--continue", "RUN", "a new run that starts from the last cartridges of this one: its "
            "id or path, or `latest`; another number of steps, other data, a fresh optimiser",
            dest="continues"),
    _flag("--no-baselines", "train and measure on policy alone: no other arm of evaluate.arms",
          dest="alone"),
    _option("--grace", "SECONDS", "most time for the step in progress to end and its checkpoint to "
            "be written, after SIGTERM or Ctrl-C (default: 6)", type=float, default=GRACE_SECONDS),
)  # fmt: skip
DRY_RUN = _flag("--dry-run", "print the plan and start nothing")
FORGE_RUN = Command(
    "Train the cartridges of a mesh file on policy, or print its plan.",
    "run:run",
    (*RUN, _flag("--dry-run", "print the resolved plan and start nothing")),
)
LIBRARY = (
    _option("--serve", "MESH.yaml",
            "the server whose library and model they are for (default: meshes/serve.yaml)",
            dest="mesh", default="meshes/serve.yaml"),
    _sets("override a key of it, such as library=DIR"),
)  # fmt: skip
NAMED = "NAME, NAME@VERSION or NAME@TAG"
CARTRIDGE = _option("cartridge", "CARTRIDGE", NAMED)
OF_NAME = _option("name", "NAME", "of this cartridge alone", nargs="?")
SOURCE = "a cartridge of any format, a version in a library, a run or one of its checkpoints"
CHOICE = (
    _option("--name", "NAME", "which cartridge of a run that has several"),
    _option("--model", "DIR", "refuse a cartridge that is not for this model", type=Path),
)
TARGET = (
    _option("run", "RUN", "a run's directory or id; left out, the one started last that still runs",
            nargs="?"),
    _option("--run-dir", "DIR", "where runs are kept", type=Path, default=Path("runs")),
    _option("--address", "HOST:PORT", "a run on another host, instead of RUN"),
    _option("--ca", "FILE", "PEM certificates that the run's must come from", type=Path),
    _option("--cert", "FILE", "PEM certificate that this command shows the run", type=Path),
    _option("--key", "FILE", "its private key", type=Path),
    _option("--token-env", "NAME", "environment variable that holds the run's token"),
)  # fmt: skip

CARTRIDGES = {
    "add": Command("add the cartridges of a run, or a cartridge of any format", "cartridges:add", (
        *LIBRARY,
        _there("path", "PATH", "a run, a checkpoint, or a cartridge"),
        _option("--name", "NAME[=NEW]", "this cartridge of the run alone, under another name; "
                "repeatable (default: all). Of a file, the name it gets",
                dest="names", action="append", default=[]),
    )),
    "sync": Command("add those of every finished run, each run once", "cartridges:sync", (
        *LIBRARY, _there("runs", "RUNS", "such as runs, or runs/longhealth"),
    )),
    "list": Command("every version, with its tags", "cartridges:list_versions",
                    (*LIBRARY, OF_NAME)),
    "tag": Command("call a version by a word: clinic-reader+NAME@TAG", "cartridges:tag", (
        *LIBRARY, CARTRIDGE, _option("tag", "TAG", "letters, digits and _ . -, a letter first"),
        _flag("--remove", "call it so no more"),
    )),
    "words": Command("give a version the text that `auto` chooses it by", "cartridges:words", (
        *LIBRARY, CARTRIDGE,
        _option("files", "FILE", "texts, PDFs or folders of them", type=Path, nargs="+"),
    )),
    "document": Command("give a version the text that it replaces, to verify its answers by",
                        "cartridges:document", (
        *LIBRARY, CARTRIDGE,
        _option("file", "FILE", "a text or PDF", type=Path),
    )),
    "diff": Command("how far two cartridges are apart, layer by layer", "cartridges:diff", (
        *LIBRARY,
        *(_option(which, which.upper(), f"{NAMED}, or a path of any format") for which in "ab"),
    )),
    "drop": Command("remove a version, damaged or not", "cartridges:drop", (*LIBRARY, CARTRIDGE)),
    "prune": Command("drop old versions; those with a tag are kept", "cartridges:prune", (
        *LIBRARY, OF_NAME, _option("--keep", "N", "newest kept (default: 3)", type=int, default=3),
        _flag("--dry-run", "say what would go; drop nothing"),
    )),
    "push": Command("commit a version to the Hugging Face hub", "cartridges:push", (
        *LIBRARY, CARTRIDGE, _option("repo", "OWNER/REPO", "made if it is not there"),
        _flag("--private", "made for nobody else to see"),
        _option("--license", "ID", "of the cartridge, for its card: an identifier of the hub"),
        _option("--base-model", "OWNER/NAME", "the base model on the hub, for the card"),
    )),
    "pull": Command("add a cartridge of the hub, of any format", "cartridges:pull", (
        *LIBRARY, _option("repo", "OWNER/REPO"),
        _option("--revision", "R", "branch, tag or commit (default: main)"),
        _option("--name", "NAME", "what it is called here (default: REPO)"),
    )),
}  # fmt: skip
MODELS = {
    "add": Command("keep a model under a name, for model.path", "models:add", (
        _option("source", "MODEL",
                "smollm2-135m, gemma3-270m, a file ending in .gguf, a directory, or OWNER/NAME of "
                "the hub"),
        _option("--name", "NAME", "what it is called here (default: its own name)"),
        _option("--dtype", None, "of weights read from GGUF (default: float32)",
                choices=DTYPES[:2], default="float32"),
        _flag("--if-missing", "do nothing where a model of that name is kept"),
        _flag("--accept-license", "you accept the model's terms, which are printed without this"),
    )),
    "list": Command("the models that are kept", "models:list_models"),
    "check": Command("whether a model is computed right here, against its own forward pass",
                     "models:check", (
        _option("name", "MODEL", "a name of `forge models list`, a directory or a hub id"),
    )),
    "show": Command("a kept model's hash, licence, source and shape", "models:show", (
        _option("name", "NAME"),
        _option("--wait", "SECONDS", "until it is kept, at most so long (default: not at all)",
                type=float, default=0.0),
    )),
}  # fmt: skip
K8S = {
    "render": Command("write the manifests of a mesh, or of a server; applies nothing",
                      "k8s:command", (
        *MESH_AND_SETS,
        _there("--values", "FILE", "of the cluster: image, namespace, GPUs, storage, model, queue "
               "(deploy/values.yaml has the defaults)"),
        _option("--out", "DIR", "where they are written (default: deploy/k8s)", type=Path,
                default=Path("deploy/k8s")),
    )),
    "chart": Command("write a Helm chart of a mesh, or of a server, for any cluster's values",
                     "k8s:chart_command", (
        *MESH_AND_SETS,
        _option("--out", "DIR", "where it is written (default: chart)", type=Path,
                default=Path("chart")),
    )),
    "check": Command("find faults in manifests, rendered or your own; asks no cluster",
                     "k8s:check_command", (
        _option("paths", "DIR|FILE", "folders, files, or - for standard input; kustomizations are "
                "built", nargs="+"),
    )),
}  # fmt: skip
ENV = {
    "check": Command("play a few episodes, and say what would not train",
                     "experiments.env_check:command", (
        _option("target", "URL|ID|MODULE:NAME|MESH.yaml", "an OpenEnv server, a verifiers taskset, "
                "a class of yours (from the current folder), or the environments of a mesh"),
        _sets("a key of the environment, such as action=tool; of a mesh, any of its keys; "
              "repeatable"),
        _option("--tasks", "N", "tasks that each agent plays (default: 4)", type=whole_number,
                default=4),
        _option("--turns", "N", "most turns of an episode (default: 8, or the mesh's)",
                type=whole_number),
        _option("--seed", "N", "of tasks and the random agent (default: 0)", type=int, default=0),
        _there("--script", "FILE", "the scripted agent's actions, one a line; the last again and "
               "again"),
        _flag("--json", "print JSON, for programs", dest="as_json"),
    )),
}  # fmt: skip
COMMANDS = {
    "run": Command("run a mesh, as forge-run does", "run:run", (*RUN, DRY_RUN)),
    "plan": Command("print a mesh's resolved plan and start nothing", "run:plan", (
        *RUN, _flag("--sizing", "memory, item by item, and bytes of a step alone"),
        _flag("--json", "the tables as JSON", dest="as_json"),
    )),
    "doctor": Command("which packages are installed, which are missing, and what each is for",
                      "doctor:command"),
    "explain": Command("type, default, bounds and meaning of a key of meshes and configs",
                       "explain:command", (_option("key", "KEY", "such as train.lr, or train"),)),
    "ablate": Command("run a mesh with and without its channels, compare",
                      "experiments.ablation:command", (
        *MESH, _option("--seeds", "N", "seeds of each arm (default: 3)", type=int, default=3),
    )),
    "sweep": Command("run a mesh over axes, ways to train and seeds", "experiments.sweep:command", (
        _option("path", "SWEEP.yaml", "what is compared: a file, or a shipped one's name"),
        _sets("a key of all runs, under those of the sweep; repeatable"),
        _option("--seeds", "N", "seeds of each (default: the file's)", type=int),
        _option("--jobs", "N", "runs side by side (default: by cores and threads)", type=int),
        _option("--run-dir", "DIR", "where runs are kept", type=Path),
        DRY_RUN,
    )),
    "frontier": Command("compare test-time strategies over the cartridges of a run",
                        "frontier:command", (
        _there("run", "RUN", "a run directory"),
        _option("--arms", "FILE", "strategies (default: configs/frontier.yaml)", type=Path),
        _option("--questions", "N", "most held-out questions", type=int),
    )),
    "eval": Command("the cartridges of finished runs beside no, a cut and the whole document",
                    "evaluate:command", (
        _there("runs", "RUN", "run directories", nargs="+"),
        _option("--spec", "FILE", "what is measured (default: configs/eval.yaml)", type=Path),
        _option("--questions", "N", "most questions", type=int),
        _option("--asked", "FILE", "SQuAD's or LongHealth's questions in place of the runs'"),
        _option("--arms", "A,B",
                "kinds of arms: none,document,on_policy (default: all but routed)"),
        _option("--contamination", None, "what training prompts that double the questions do "
                "(default: as the run's)", choices=("fail", "warn")),
        _flag("--unfinished", "also of runs that did not finish: their last checkpoints"),
        _option("--out", "DIR",
                "where (default: the run; of several, the folder eval beside the first)",
                type=Path),
    )),
    "bench": Command("ways to compress your documents, each with equal memory", "bench:command", (
        _there("documents", "DOCUMENTS", "a folder or file of text"),
        _there("questions", "QUESTIONS", "a file in SQuAD's form, whose titles name the documents"),
        _option("--model", "NAME", "a name of `forge models list` or a directory "
                "(default: smollm2-135m)", default="smollm2-135m"),
        _option("--tokens", "P", "tokens of what stands for a document (default: 128)",
                type=whole_number, default=128),
        _option("--methods", "A,B", "which (default: all)"),
        _option("--steps", "N", "of the trained ones (default: 40)", type=whole_number, default=40),
        _option("--most", "T", "tokens that a document is cut to (default: 2000)",
                type=whole_number, default=2000),
        _option("--questions", "N", "about a document, at most (default: 16)", type=whole_number,
                default=16, dest="questions_each"),
        _option("--out", "DIR", "where bench.json is written (default: bench)", type=Path,
                default=Path("bench")),
    )),
    "compare": Command("paired differences between the arms of a run, or between runs",
                       "compare:command", (
        _option("runs", "RUN", "run directories, or files of answers; runs of the same settings "
                "over other documents are pooled", type=Path, nargs="+"),
        _option("--arm", "ARM", "an arm to compare; repeatable (default: all of one run, the "
                "trained ones of several)", dest="arms", action="append", default=[]),
        _option("--metric", None, "what is compared; repeatable (default: all that both have)",
                dest="metrics", action="append", default=[], choices=("right", "nll", "reward")),
        _flag("--sampled", "sampled answers, not the greedy ones"),
        _flag("--json", "print JSON, for programs", dest="as_json"),
    )),
    "env": Command("environments that episodes are played in", verbs=ENV),
    "selfstudy": Command(
        "write questions and answers about documents, for a run or other trainers",
        "selfstudy:selfstudy", (
        *MESH, _option("--out", "DIR", "where (default: RUN_DIR/<mesh name>/selfstudy)", type=Path),
        _flag("--dry-run", "print the plan and write nothing"),
    )),
    "make": Command("cartridges of a folder of text, within so many minutes", "make:command", (
        _option("folders", "FOLDER",
                "folders, files or patterns: text, .html, .pdf, .docx and others", nargs="+"),
        _option("--model", "NAME", "a name of `forge models list`, a directory or a hub id "
                "(default: smollm2-135m)", default="smollm2-135m"),
        _option("--tokens", "P", "tokens of each cartridge (default: by --ratio 10, 32 to 512)",
                type=whole_number),
        _option("--ratio", "R", "document tokens for each of a cartridge's", type=float),
        _option("--minutes", "M", "most time, about (default: 20)", type=float, default=20.0),
        _option("--name", "NAME", "what it is called in the library; of several documents "
                "NAME.DOCUMENT (default: the folder's name)"),
        _option("--serve", "MESH.yaml", "the server whose library it is added to (default: "
                "meshes/serve.yaml)", dest="mesh", default="meshes/serve.yaml"),
        _sets("override a key of meshes/documents.yaml or its config, after the plan; repeatable"),
        _option("--run-dir", "DIR", "where runs are kept (default: runs)", type=Path),
        _flag("--dry-run", "measure this machine, print the plan and start nothing"),
        _flag("--now", "in closed form, without training: seconds for an article"),
    )),
    "update": Command("bring a cartridge to a newer text of its document", "update:command", (
        _option("cartridge", "CARTRIDGE", NAMED),
        _there("file", "FILE", "the whole new text; with --append what is added behind the old"),
        _flag("--append", "FILE is added behind the text, as of a log or a chat"),
        _option("--minutes", "M", "train as long from the re-fit, about (default: no training)",
                type=float),
        *LIBRARY,
        _option("--run-dir", "DIR", "where runs are kept (default: runs)", type=Path),
    )),
    "serve": Command("serve a model with cartridges over HTTP", "serve:command",
                     (*MESH_AND_SETS, DRY_RUN)),
    "ask": Command("ask a cartridge, here or of a server", "ask:command", (
        *LIBRARY,
        _option("cartridge", "CARTRIDGE",
                f"{NAMED}; of `forge make`, its NAME; auto: the one the question is about"),
        _option("question", "QUESTION", "left out with -i", nargs="?"),
        ("-i", {"action": "store_true", "dest": "chat", "help": "a chat, until an empty line"}),
        _flag("--beside", "answer without the cartridge, over passages and with the document too"),
        _option("--verify", None, "after: mark the answer's tokens that the document would have "
                "changed; exact: the document's own answer, drafted by the cartridge",
                choices=("after", "exact")),
        _flag("--passages", "tell the document's passages that support the answer"),
        _option("--fallback", "C", "where the answer's confidence is under C, from 0 to 1, read "
                "passages of the document and answer again", type=float),
        _option("--retriever", None, "what ranks the passages that are read (default: bm25)",
                choices=("bm25", "embeddings"), default="bm25"),
        _there("--run", "RUN", "of this run, not of the library"),
        _option("--server", "URL", "of a running server, such as http://127.0.0.1:8000"),
        _option("--key-env", "NAME", "environment variable that holds the server's key"),
        _option("--max-tokens", "N", "most of the answer (default: 64)", type=int, default=64),
        _option("--temperature", "T", "0, the default, is greedy", type=float, default=0.0),
        _option("--seed", "N", "of the draws (default: 0)", type=int, default=0),
        _flag("--json", "print JSON, for programs", dest="as_json"),
    )),
    "mcp": Command("offer the library to an MCP client, over standard input and output",
                   "mcp:command", LIBRARY),
    "cartridges": Command("the library that `forge serve` serves", verbs=CARTRIDGES),
    "models": Command("base models by name", verbs=MODELS),
    "convert": Command("write a cartridge in another format", "convert:convert", (
        _there("source", "SRC", SOURCE),
        _option("target", "DST", "the file or directory to write", type=Path),
        _option("--to", None, "the format of DST", choices=FORMATS, required=True),
        _option("--dtype", None, "of DST (default: as it is)", choices=DTYPES),
        _flag("--force", "replace DST if it is there"),
        _flag("--strict", "refuse where something would be lost or not served"),
        *CHOICE,
        _option("--document-tokens", "T", "SRC is a KV cache that another program compacted from a "
                "document of T tokens: the position of the first token behind it",
                type=whole_number),
        _there("--text", "FILE", "with --document-tokens: biases of the cache are folded into keys "
               "by the model's queries on this text (default: on what it writes itself)"),
    )),
    "export": Command("write a cartridge for another engine to serve", "export:export", (
        *LIBRARY,
        _option("cartridge", "CARTRIDGE", f"{NAMED} of the library; or {SOURCE}"),
        _option("--for", None, "the engine", dest="engine", choices=ENGINES, required=True),
        _option("--out", "DIR", "the folder to write, which must not be there", type=Path,
                required=True),
        _option("--name", "NAME", "which cartridge of a run; what it is called"),
        _option("--dtype", None, "of the exported numbers (default: as they are)", choices=DTYPES),
    )),
    "inspect": Command("shapes, norms and provenance of a cartridge", "convert:inspect",
                       (_there("source", "PATH", SOURCE), *CHOICE)),
    "k8s": Command("a mesh as Kubernetes manifests", verbs=K8S),
    "certs": Command("make the certificates of a mesh's hosts", "certs:command", (
        _option("directory", "DIR", "of the mesh's own authority, made unless it is there",
                type=Path),
        _option("--host", "NAME[,NAME...]", "names and addresses of one host; its files are in the "
                "folder DIR/NAME; repeatable", dest="hosts", action="append", default=[]),
        _option("--days", "N", "days until they expire (default: 365)", type=whole_number,
                default=365),
    )),
    "worker": Command("lend this host to runs, until SIGTERM", "run:worker", (
        _option("--address", "tls://HOST:PORT[@tls://LISTEN:PORT]",
                "how others reach this host, and where it listens if not there; the port after it "
                "is used too (default: this host's name in DNS, and $MONARCH_PORT or 26600)"),
        _option("--tls", "DIR", "this host's ca.crt, tls.crt and tls.key: the worker serves those "
                "with a certificate of the same authority alone", type=Path),
        _flag("--insecure", "serve anyone, by plain TCP (tcp://) beyond loopback too"),
        _option("--grace", "SECONDS", "most time for runs to leave, after SIGTERM (default: 25)",
                type=float, default=25.0),
    )),
    "runs": Command("every run, how it ended and what it reached", "runs:command", (
        _option("--run-dir", "DIR", "where runs are kept", type=Path, default=Path("runs")),
        _flag("--json", "print JSON, for programs", dest="as_json"),
    )),
    "pull": Command("copy a run from an object store, for every other command", "runs:pull", (
        _option("url", "URL", "of the run, such as s3://bucket/runs/longhealth/RUN"),
        _option("--run-dir", "DIR", "where runs are kept", type=Path, default=Path("runs")),
    )),
    "ui": Command("watch and steer runs in a browser, also those that ended",
                  "ui.command:command", (
        _option("where", "RUN|FOLDER", "a run's directory or id, or a folder of runs (default: "
                "runs)", type=Path, nargs="?", default=Path("runs")),
        _option("--listen", "HOST:PORT", "where it serves (default: any free port of loopback)",
                dest="address", default="127.0.0.1:0"),
        _option("--token-env", "NAME", "environment variable that holds the pages' token (default: "
                "one is drawn and printed)"),
        _option("--tls-cert", "FILE", "PEM certificate, needed off loopback", type=Path),
        _option("--tls-key", "FILE", "PEM key of the certificate", type=Path),
    )),
    "status": Command("how a run stands, and its pools; or its result", "control:status", (
        _flag("--json", "print JSON, for programs", dest="as_json"),
        _flag("--watch", "again every second, until it ends"),
        *TARGET,
    )),
    "scale": Command("set how many replicas a role has", "control:scale", (
        _option("role", "ROLE", "generator, doc_teacher, ..."),
        _option("replicas", "N", "replicas it is to have", type=whole_number),
        *TARGET,
    )),
    "pause": Command("hold a run after the step in progress", "control:pause", TARGET),
    "resume": Command("let a paused run go on", "control:resume", TARGET),
    "checkpoint": Command("write a checkpoint after this step", "control:checkpoint", TARGET),
    "stop": Command("end a run after this step, with a checkpoint", "control:stop", TARGET),
    "events": Command("what happened in a run, as JSON lines", "control:events", (
        _flag("--follow", "go on with every event as it comes"),
        _option("--replay", "N", "how many of the last events come first (default: 20)",
                type=whole_number, default=20),
        *TARGET,
    )),
}  # fmt: skip


def forge_run(argv: Sequence[str] | None = None) -> int:
    """Run a mesh: `forge-run MESH.yaml [options]`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="forge-run", description=FORGE_RUN.help)
    return _main(parser, FORGE_RUN, argv)


def forge(argv: Sequence[str] | None = None) -> int:
    """Run one of `COMMANDS`, or one that a plug-in adds: `forge COMMAND ...`. Returns the exit
    code."""
    parser = argparse.ArgumentParser(prog="forge", description="Cartridge Forge.")
    word = next(iter(sys.argv[1:] if argv is None else argv), "-")
    added = {} if word in COMMANDS or word.startswith("-") else _of_plugins()
    return _main(parser, Command("", verbs={**COMMANDS, **added}), argv)


def _of_plugins() -> dict[str, Command]:
    """Return the commands that plug-ins add. Reading them takes a tenth of a second."""
    from cartridge_forge.protocols.plugins import known, resolve

    try:
        return {name: resolve("commands", name) for name in known("commands")}
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def parsed_elsewhere(words: Sequence[str]) -> dict[str, Any]:
    """Return the options, with the handler, of a command for another machine, such as
    `["forge", "worker"]`. Raises SpecError for a wrong one."""
    return vars(_parser_elsewhere(words[0]).parse_args(words[1:]))


@cache
def _parser_elsewhere(program: str) -> argparse.ArgumentParser:
    parser = ElsewhereParser(prog=program)
    command = FORGE_RUN if program == "forge-run" else Command("", verbs=COMMANDS)
    _fill(parser, command, "COMMAND")
    return parser


def _main(parser: argparse.ArgumentParser, command: Command, argv: Sequence[str] | None) -> int:
    parser.add_argument(
        "--version",
        action=ShowVersion,
        nargs=0,
        dest=argparse.SUPPRESS,
        help="print the version and leave",
    )
    _fill(parser, command, "COMMAND")
    code = _run_command(parser, argv)
    launch = sys.modules.get("cartridge_forge.forge_run.launch")
    if argv is None and launch is not None:  # a caller's own words leave its process alone
        launch.leave(code)
    return code


def _run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that `argv` names, None for this process's words. Returns the exit code."""
    # Runs, cartridges and answers hold what is in the documents, so they are their owner's alone.
    os.umask(0o077)
    sys.excepthook = _print_redacted
    try:
        options = vars(parser.parse_args(argv))
        handler = options.pop("handler")
        if isinstance(handler, str):
            module, _, function = handler.partition(":")
            module = ELSEWHERE.get(module, f"cartridge_forge.forge_run.commands.{module}")
            handler = getattr(import_module(module), function)
        reply = handler(**options)
        if isinstance(reply, int):
            return reply
        from cartridge_forge.plugins.statistics.formatting import render
        from cartridge_forge.protocols.secrets import redacted

        sys.stdout.write(redacted(render(reply, terminal=sys.stdout.isatty())))
        return 0
    except ForgeError as error:
        from cartridge_forge.protocols.secrets import redacted

        print(f"error: {redacted(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in FORBIDDEN or error.filename is None:
            raise
        message = f"{error.filename}: {error.strerror}; use a folder that you may read and write"
        print(f"error: {message}", file=sys.stderr)
        return DataError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _print_redacted(*raised: Any) -> None:
    """Print a traceback to stderr with secrets replaced, its chain included (`sys.excepthook`)."""
    import traceback

    from cartridge_forge.protocols.secrets import redacted

    sys.stderr.write(redacted("".join(traceback.format_exception(*raised))))


def _fill(parser: argparse.ArgumentParser, command: Command, metavar: str) -> None:
    """Give the parser the command's options and verbs."""
    for name, settings in command.options:
        parser.add_argument(name, **settings)
    if command.verbs:
        verbs = parser.add_subparsers(required=True, metavar=metavar)
        for name, verb in command.verbs.items():
            _fill(verbs.add_parser(name, help=verb.help), verb, "VERB")
    else:
        parser.set_defaults(handler=command.handler)
