"""Run the commands of a hosted job on a clean clone of this checkout, with an environment of its own.

Usage: run_job.py WORKFLOW JOB [KEY=VALUE ...]

The values replace `${{ matrix.KEY }}`. Steps that use an action are printed, and left out: the clone replaces checkout,
and a new virtual environment of this interpreter replaces setup-python. Commands see nothing of the environment that
runs this program but PATH, HOME and the settings of pip.
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
    """Return a text with the values of its expressions; those with no value are an error."""
    return EXPRESSION.sub(lambda found: values[found[1]], str(text))


def main(workflow, job_name, *settings):
    values = {f"matrix.{key}": value for key, value in (s.split("=", 1) for s in settings)}
    hosted = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())
    job = hosted["jobs"][job_name]
    with tempfile.TemporaryDirectory() as folder:
        clone, environment = Path(folder, "clone"), Path(folder, "venv")
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        venv.create(environment, with_pip=True)
        kept = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG") or k.startswith("PIP_")}
        env = kept | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "CI": "true", "GITHUB_ACTIONS": "true"}
        env |= {k: filled(v, values) for k, v in {**hosted.get("env", {}), **job.get("env", {})}.items()}
        for step in job["steps"]:
            if "run" not in step:
                print(f"left out: {step['uses']}", flush=True)
                continue
            command = filled(step["run"], values)
            print(f"$ {command}", flush=True)
            if code := subprocess.run(["bash", "-e", "-o", "pipefail", "-c", command], cwd=clone, env=env).returncode:
                sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
