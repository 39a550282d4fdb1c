"""The command line: `forge-run MESH.yaml ...`, and `forge run|plan MESH.yaml ...` for the same;
`forge ablate MESH.yaml` for its channels compared ; `forge sweep SWEEP.yaml` for
anything else ; `forge selfstudy MESH.yaml`
for questions about documents (forge_run.selfstudy); `forge status|scale|...` for a run that runs
(forge_run.control); `forge eval`, `forge frontier`, `forge serve`, `forge cartridges`, `forge
convert` and `forge inspect` for what came of one; `forge k8s render` for the manifests of a mesh
(forge_run.k8s).

Only argparse is imported here: `--help` and a bad spec answer in well under a second. pydantic
comes with the spec, torch and Monarch with the run, gRPC with a call to one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_run.cartridges import add_cartridges
from forge_run.control import add_commands
from forge_run.convert import add_formats
from protocols.errors import ForgeError

INTERRUPTED = 130  # what a shell expects of a process that Ctrl-C ended


def forge_run(argv: Sequence[str] | None = None) -> int:
    """`forge-run MESH.yaml [options]`: run a mesh. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="forge-run",
        description="Train the cartridges of a mesh file on policy, or print its plan.",
    )
    _add_run_options(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and start nothing"
    )
    return _guarded(parser.parse_args(argv))


def forge(argv: Sequence[str] | None = None) -> int:
    """`forge run MESH.yaml` is forge-run, `forge plan MESH.yaml` its --dry-run; the other commands
    ask a run that runs."""
    parser = argparse.ArgumentParser(prog="forge", description="Cartridge Forge.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a mesh, as forge-run does")
    _add_run_options(run)
    run.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    plan = commands.add_parser("plan", help="print a mesh's resolved plan and start nothing")
    _add_run_options(plan)
    plan.add_argument(
        "--sizing", action="store_true", help="memory, item by item, and bytes of a step alone"
    )
    plan.add_argument("--json", action="store_true", help="the tables as JSON")
    plan.set_defaults(dry_run=True)
    ablate = commands.add_parser("ablate", help="run a mesh with and without its channels, compare")
    _add_mesh_options(ablate)
    ablate.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="seeds of each arm (default: 3)"
    )
    ablate.set_defaults(act=_ablate)
    sweep = commands.add_parser("sweep", help="run a mesh over axes, ways to train and seeds")
    sweep.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="what is compared")
    sweep.add_argument(
        "--set", dest="sets", metavar="KEY.PATH=VALUE", action="append", default=[],
        help="a key of all runs, under those of the sweep; repeatable",
    )  # fmt: skip
    sweep.add_argument("--seeds", type=int, metavar="N", help="seeds of each (default: the file's)")
    sweep.add_argument(
        "--jobs", type=int, metavar="N", help="runs side by side (default: by cores and threads)"
    )
    sweep.add_argument("--run-dir", type=Path, metavar="DIR", help="where runs are kept")
    sweep.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    sweep.set_defaults(act=_sweep)
    frontier = commands.add_parser(
        "frontier", help="compare test-time strategies over the cartridges of a run"
    )
    frontier.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    frontier.add_argument(
        "--arms", type=Path, metavar="FILE", help="strategies (default: configs/frontier.yaml)"
    )
    frontier.add_argument("--questions", type=int, metavar="N", help="most held-out questions")
    frontier.set_defaults(act=_frontier)
    _add_eval(commands)
    study = commands.add_parser(
        "selfstudy", help="write questions and answers about documents, for a run or other trainers"
    )
    _add_mesh_options(study)
    study.add_argument(
        "--out", type=Path, metavar="DIR", help="where (default: RUN_DIR/<mesh name>/selfstudy)"
    )
    study.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    study.set_defaults(act=_selfstudy)
    serving = commands.add_parser("serve", help="serve a model with cartridges over HTTP")
    _add_mesh_and_sets(serving)
    serving.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    serving.set_defaults(act=_serve)
    add_cartridges(commands)
    add_formats(commands)
    _add_k8s(commands)
    _add_worker(commands)
    add_commands(commands)
    return _guarded(parser.parse_args(argv))


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_mesh_options(parser)
    parser.set_defaults(act=_run)
    parser.add_argument(
        "--resume",
        metavar="RUN",
        nargs="?",
        const="",
        help="go on with a run: its id or path, the latest, or `unfinished`: the latest if it "
        "did not finish, else a new one; write it after MESH.yaml",
    )


def _add_eval(commands: Any) -> None:
    evaluation = commands.add_parser(
        "eval", help="the cartridges of finished runs beside no, a cut and the whole document"
    )
    evaluation.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    evaluation.add_argument(
        "--spec", type=Path, metavar="FILE", help="what is measured (default: configs/eval.yaml)"
    )
    evaluation.add_argument("--questions", type=int, metavar="N", help="most questions")
    evaluation.add_argument(
        "--asked", metavar="FILE", help="SQuAD's or LongHealth's questions in place of the runs'"
    )
    evaluation.add_argument(
        "--arms",
        metavar="A,B",
        help="kinds of arms: none,document,on_policy (default: all)",
    )
    evaluation.add_argument(
        "--contamination", choices=("fail", "warn"),
        help="what training prompts that double the questions do (default: as the run's)",
    )  # fmt: skip
    evaluation.add_argument(
        "--out", type=Path, metavar="DIR",
        help="where (default: the run; of several, the folder eval beside the first)",
    )  # fmt: skip
    evaluation.set_defaults(act=_eval)


def _add_mesh_and_sets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "mesh", metavar="MESH.yaml", help="which roles run, where, with which config"
    )
    parser.add_argument(
        "--set",
        dest="sets",
        metavar="KEY.PATH=VALUE",
        action="append",
        default=[],
        help="override a key of the mesh or the config; VALUE is YAML; repeatable",
    )


def _add_k8s(commands: Any) -> None:
    k8s = commands.add_parser("k8s", help="a mesh as Kubernetes manifests")
    render = k8s.add_subparsers(required=True, metavar="VERB").add_parser(
        "render", help="write the manifests of a mesh, or of a server; applies nothing"
    )
    _add_mesh_and_sets(render)
    render.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("deploy/k8s"),
        help="where they are written (default: deploy/k8s)",
    )  # fmt: skip
    render.set_defaults(act=_k8s_render)


def _add_worker(commands: Any) -> None:
    worker = commands.add_parser("worker", help="lend this host to runs, until SIGTERM")
    worker.add_argument(
        "--address", metavar="tcp://HOST:PORT[@tcp://LISTEN:PORT]",
        help="how others reach this host, and where it listens if not there; the port after it is "
        "used too (default: this host's name in DNS, and $MONARCH_PORT or 26600)",
    )  # fmt: skip
    worker.add_argument(
        "--grace", type=float, default=25.0, metavar="SECONDS",
        help="most time for runs to leave, after SIGTERM (default: 25)",
    )  # fmt: skip
    worker.set_defaults(act=_worker)


def _add_mesh_options(parser: argparse.ArgumentParser) -> None:
    _add_mesh_and_sets(parser)
    parser.add_argument(
        "--config",
        dest="overlays",
        metavar="FILE",
        action="append",
        default=[],
        help="lay a YAML file over the config, before --set; repeatable",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where runs are kept, as DIR/<mesh name>/<run> (default: runs)",
    )


def _guarded(options: argparse.Namespace) -> int:
    try:
        code: int = options.act(options)
        return code
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    from forge_run.runnable import require_runnable
    from protocols.spec_loading import load_spec
    from services.telemetry.hub import require_sinks

    loaded = load_spec(options.mesh, overlays=options.overlays, sets=options.sets)
    if options.dry_run:
        from forge_run.plan import as_json, plan, render, size_plan

        whole = not getattr(options, "sizing", False)  # forge-run has neither option
        sections = plan(loaded.spec, loaded.place) if whole else size_plan(loaded.spec)
        if getattr(options, "json", False):
            sys.stdout.write(as_json(sections))
        else:
            sys.stdout.write(render(sections, terminal=sys.stdout.isatty()))
        return 0
    require_runnable(loaded.spec, loaded.place)
    require_sinks(loaded.spec)
    if loaded.spec.learn.self_study is not None:
        from forge_run.plan_documents import require_documents

        for line in require_documents(loaded.spec.learn):
            print(line, file=sys.stderr)

    from forge_run.run import run

    return run(loaded.spec, run_dir=options.run_dir, resume=options.resume)


def _serve(options: argparse.Namespace) -> int:
    from forge_run import serve
    from protocols.spec_loading import load_serve

    loaded = load_serve(options.mesh, sets=options.sets)
    if options.dry_run:
        from forge_run.plan import render

        sys.stdout.write(render(serve.plan(loaded), terminal=sys.stdout.isatty()))
        return 0
    return serve.serve(loaded)


def _worker(options: argparse.Namespace) -> int:
    from services.worker import main

    main(options.address, options.grace)


def _k8s_render(options: argparse.Namespace) -> int:
    from forge_run.k8s import command

    for path in command(options.mesh, options.sets, options.out):
        print(path)
    return 0


def _ablate(options: argparse.Namespace) -> int:
    from forge_run.experiments.ablation import command
    from forge_run.plan import render

    sections = command(
        options.mesh,
        overlays=options.overlays,
        sets=options.sets,
        seeds=options.seeds,
        run_dir=options.run_dir,
    )
    sys.stdout.write(render(sections, terminal=sys.stdout.isatty()))
    return 0


def _sweep(options: argparse.Namespace) -> int:
    from forge_run.experiments.sweep import command
    from forge_run.plan import render

    sections = command(
        options.sweep, sets=options.sets, seeds=options.seeds, jobs=options.jobs,
        run_dir=options.run_dir, dry_run=options.dry_run,
    )  # fmt: skip
    sys.stdout.write(render(sections, terminal=sys.stdout.isatty()))
    return 0


def _selfstudy(options: argparse.Namespace) -> int:
    from forge_run.selfstudy import command
    from protocols.spec_loading import load_spec

    loaded = load_spec(options.mesh, overlays=options.overlays, sets=options.sets)
    if options.dry_run:
        from forge_run.plan import plan, render

        sys.stdout.write(render(plan(loaded.spec, loaded.place), terminal=sys.stdout.isatty()))
        return 0
    home = (options.run_dir or Path("runs")) / loaded.spec.mesh.name
    for line in command(
        loaded.spec,
        options.out or home / "selfstudy",
        show=lambda line: print(line, file=sys.stderr, flush=True),
    ):
        print(line)
    return 0


def _frontier(options: argparse.Namespace) -> int:
    from forge_run.frontier import command
    from forge_run.plan import render

    sections = command(
        options.run,
        arms=options.arms,
        questions=options.questions,
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )
    sys.stdout.write(render(sections, terminal=sys.stdout.isatty()))
    return 0


def _eval(options: argparse.Namespace) -> int:
    from forge_run.evaluate import command
    from forge_run.plan import render

    sections = command(
        options.runs,
        spec=options.spec,
        questions=options.questions,
        asked=options.asked,
        arms=options.arms,
        contamination=options.contamination,
        out=options.out,
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )
    sys.stdout.write(render(sections, terminal=sys.stdout.isatty()))
    return 0
