"""Ending descendants, orphans among them. In a process of its own: pytest has children too."""

import subprocess
import sys

PROGRAM = """
import subprocess, sys
from cluster.child_processes import adopt_orphans, end_descendants

adopt_orphans()
# A parent that prints the number of its child and ends; the child would run for ever.
parent = subprocess.run(
    [sys.executable, "-c",
     "import subprocess, sys;"
     "child = subprocess.Popen(['sleep', 'infinity'], stdout=subprocess.DEVNULL,"
     " stderr=subprocess.DEVNULL);"
     "print(child.pid, flush=True);"
     "child.returncode = 0"],
    stdout=subprocess.PIPE, text=True, check=True)
kept = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
left = end_descendants(lambda p: p.name() != "cat", grace_s=%(grace)s, timeout_s=%(timeout)s)
print(parent.stdout.strip(), [p.pid for p in left], kept.poll())
kept.stdin.close()
kept.wait()
"""


def run(*, grace, timeout):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % {"grace": grace, "timeout": timeout}],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pid, left, kept = done.stdout.split(maxsplit=2)
    return int(pid), left, kept.strip()


def test_orphan_is_ended_and_the_process_that_was_not_chosen_is_not():
    _, left, kept = run(grace=0, timeout=30)
    assert (left, kept) == ("[]", "None")


def test_descendant_that_still_runs_in_the_end_is_named():
    pid, left, _ = run(grace=100, timeout=0)
    assert left == f"[{pid}]"
    subprocess.run(["kill", "-9", str(pid)], check=True)
