"""Twenty tasks for judging the layout: guess from paths alone which file a change belongs to.

    python -m tests.twenty_tasks                    print the tasks and the paths
    python -m tests.twenty_tasks --score FILE       score guesses, a line each: "3: path/to/file.py"

The tasks are subjects of commits that changed the behaviour of one to three product files, drawn
with a fixed seed from the last 200 commits before the files moved into their current folders. A
guess is right if it names one of those files by its present name. Results are in
`tests/twenty_tasks.md`.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
from pathlib import Path

BEFORE_MOVE = "f2f24db"
SEED = 51
NOT_BEHAVIOUR = re.compile(
    r"(?i)\b(tests?|docs?|notes?|comments?|read once more|blank|list of files)\b"
)
HOUSES = ("attention_kernels", "attention_replay", "capture", "models", "replay")


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def present_names() -> dict[str, str]:
    """Return each file's present path by its path before the move; deleted files are left out."""
    renames = git("diff", "--name-status", "--find-renames=30%", BEFORE_MOVE, "HEAD")
    changed = [line.split("\t") for line in renames]
    moved = {fields[1]: fields[-1] for fields in changed if fields[0][0] == "R"}
    deleted = {fields[1] for fields in changed if fields[0] == "D"}
    return {
        path: moved.get(path, path)
        for path in git("ls-tree", "-r", "--name-only", BEFORE_MOVE)
        if path not in deleted
    }


def tasks() -> list[tuple[str, set[str]]]:
    """Return the subject of each drawn commit, and the present names of the files it changed."""
    names, candidates = present_names(), []
    for line in git("log", "-200", "--no-merges", "--format=%h %s", BEFORE_MOVE):
        commit, _, subject = line.partition(" ")
        files = git("show", "--name-only", "--format=", commit)
        product = [path for path in files if path.endswith(".py") and path.startswith(HOUSES)]
        present = {names[path] for path in product if path in names}
        if 1 <= len(product) <= 3 and present and not NOT_BEHAVIOUR.search(subject):
            candidates.append((subject, present))
    return random.Random(SEED).sample(candidates, 20)


def main() -> None:
    """Print the tasks, or score the guesses of a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--score", type=Path, metavar="FILE", help="file of guesses, one a line")
    given = parser.parse_args().score
    drawn = tasks()
    if given is None:
        for number, (subject, _) in enumerate(drawn, 1):
            print(f"{number}. {subject}")
        print()
        print("\n".join(path for path in git("ls-files", *HOUSES) if path.endswith(".py")))
        return
    guesses = dict(re.findall(r"^(\d+)[.:]\s*(\S+)", given.read_text(encoding="utf-8"), re.M))
    right = 0
    for number, (subject, files) in enumerate(drawn, 1):
        guess = guesses.get(str(number), "")
        right += guess in files
        verdict = "right" if guess in files else f"wrong: {', '.join(sorted(files))}"
        print(f"{number}. {subject}\n   {guess or 'no guess'} – {verdict}")
    print(f"{right} of {len(drawn)} right")


if __name__ == "__main__":
    main()
