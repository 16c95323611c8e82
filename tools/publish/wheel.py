"""The wheel that one would publish, and its checksum: `make wheel`, or python tools/publish/wheel.py --out dist

Built from the last commit, not from what lies around, with the commit's time on every file: the same commit and the
same setuptools make the same bytes. A tag of that commit must be the version in __init__.py.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    arguments = parser.parse_args()
    problem, notices = judge(version(), git("tag", "--points-at", "HEAD").split(), git("status", "--porcelain"))
    for line in notices:
        print(f"note: {line}", file=sys.stderr)
    if problem:
        print(problem, file=sys.stderr)
        return 1
    wheel = build(arguments.out)
    print(f"{wheel}\n{checksums(arguments.out)}")
    return 0


def version() -> str:
    """As the last commit has it."""
    found = re.search(r'^__version__ = "(.+)"$', git("show", "HEAD:./__init__.py"), re.MULTILINE)
    assert found is not None
    return found[1]


def judge(version: str, tags: list[str], changes: str) -> tuple[str, list[str]]:
    """(what forbids to publish, what should be known) of the last commit's tags and what `git status` lists."""
    notices = ["uncommitted changes are not in the wheel"] if changes.strip() else []
    names = [tag for tag in tags if re.fullmatch(r"v\d.*", tag)]
    if names and f"v{version}" not in names:
        return f"the commit's tag is {names[0]}, __init__.py says {version}: change one of them", notices
    if not names:
        notices.append(f"the commit has no tag v{version}: set it before you publish")
    return "", notices


def build(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "built"
        archive = subprocess.run(["git", "archive", "HEAD", "."], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(source, filter="data")
        os.umask(0o022)
        for path in source.rglob("*"):  # whatever umask git had
            path.chmod(0o755 if path.is_dir() else 0o644)
        # Built with the setuptools that came with torch: nothing is downloaded.
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(built), str(source)]
        subprocess.run([*pip, *options], check=True, env=environment)
        (wheel,) = built.glob("*.whl")
        return Path(shutil.copyfile(wheel, out / wheel.name))


def checksums(folder: Path) -> Path:
    """SHA256SUMS of every wheel in the folder, as `sha256sum --check` reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.glob("*.whl"))]
    file = folder / "SHA256SUMS"
    file.write_text("".join(lines))
    return file


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
