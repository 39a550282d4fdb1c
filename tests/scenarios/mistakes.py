"""What people get wrong on the command line, each with a part of the answer."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHIPPED = ", ".join(sorted(mesh.stem for mesh in (REPOSITORY / "meshes").glob("*.yaml")))

ROWS = "run examples/gsm8k_like/mesh.yaml --set model.path=models/clinic-clerk --set data.path="
SUMS = f"{ROWS}tests/data/sums.jsonl"

MISTAKES: dict[str, str] = {
    # Rows and rewards.
    f"{ROWS}/no/such.jsonl": "there is no file /no/such.jsonl; check data.path (data.source jsonl)",
    f"{ROWS}configs/eval.yaml": "eval.yaml:1: is no JSON (Expecting value",
    f"{SUMS} --set data.rows.columns.prompt=ask":
        "sums.jsonl:1: there is no column 'ask' (data.rows.columns.prompt); the row has question",
    f"{SUMS} --set data.held_out=1.0": "of 12 rows none is left to train on with data.held_out 1",
    f'{SUMS} --set reward=[{{"python":"nowhere:f"}}]':
        "reward[0]: nowhere:f cannot be imported: there is no module nowhere, in ",
    f'{SUMS} --set reward=[{{"python":"json:loads"}}]':
        "reward[0]: json:loads asks for 's', which no row has; known are answer, completion",
    f"{SUMS} --set reward=[]": "reward must be given with episodes of rows, which have none of",
    f"{SUMS} --set data.source=hub --set data.path=a/b --set data.rows.endpoint=http://127.0.0.1:9":
        "the hub at http://127.0.0.1:9 does not do it for a/b",
    # A file of another kind.
    "run configs/longhealth.yaml":
        "configs/longhealth.yaml is a learning config, and a mesh belongs here; give "
        "meshes/longhealth.yaml, or lay it over a mesh's config with "
        "--config configs/longhealth.yaml",
    "run configs/sweep_ablation.yaml":
        "is a sweep, and a mesh belongs here; run it with forge sweep configs/sweep_ablation.yaml",
    "run configs/eval.yaml":
        "configs/eval.yaml is an evaluation, and a mesh belongs here; use it with "
        "forge eval RUN --spec configs/eval.yaml",
    "run meshes/serve.yaml":
        "meshes/serve.yaml is a server, and a mesh belongs here; serve it with "
        "forge serve meshes/serve.yaml",
    "serve meshes/longhealth.yaml":
        "meshes/longhealth.yaml is a mesh, and a server belongs here; train it with "
        "forge-run meshes/longhealth.yaml",
    "serve configs/longhealth.yaml": "is a learning config, and a server belongs here",
    "sweep meshes/longhealth.yaml": "is a mesh, and a sweep belongs here",
    "run longhealt":
        f"there is no mesh longhealt: expected a file, or one of the shipped {SHIPPED}; check",
    "run no.yaml": "there is no file no.yaml; check the path",
    "run meshes": "cannot read meshes: Is a directory; give a YAML file",
    # A key of another name, or in another place.
    "run longhealth --set learning_rate=0.1": "did you mean train.lr?",
    "run longhealth --set lr=0.1": "did you mean train.lr?",
    "run longhealth --set train.learning_rate=0.1": "did you mean train.lr?",
    "run longhealth --set train.stepps=1": "did you mean steps?",
    "run longhealth --set batch_size=1": "did you mean rollout.prompts?",
    "run longhealth --set rollout.max_new_tokens=1": "did you mean max_tokens?",
    "run longhealth --set epochs=1": "did you mean train.steps?",
    "run longhealth --set cartridge.num_tokens=1": "did you mean tokens?",
    "run longhealth --set replicas=2": "did you mean roles.generator.replicas?",
    "run longhealth --set train.temperature=1": "did you mean rollout.temperature?",
    "run longhealth --set quux=1": "unknown key quux at --set quux=1; known: name, config, hosts",
    "explain learning_rate": "there is no key learning_rate; did you mean train.lr?",
    "explain rolout.prompts": "there is no key rolout.prompts; did you mean rollout.prompts?",
    "explain quux": "there is no key quux; see the sections: name, config",
    # A value that cannot be.
    "run longhealth --set train.steps=0": "steps must be >= 1: got 0 at --set train.steps=0",
    "run longhealth --set train.lr=-1": "lr must be > 0: got -1 at --set train.lr=-1 (train.lr)",
    "run longhealth --set train.steps=many": "steps must be a whole number: got 'many'",
    "run longhealth --set roles.generator.replicas=0":
        "replicas must be >= 1: got 0 at --set roles.generator.replicas=0",
    "run longhealth --set generator.backend=vlm": "did you mean vllm?",
    "run longhealth --set train.steps": "--set takes key.path=value: got 'train.steps'",
    "run longhealth --set cartridge.init=magic": "init must be one of first_tokens, random_text",
    "run longhealth --set evaluate.arms=[nobody]": "arms[0] must be one of none, document,",
    "run longhealth --set plane=carrier": "plane must be one of torchstore, shared_memory",
    "run longhealth --set data.held_out=2": "held_out must be <= 1: got 2",
    "run longhealth --set train.steps=5": "warmup_steps must be <= train.steps (5): got 8",
    "ui meshes --listen 0.0.0.0:8420": "--tls-cert and --tls-key must be given for 0.0.0.0:8420",
    "ui meshes --listen here": "--listen must be host:port: got here; write it as 127.0.0.1:8420",
    "ui meshes --token-env NO_SUCH_NAME": "the environment variable NO_SUCH_NAME must hold",
    # Something that is not there.
    "ui /no/such": "there is nothing at /no/such: give a run's directory or id, or a folder of",
    "sweep /no/such": "there is no file /no/such; check the path",
    "make /no/such": "there is no file or folder /no/such; check data.path",
    "models show nobody": "there is no model nobody; kept are",
    "k8s render /no/such": "there is no file /no/such; check the path",
    "run documents": "data.path: null cannot run, there are no documents",
    "run documents --set data.path=/no/such": "there is no file or folder /no/such; check data",
    "run documents --dry-run --set data.path=/no/such": "there is no file or folder /no/such",
    "run documents --set data.path=EMPTY": "no document in EMPTY: expected .txt, .md",
    "selfstudy documents --set data.path=/no/such": "there is no file or folder /no/such",
    "run longhealth --resume no_such": "no run to go on with",
    "run longhealth --continue no_such": "no run to go on with",
    "run longhealth --set model.path=/no/such": "model.path: /no/such has no config.json",
    "eval /no/such": "there is nothing at /no/such; name a run's directory, such as runs/",
    "frontier /no/such": "there is nothing at /no/such; name a run's directory",
    "ask patient_01 Why? --run /no/such": "there is nothing at /no/such; name a run's directory",
    "compare /no/such": "/no/such is no run directory and no file of answers",
    "convert /no/such DST --to hazy": "there is nothing at /no/such; check the path",
    "inspect /no/such": "there is nothing at /no/such; check the path",
    "cartridges add /no/such": "there is nothing at /no/such; check the path",
    "cartridges sync /no/such": "there is nothing at /no/such; check the path",
    "status no_such": "there is no run no_such: expected the path of a run's directory or an id",
    "status --run-dir /no/such": "no run is running under /no/such; list those that ended with",
}  # fmt: skip
