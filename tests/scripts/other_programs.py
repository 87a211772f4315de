"""Lets other programs, and C libraries, change files: they see their changes, and the user's files stay."""

import ctypes
import os
import shutil
import subprocess

import torch


def shell(command):
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.split()


torch.save({"x": torch.zeros(1000, device="cuda")}, "new.pt")
size = str(os.path.getsize("new.pt"))
assert shell("cp new.pt best.pt && stat -c %s best.pt") == [size]
assert shell("mkdir -p new/deep && cp new.pt new/deep/ && ls new/deep") == ["new.pt"]
assert shell("mv new.pt moved.pt && test ! -e new.pt && ls moved.pt") == ["moved.pt"]
assert shell("mv gone.txt elsewhere.txt && cat elsewhere.txt") == ["the", "user's"]
assert shell("rm -rf checkpoints") == []
changed = shell("echo more >> log.txt; sed -i s/old/changed/ log.txt; cat log.txt")
assert changed == ["changed", "line", "more"]
assert shell("touch -d 2001-01-01 log.txt; chmod 777 log.txt; ln log.txt hard; echo over > hard") == []
assert shell("tar cf archive.tar new && tar tf archive.tar | wc -l; truncate -s 0 gone.txt") == ["3"]
assert shell("cd new/deep && echo x > here.txt && ls") == ["here.txt", "new.pt"]
assert len(shell("mktemp -d new/inXXXXXX")) == 1
if shutil.which("git"):
    shell("git add log.txt && git -c user.name=n -c user.email=e commit -qm saved && git log --oneline")
libc = ctypes.CDLL(None)
assert libc.mkdir(b"from-c", 0o777) == 0 and os.path.isdir("from-c")
assert libc.rename(b"moved.pt", b"from-c/moved.pt") == 0 and os.path.exists("from-c/moved.pt")
assert libc.rename(b"from-c/moved.pt", b"moved.pt") == 0 and libc.rmdir(b"from-c") == 0
assert libc.unlink(b"best.pt") == 0 and libc.unlink(b"nothing") == -1
shell("cp moved.pt best.pt")
print("all done")
