"""Name secrets, read them where they are used, and keep them out of texts and of other processes.

    key_env: OPENAI_API_KEY                 an environment variable
    key_env: file:/run/secrets/openai       the text of a file

A spec holds such a name, never the secret, so nothing that is made of a spec can repeat one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, SecretStr
from pydantic_core import PydanticCustomError

from cartridge_forge.protocols.errors import SpecError

FILE = "file:"
HIDDEN = "a value that is not shown"  # what errors say they got where it may be a secret
REDACTED = "[secret]"
LOCAL_KEY = "FORGE_LOCAL_PROVIDER_KEY"  # no secret: clients of replay.local require some key
SHORTEST = 8  # characters of a secret that is searched for in texts

# Variables that any process of a run may need: the system, Python, libraries of numbers and of
# accelerators, and our own. Everything else a role has to be given by name.
ORDINARY = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_\w+|PWD|TMPDIR|TEMP|TMP|HOSTNAME|"
    r"LD_\w+|DYLD_\w+|MALLOC_\w+|GLIBC_\w+|XDG_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|COLUMNS|LINES|"
    r"(OMP|KMP|MKL|GOMP|OPENBLAS|NUMEXPR|TBB)_\w+|"
    r"(CUDA|NVIDIA|NCCL|GLOO|UCX|TORCH|PYTORCH|TRITON|VLLM|HIP|ROCR|ROCM|HSA)\w*|"
    r"(HYPERACTOR|MONARCH|TORCHSTORE|RUST|FORGE|HF|TRANSFORMERS|TOKENIZERS|SLURM|GRPC)_\w+|"
    r"(SSL_CERT|REQUESTS_CA|CURL_CA)\w*|no_proxy|NO_PROXY|COVERAGE_\w+|PYTEST_\w+"
)
SECRETIVE = re.compile(r"KEY|TOKEN(?!S|IZ)|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
PROXY = re.compile(r"(http|https|all)_proxy", re.IGNORECASE)  # may hold a user and a password
# Names that look like a secret's and are none: paths, sizes and switches.
HARMLESS = re.compile(r"\w*_TLS_KEY|HF_HUB_DISABLE_\w+")

# What is a secret by its own form: keys of well-known makers, headers, passwords in addresses (but
# no ports, as in tcp://name:26600@tcp://0.0.0.0:26600).
TELLING = re.compile(
    r"\b(?:sk|pk|rk|hf|gh[opsu]|github_pat|glpat|xox[abprs]|AKIA|AIza|eyJ)[-_A-Za-z0-9.]{16,}"
    r"|(?<=Bearer )\S{8,}|(?<=Basic )\S{8,}"
)
IN_ADDRESS = re.compile(r"(://[^/\s:@'\"]*:)(?!\d+@)[^/\s@'\"]+(?=@)")

_read: set[str] = set()  # every secret that this process has read, for `redacted`


class SecretMark:
    """Mark a type as the name of a secret, so that errors do not show what was given for it."""


MARK = SecretMark()


def _checked(value: str) -> str:
    """Return the name unchanged. The error does not repeat it: it may be the secret itself."""
    path = value.removeprefix(FILE)
    if path is not value and path.startswith("/"):
        return value
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        rule = "must be the name of an environment variable, or file: and an absolute path"
        remedy = "export the secret under a name and give that name"
        raise PydanticCustomError(
            "rule", "{rule}; {remedy}", {"rule": rule, "remedy": remedy, "got": HIDDEN}
        )
    return value


SecretName = Annotated[str, AfterValidator(_checked), MARK]


def secret_text(name: str) -> str:
    """Return the secret under this name without blanks around it; "" where there is none."""
    if name.startswith(FILE):
        try:
            text = Path(name.removeprefix(FILE)).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""
    else:
        text = os.environ.get(name, "")
    _read.add(text)
    return text


def read_secret(who: str, name: str, what: str, remedy: str = "") -> SecretStr:
    """Return the secret under this name, printable ASCII without blanks, as a header holds it.

    Raises SpecError, without the secret, where there is none or another: "`who`: the environment
    variable X must hold `what`, got none; export it".
    """
    text = secret_text(name)
    if not re.fullmatch(r"[!-~]+", text):
        path = name.removeprefix(FILE)
        source, act = (
            (f"the environment variable {name}", "export it")
            if path == name
            else (f"the file {path}", "write it there")
        )
        got = "something with blanks or beyond ASCII" if text else "none"
        raise SpecError(
            f"{who}: {source} must hold {what}, got {got}; {act}{', ' if remedy else ''}{remedy}"
        )
    return SecretStr(text)


def confined(environment: Mapping[str, str], needed: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that a process is given: ordinary ones that hold no secret by their
    name, and those in `needed`."""

    def is_ordinary(name: str, value: str) -> bool:
        if PROXY.fullmatch(name):
            return "@" not in value
        return bool(ORDINARY.fullmatch(name)) and not looks_secret(name)

    return {k: v for k, v in environment.items() if k in needed or is_ordinary(k, v)}


def redacted(text: str) -> str:
    """Return the text with every secret replaced that this process has read, has in an environment
    variable that looks like one by its name, or that looks like one itself."""
    named = (value for name, value in os.environ.items() if looks_secret(name))
    for secret in sorted({*_read, *named}, key=len, reverse=True):
        if len(secret) >= SHORTEST:  # a shorter one is in ordinary words
            text = text.replace(secret, REDACTED)
    return IN_ADDRESS.sub(rf"\1{REDACTED}", TELLING.sub(REDACTED, text))


def looks_secret(name: str) -> bool:
    """Return whether a variable or key is a secret's by its name."""
    return bool(SECRETIVE.search(name)) and not HARMLESS.fullmatch(name)


def redacted_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with its texts redacted."""
    return {k: redacted(v) if isinstance(v, str) else v for k, v in row.items()}
