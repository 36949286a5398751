"""Run the commands of a GitHub Actions job on a clean clone of this checkout, in a new virtual environment.

Usage: run_job.py WORKFLOW JOB [matrix.KEY=VALUE ...] [env.KEY=VALUE ...]

matrix.KEY and env.KEY replace values of the job's matrix and `env`, such as a package index that this machine cannot
reach. Steps that use an action are printed and skipped: the clone replaces checkout, and the virtual environment, made
with this interpreter, replaces setup-python. Of the caller's environment variables, commands see PATH, HOME, LANG and
PIP_* only.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def filled(text, values):
    """Replace ${{ expressions }} in a text by their values; KeyError if one has no value."""
    return EXPRESSION.sub(lambda found: values[found[1]], str(text))


def main(workflow, job_name, *settings):
    values = dict(s.split("=", 1) for s in settings)
    hosted = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())
    job = hosted["jobs"][job_name]
    with tempfile.TemporaryDirectory() as folder:
        clone, environment = Path(folder, "clone"), Path(folder, "venv")
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        venv.create(environment, with_pip=True)
        kept = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG") or k.startswith("PIP_")}
        env = kept | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "CI": "true", "GITHUB_ACTIONS": "true"}
        for key, value in {**hosted.get("env", {}), **job.get("env", {})}.items():
            env[key] = values.get(f"env.{key}", filled(value, values))
        for step in job["steps"]:
            if "run" not in step:
                print(f"left out: {step['uses']}", flush=True)
                continue
            command = filled(step["run"], values)
            print(f"$ {command}", flush=True)
            shell = ["bash", "-e", "-o", "pipefail", "-c", command]
            if code := subprocess.run(shell, check=False, cwd=clone, env=env).returncode:
                sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
